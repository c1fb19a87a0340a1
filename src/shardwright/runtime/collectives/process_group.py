"""Collectives on plain tensors: shared memory where all ranks of a group are on one machine, else torch.distributed.

Ranks of one machine that use gloo send values over TCP, which takes several times as long as the sums themselves;
`shared_memory.py` avoids that. All ranks of a group choose the same path: by device, dtype and reduction, which are
equal on all ranks, and by what they agreed on at the first call in the group. Values on other devices, and groups
over several machines, of threads or of fake ranks, go through torch.distributed.

Each function starts a collective and returns what can be waited for; the memory of its arguments must not be
touched until then. Nothing here takes part in autograd.
"""

from __future__ import annotations

import fcntl
import functools
import json
import logging
import mmap
import os
import secrets
import threading
from datetime import timedelta
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.layout import Reduction

from .. import world
from .processes import machine_name
from .shared_memory import SharedMemoryGroup, size_for

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_SUMMED = frozenset((*_FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8))
_MESSAGE_BYTES = 512  # bytes that a rank sends about itself while a group is set up

_shared_groups: WeakKeyDictionary[dist.ProcessGroup, SharedMemoryGroup | None] = WeakKeyDictionary()
_lock = threading.Lock()
_log = logging.getLogger(__name__)


class PendingWork(Protocol):
    """A collective under way."""

    def wait(self) -> object: ...


class _Done:
    def wait(self) -> None:
        """Nothing is under way."""


DONE = _Done()


def all_reduce(x: Tensor, group: dist.ProcessGroup | None, op: Reduction = "sum") -> PendingWork:
    """Reduce a contiguous tensor in place."""
    shared = _shared_group(x, group)
    if shared is not None and x.dtype in _SUMMED:
        flat = x.detach().view(1, -1)
        return shared.post(flat, flat, op) if flat.numel() else DONE
    return dist.all_reduce(x, _OPS[op], group=group, async_op=True) or DONE


def all_gather(out: Tensor, x: Tensor, group: dist.ProcessGroup | None) -> PendingWork:
    """Fill the flat `out` with the flat values of all ranks, in their order."""
    shared = _shared_group(x, group)
    if shared is not None:
        return shared.post(x.detach().view(1, -1), _per_rank(out, shared), None) if x.numel() else DONE
    return dist.all_gather_single(out, x, group=group, async_op=True) or DONE


def reduce_scatter(out: Tensor, x: Tensor, group: dist.ProcessGroup | None) -> PendingWork:
    """Sum the flat values of all ranks; fill the flat `out` with this rank's share of it."""
    shared = _shared_group(x, group)
    if shared is not None and x.dtype in _SUMMED:
        return shared.post(_per_rank(x, shared), out.detach().view(1, -1), "sum") if x.numel() else DONE
    return dist.reduce_scatter_single(out, x, group=group, async_op=True) or DONE


def all_to_all(out: Tensor, x: Tensor, group: dist.ProcessGroup | None) -> PendingWork:
    """Send each rank its share of the flat `x`, all of one length; fill the flat `out` with what they sent."""
    shared = _shared_group(x, group)
    if shared is not None:
        return shared.post(_per_rank(x, shared), _per_rank(out, shared), None) if x.numel() else DONE
    return dist.all_to_all_single(out, x, group=group, async_op=True) or DONE


def shift(out: Tensor, x: Tensor, by: int, group: dist.ProcessGroup | None) -> PendingWork:
    """Send the flat `x` to the rank `by` places on, and fill the flat `out` with what the rank as far back sends."""
    shared = _shared_group(x, group)
    if shared is not None:
        source = (shared.index - by) % len(shared.ranks)
        return shared.post(x.detach().view(1, -1), out.detach().view(1, -1), None, source) if x.numel() else DONE
    ranks, index = dist.get_process_group_ranks(group), dist.get_rank(group)
    target, source = (ranks[(index + way) % len(ranks)] for way in (by, -by))
    if dist.get_backend(group) == "threaded":  # ranks that are threads have no messages
        every = x.new_empty(len(ranks), x.numel())
        dist.all_gather_single(every.view(-1), x, group=group)
        out.copy_(every[ranks.index(source)])
        return DONE
    messages = [dist.P2POp(dist.isend, x, target, group), dist.P2POp(dist.irecv, out, source, group)]
    return _All(dist.batch_isend_irecv(messages), x)


class _All:
    """Several messages; what they send is kept until they are done."""

    def __init__(self, works: list[dist.Work], sent: Tensor) -> None:
        self._works, self._sent = works, sent

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _per_rank(x: Tensor, shared: SharedMemoryGroup) -> Tensor:
    return x.detach().view(len(shared.ranks), -1)


# -- setting up shared memory -------------------------------------------------------------------


def _shared_group(x: Tensor, group: dist.ProcessGroup | None) -> SharedMemoryGroup | None:
    """The shared memory of a group, for values such as x. All ranks of a group must make its first call together."""
    if x.device.type != "cpu":
        return None
    key = group or dist.group.WORLD
    assert key is not None
    try:
        return _shared_groups[key]
    except KeyError:
        shared = _agree(key) if _is_gloo(key) else None
        with _lock:
            _shared_groups[key] = shared
        return shared


def _is_gloo(group: dist.ProcessGroup) -> bool:
    try:
        return isinstance(group._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)
    except RuntimeError:  # ranks that are threads have no backend
        return False


def _agree(group: dist.ProcessGroup) -> SharedMemoryGroup | None:
    """Set up shared memory with all ranks of a group; None, on all of them, if any of them can't or may not."""
    index, ranks = group.rank(), tuple(dist.get_process_group_ranks(group))
    machine = machine_name() if world.shares_memory() else None
    file, offer = _reserve(size_for(len(ranks))) if index == 0 and machine else (None, None)
    every = _exchange({"near": machine, "offer": offer}, group)
    shared = None
    if machine and {answer["near"] for answer in every} == {machine} and every[0]["offer"]:
        shared = _open(every[0]["offer"], file, index, ranks, world.timeout_of(group))
        file = None  # SharedMemoryGroup closes it
    fine = all(answer["made"] for answer in _exchange({"made": shared is not None}, group))
    if file is not None:
        os.close(file)
    if not fine and all(answer["near"] == every[0]["near"] is not None for answer in every):
        _warn_once(
            "ranks of this machine communicate by gloo, which is slower: memory could not be shared between them"
        )
    return shared if fine else None


def _reserve(size: int) -> tuple[int | None, dict[str, Any] | None]:
    """An anonymous file, which is gone with the last process that has it open; and how other ranks open it."""
    if not hasattr(os, "memfd_create"):
        return None, None
    file, token = os.memfd_create("shardwright"), secrets.token_hex(16)
    try:
        os.posix_fallocate(file, 0, size)  # writing to a page that can't be backed would kill the process
        os.write(file, token.encode())
    except OSError as error:
        os.close(file)
        _warn_once(f"can't reserve {size / 2**20:.0f} MiB of shared memory: {error}")
        return None, None
    return file, {"path": f"/proc/{os.getpid()}/fd/{file}", "token": token, "size": size}


def _open(
    offer: dict[str, Any], own: int | None, index: int, ranks: tuple[int, ...], limit: timedelta | None
) -> SharedMemoryGroup | None:
    """Map what the first rank has reserved, or None if that fails."""
    file = own
    try:
        # The first rank must not open its file twice: closing one of them would let go of its lock.
        file = os.open(offer["path"], os.O_RDWR) if own is None else own
        memory = mmap.mmap(file, offer["size"], flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        if memory[: len(offer["token"])] != offer["token"].encode():
            raise OSError(f"{offer['path']} is not the file that was offered")
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, index)
    except (OSError, ValueError) as error:
        if file is not None:
            os.close(file)
        _warn_once(f"can't open the memory that rank {ranks[0]} shares: {error}")
        return None
    return SharedMemoryGroup(memory, file, index, ranks, (limit or world.DEFAULT_TIMEOUT).total_seconds())


def _exchange(message: dict[str, Any], group: dist.ProcessGroup) -> list[dict[str, Any]]:
    """All-gather a small message, as JSON."""
    text = json.dumps(message).ljust(_MESSAGE_BYTES).encode()
    every = torch.empty(_MESSAGE_BYTES * group.size(), dtype=torch.uint8)
    dist.all_gather_single(every, torch.frombuffer(bytearray(text), dtype=torch.uint8), group=group)
    return [json.loads(bytes(answer.tolist())) for answer in every.view(-1, _MESSAGE_BYTES)]


@functools.cache
def _warn_once(text: str) -> None:
    """Log once."""
    _log.warning(text)

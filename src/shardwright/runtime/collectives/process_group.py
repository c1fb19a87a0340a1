"""Collectives on plain tensors: through shared memory where all ranks of a group are near, else by torch.distributed.

Ranks of one machine that talk by gloo send values over TCP, which takes several times as long as the sums
themselves. `board` has the other way. Which one a call goes is known to all ranks of a group alike: from the
device, the dtype and the reduction, which are the same for all, and from what they agreed on at the first call
in the group. Values on other devices, and groups over several machines, of threads or of fake ranks, go as ever.

Each function begins a collective and gives what can be waited for; the memory of its arguments is not to be
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
_WORDS = 512  # bytes that a rank says of itself

_boards: WeakKeyDictionary[dist.ProcessGroup, SharedMemoryGroup | None] = WeakKeyDictionary()
_lock = threading.Lock()
_log = logging.getLogger(__name__)


class PendingWork(Protocol):
    """What is under way."""

    def wait(self) -> object: ...


class _Done:
    def wait(self) -> None:
        """Nothing is under way."""


DONE = _Done()


def all_reduce(x: Tensor, group: dist.ProcessGroup | None, op: Reduction = "sum") -> PendingWork:
    """Reduce a contiguous tensor in place."""
    board = _board_for(x, group)
    if board is not None and x.dtype in _SUMMED:
        flat = x.detach().view(1, -1)
        return board.post(flat, flat, op) if flat.numel() else DONE
    return dist.all_reduce(x, _OPS[op], group=group, async_op=True) or DONE


def all_gather(out: Tensor, x: Tensor, group: dist.ProcessGroup | None) -> PendingWork:
    """Fill the flat `out` with the flat values of all ranks, in their order."""
    board = _board_for(x, group)
    if board is not None:
        return board.post(x.detach().view(1, -1), _rows(out, board), None) if x.numel() else DONE
    return dist.all_gather_single(out, x, group=group, async_op=True) or DONE


def reduce_scatter(out: Tensor, x: Tensor, group: dist.ProcessGroup | None) -> PendingWork:
    """Sum the flat values of all ranks; fill the flat `out` with this rank's share of it."""
    board = _board_for(x, group)
    if board is not None and x.dtype in _SUMMED:
        return board.post(_rows(x, board), out.detach().view(1, -1), "sum") if x.numel() else DONE
    return dist.reduce_scatter_single(out, x, group=group, async_op=True) or DONE


def all_to_all(out: Tensor, x: Tensor, group: dist.ProcessGroup | None) -> PendingWork:
    """Send each rank its share of the flat `x`, all of one length; fill the flat `out` with what they sent."""
    board = _board_for(x, group)
    if board is not None:
        return board.post(_rows(x, board), _rows(out, board), None) if x.numel() else DONE
    return dist.all_to_all_single(out, x, group=group, async_op=True) or DONE


def _rows(x: Tensor, board: SharedMemoryGroup) -> Tensor:
    return x.detach().view(len(board.ranks), -1)


# -- who is near -------------------------------------------------------------------------------


def _board_for(x: Tensor, group: dist.ProcessGroup | None) -> SharedMemoryGroup | None:
    """The board of a group for values such as this one. The first call for a group is made by all its ranks."""
    if x.device.type != "cpu":
        return None
    whole = group or dist.group.WORLD
    assert whole is not None
    try:
        return _boards[whole]
    except KeyError:
        board = _agree(whole) if _is_gloo(whole) else None
        with _lock:
            _boards[whole] = board
        return board


def _is_gloo(group: dist.ProcessGroup) -> bool:
    try:
        return isinstance(group._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)
    except RuntimeError:  # ranks that are threads have no backend
        return False


def _agree(group: dist.ProcessGroup) -> SharedMemoryGroup | None:
    """Make the board of a group with all its ranks; None, on all of them, if one can't or does not want to."""
    index, ranks = group.rank(), tuple(dist.get_process_group_ranks(group))
    near = machine_name() if world.shares_memory() else None
    file, offer = _reserve(size_for(len(ranks))) if index == 0 and near else (None, None)
    every = _say({"near": near, "offer": offer}, group)
    made = None
    if near and {held["near"] for held in every} == {near} and every[0]["offer"]:
        made = _open(every[0]["offer"], file, index, ranks, world.timeout_of(group))
        file = None  # the board closes it
    fine = all(held["made"] for held in _say({"made": made is not None}, group))
    if file is not None:
        os.close(file)
    if not fine and all(held["near"] == every[0]["near"] is not None for held in every):
        _tell("ranks of this machine talk by gloo, which is slower: memory could not be shared between them")
    return made if fine else None


def _reserve(size: int) -> tuple[int | None, dict[str, Any] | None]:
    """A file without a name, which is gone with the last process that has it open; and how others find it."""
    if not hasattr(os, "memfd_create"):
        return None, None
    file, token = os.memfd_create("shardwright"), secrets.token_hex(16)
    try:
        os.posix_fallocate(file, 0, size)  # what is not there would end the process that writes to it
        os.write(file, token.encode())
    except OSError as error:
        os.close(file)
        _tell(f"can't reserve {size / 2**20:.0f} MiB of shared memory: {error}")
        return None, None
    return file, {"path": f"/proc/{os.getpid()}/fd/{file}", "token": token, "size": size}


def _open(
    offer: dict[str, Any], own: int | None, index: int, ranks: tuple[int, ...], limit: timedelta | None
) -> SharedMemoryGroup | None:
    """This rank's side of what the first rank has reserved, or None if it can't be had."""
    file = own
    try:
        # The first rank must not open its file twice: closing one of them would let go of its lock.
        file = os.open(offer["path"], os.O_RDWR) if own is None else own
        memory = mmap.mmap(file, offer["size"], flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        if memory[: len(offer["token"])] != offer["token"].encode():
            raise OSError(f"{offer['path']} is not what was offered")
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, index)
    except (OSError, ValueError) as error:
        if file is not None:
            os.close(file)
        _tell(f"can't open the memory that rank {ranks[0]} shares: {error}")
        return None
    return SharedMemoryGroup(memory, file, index, ranks, (limit or world.DEFAULT_TIMEOUT).total_seconds())


def _say(words: dict[str, Any], group: dist.ProcessGroup) -> list[dict[str, Any]]:
    """What every rank of the group says."""
    text = json.dumps(words).ljust(_WORDS).encode()
    every = torch.empty(_WORDS * group.size(), dtype=torch.uint8)
    dist.all_gather_single(every, torch.frombuffer(bytearray(text), dtype=torch.uint8), group=group)
    return [json.loads(bytes(held.tolist())) for held in every.view(-1, _WORDS)]


@functools.cache
def _tell(text: str) -> None:
    """Log once."""
    _log.warning(text)

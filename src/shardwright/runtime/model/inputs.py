"""The arguments of a compiled model, and their meaning: the three input modes.

    mode          every rank passes                    the program starts from
    -----------   ----------------------------------   -----------------------------
    global        the global batch                     the global batch
    per_replica   the samples of its replica           those samples
    per_rank      its own samples                      the samples of all ranks, gathered

An input without a batch dim (a mask, a table) is the same on all ranks in every mode. Every call is checked, see
`faults/input_comparison.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from shardwright.batch_dim import BatchDim, declared_by, find_batch_dim
from shardwright.errors import InputError, raise_all

from ..collectives import objects, process_group
from ..faults import flight_recorder
from ..faults.watch import watch

Mode = Literal["global", "per_replica", "per_rank"]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]

PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.Size, slice, range, type(None))
"""Types whose repr is equal on all ranks: that of other objects has an address, that of a device its index."""


class CallInputs:
    """The arguments of calls by path, and which of them have a batch dim.

    If ranks pass their own samples, the first decision is remembered: a last batch of 5 samples must not turn
    a mask [5, 5] into samples.
    """

    def __init__(
        self,
        paths: Callable[[Sequence[Any], Mapping[str, Any]], list[str]],
        unbatched: Sequence[str] | None = None,
        computed: bool = False,
    ) -> None:
        """`computed`: inputs come from other modules, not from the data, so their last bits may differ."""
        if isinstance(unbatched, str):
            raise InputError(
                f"CompileOptions(unbatched={unbatched!r}) must be a list of names of inputs: unbatched=[{unbatched!r}]"
            )
        self.paths, self.computed = paths, computed
        self.unbatched = None if unbatched is None else tuple(unbatched)
        self._known: dict[str, bool] = {}
        self._gathered: dict[Any, BatchDim] = {}

    def batch_dim(self, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Mode, *, needed: bool) -> BatchDim:
        """The batch dim of a call, for each leaf of its arguments. `needed`: refuse what is ambiguous."""
        inputs = [
            (path, tuple(leaf.shape) if isinstance(leaf, Tensor) else ())
            for path, leaf in zip(self.paths(args, kwargs), pytree.tree_leaves((args, kwargs)), strict=True)
        ]
        batch = find_batch_dim(inputs, declared_by(self.unbatched, [path for path, _ in inputs]) | self._known)
        if needed and batch.size is None and any(shape for _, shape in inputs):
            raise InputError(f'inputs="{mode}": {batch.why}')
        if mode != "global":
            own = zip(inputs, batch.batched, strict=True)
            self._known |= {path: batched for (path, shape), batched in own if shape}
        return batch

    def check_plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse packed and nested sequences; sparse tensors are checked where they would be sharded."""
        leaves = pytree.tree_leaves((args, kwargs), is_leaf=lambda leaf: isinstance(leaf, PackedSequence))
        kinds = [_packed_or_nested(leaf) for leaf in leaves]
        if any(kinds):
            packed = any(isinstance(leaf, PackedSequence) for leaf in leaves)
            paths = [""] * len(leaves) if packed else self.paths(args, kwargs)
            faults = [f"{path or 'an input'} is {kind}" for path, kind in zip(paths, kinds, strict=True) if kind]
            raise_all(InputError, "a parallelized model takes plain tensors:", faults)

    def samples(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """The number of samples of a call, if known."""
        return self.batch_dim(args, kwargs, "global", needed=False).size

    def gather(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """The arguments with the samples of all ranks, in the order of ranks. All ranks must call it."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        key = str(spec), tuple(tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in leaves)
        if key not in self._gathered:
            self.check(args, kwargs, "per_replica")  # before the gather: unequal shapes would hang
            self._gathered[key] = self.batch_dim(args, kwargs, "per_rank", needed=True)
        batched = self._gathered[key].batched
        gathered = [_gather_samples(leaf) if has else leaf for leaf, has in zip(leaves, batched, strict=True)]
        arguments: Arguments = pytree.tree_unflatten(gathered, spec)
        return arguments

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any], about: str = "", why: str = "") -> None:
        """All ranks must pass the same shapes and the same plain values. Called for a call that is new on this rank."""
        if not dist.is_initialized() or dist.get_world_size() < 2:
            return
        leaves = dict(zip(self.paths(args, kwargs), pytree.tree_leaves((args, kwargs)), strict=True))
        shapes = [list(leaf.shape) for leaf in leaves.values() if isinstance(leaf, Tensor)]
        values = {path: repr(leaf) for path, leaf in leaves.items() if isinstance(leaf, PLAIN)}
        every = _exchanged(json.dumps([shapes, values]), about)
        mine, rank = every[dist.get_rank()], dist.get_rank()
        other = next((peer for peer, answer in every.items() if answer != mine), None)
        if other is None:
            return
        if not every[other]:
            raise InputError(
                f"rank {rank} calls the model with {shapes} for the first time ({why or 'other shapes'}), but "
                f"rank {other} as in an earlier call: the ranks pass inputs of different shapes, or "
                "differ in a mode, an attribute or an argument; do the same on all ranks, with a smaller last batch "
                "too, or drop it (drop_last=True), and call the model on all ranks (an evaluation on rank 0 only "
                f"waits for the others){flight_recorder.called_at()}"
            )
        theirs = json.loads(every[other])
        if theirs[0] != shapes:
            raise InputError(
                f"the ranks pass inputs of different shapes: rank {rank} passes {shapes}, rank {other} passes "
                f"{theirs[0]}; pass the same shapes everywhere, a smaller last batch too, or drop it (drop_last=True)"
            )
        pairs = {path: (values.get(path, "missing"), theirs[1].get(path, "missing")) for path in values | theirs[1]}
        differ = [
            f"{path} is {own} on rank {rank} and {their} on rank {other}"
            for path, (own, their) in pairs.items()
            if own != their
        ]
        title = "the ranks pass different values, which are part of the program; pass the same everywhere:"
        raise_all(InputError, title, differ)


def _exchanged(mine: str, about: str) -> dict[int, str]:
    """What every rank says about this call; without ranks that continued, since the call is not new to them."""
    watched = watch()
    if watched is not None:
        answers = watched.agree(mine, about)
        return {rank: answers.get(rank, "") for rank in range(dist.get_world_size())}
    return dict(enumerate(objects.all_gather_objects(mine, "the shapes of every rank")))  # ranks that are threads


def digest(tensors: Sequence[Tensor]) -> int:
    """A number that two lists of tensors share only if they are the same."""
    hasher = hashlib.blake2b(digest_size=7)
    for tensor in tensors:
        hasher.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
        plain = tensor.detach().cpu().contiguous().reshape(-1)
        hasher.update(plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b"")
    return int.from_bytes(hasher.digest(), "big")


def check_dtypes(names: Sequence[str], known: Sequence[torch.dtype], passed: Sequence[torch.dtype]) -> None:
    """A call must pass the dtypes it was compiled for: another one is mostly a mistake in the data."""
    faults = [
        f"{name} is {_short(now)}, but the model was compiled for {_short(then)}; pass {name}.to({then})"
        for name, then, now in zip(names, known, passed, strict=True)
        if then != now
    ]
    raise_all(InputError, "the data has another dtype than the example:", faults)


def _packed_or_nested(leaf: Any) -> str:
    """The unsupported kind of an argument, and what to pass instead; empty if it is a plain tensor, or none."""
    if isinstance(leaf, PackedSequence):
        return "a PackedSequence; pass the padded tensor and the lengths"
    return "nested; pass tensor.to_padded_tensor(0.0)" if isinstance(leaf, Tensor) and leaf.is_nested else ""


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _gather_samples(tensor: Tensor) -> Tensor:
    """The samples of all ranks, in the order of ranks."""
    if not dist.is_initialized():
        return tensor
    size = dist.get_world_size()
    plain = tensor.detach().contiguous()
    sent = plain.view(torch.uint8) if plain.dtype == torch.bool else plain
    every = sent.new_empty((size * sent.shape[0], *sent.shape[1:]))
    flight_recorder.enter("all_gather", None, "the samples of every rank")
    process_group.all_gather(every, sent, None).wait()
    return every.view(plain.dtype) if plain.dtype == torch.bool else every

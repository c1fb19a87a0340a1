"""The shares of a unit's parameters (ZeRO-3): how they lie in memory, are gathered, and how their gradients come back.

    UnitShards      parameters of one unit that one collective gathers, in one row
    GatheredUnit    the whole parameters, or the promise of them
    GradientReturn  whole gradients on their way to shares, and to `.grad`

When any of this happens is decided in `zero3`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from shardwright.storage import ParameterSpec, storage_layout, summing_axes, zero_axes

from ..collectives import comm, process_group
from ..faults import flight_recorder
from ..world import Groups
from .buckets import dense
from .full_tensors import compute_dtype, coordinates, name_some, true_dtype
from .gradient_destination import needs_gradient
from .hooks import ParameterHooks
from .packing import Pack, whole_buffer
from .sharded import ShardedParameter, Untouched, raw_gradient, set_raw_gradient, wrap_gradient

Pair = tuple[ParameterSpec, Parameter]


class UnitShards:
    """Parameters of one unit, one dtype and the same zero axes: gathered by one collective."""

    def __init__(
        self, pairs: Sequence[Pair], axes: tuple[str, ...], groups: Groups, wire: torch.dtype | None = None
    ) -> None:
        self.wire = wire or compute_dtype(pairs[0][0])  # gradients are summed in it
        self.pairs, self.groups = list(pairs), groups
        self.group = groups[axes]
        self.pack = Pack([spec for spec, _ in pairs], axes, groups.mesh.sizes, coordinates(groups))
        with torch.no_grad(), Untouched():
            self.row = pairs[0][1].new_zeros(self.pack.width)
            for number, (_, parameter) in enumerate(pairs):
                own = self._own_slice(number)
                own.copy_(parameter)
                parameter.data = own  # the shards live in the row, so that gathering copies nothing
                if isinstance(parameter, ShardedParameter):
                    parameter.hooks.summed_later = parameter.hooks.in_shares = True
        by_rest: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for number, (spec, _) in enumerate(pairs):
            if spec.trainable:
                by_rest[tuple(axis for axis in summing_axes(spec, groups.mesh) if axis not in axes)].append(number)
        self.returns = [GradientReturn(self, numbers, rest, groups, axes) for rest, numbers in by_rest.items()]

    def __str__(self) -> str:
        return f"the parameters {name_some([spec.name for spec, _ in self.pairs])}"

    def _own_slice(self, number: int) -> Tensor:
        return self.pack.own(self.row, number, self.group.index)

    def summed(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Shares of whole gradients for `torch.autograd.grad`: one after the other, by ops that have a gradient."""
        return [
            None if gradient is None else _share(gradient, spec, self.groups)
            for gradient, (spec, _) in zip(gradients, self.pairs, strict=True)
        ]

    def version(self) -> tuple[tuple[int, int], ...]:
        with Untouched():
            return tuple((parameter._version, parameter.data_ptr()) for _, parameter in self.pairs)

    def fill_row(self) -> Tensor:
        """The row to send. A parameter that was given other memory (`p.data = ..`) is copied into a row of its own.

        Its home is left alone: whoever swaps weights has kept the old `p.data`, which lies there, to put it back.
        """
        row = self.row
        with torch.no_grad(), Untouched():
            for number, (_, parameter) in enumerate(self.pairs):
                if parameter.data_ptr() != self._own_slice(number).data_ptr():
                    row = row.clone() if row is self.row else row
                    self.pack.own(row, number, self.group.index).copy_(parameter)
        return row


def _share(gradient: Tensor, spec: ParameterSpec, groups: Groups) -> Tensor:
    """The own share of a gradient that is summed over ranks."""
    gradient = dense(gradient)
    layout = storage_layout(spec, groups.mesh.sizes)
    split = zero_axes(spec, groups.mesh.sizes)
    for axis in summing_axes(spec, groups.mesh):
        if axis not in split:
            gradient = comm.all_reduce(gradient, groups[axis])
    for dim, shards in enumerate(layout.shards):
        for sharding in shards:
            if sharding.axis in split:
                gradient = comm.reduce_scatter(gradient, dim, groups[sharding.axis], sharding)
    return gradient


class GatheredUnit:
    """The whole parameters of some shards, or the promise of them."""

    def __init__(self, shards: UnitShards) -> None:
        self.shards = shards
        self.version = shards.version()
        with torch.inference_mode(False):  # what is made for inference can't train later
            row = shards.fill_row()
            self.sent = row  # until it has arrived: it may be a copy that nobody else holds
            self.buffer: Tensor | None = row.new_empty(shards.pack.parts * shards.pack.width)
        flight_recorder.enter("all_gather", shards.group.process_group, shards)
        self.work = process_group.all_gather(self.buffer, row, shards.group.process_group)
        self.flat: Tensor | None = None
        self.offsets: list[int] = []

    @torch.inference_mode(False)
    @torch.no_grad()
    def wait(self) -> Tensor:
        """The flat buffer in which the whole parameters lie one after the other."""
        if self.flat is None:
            assert self.buffer is not None
            self.work.wait()
            self.work = process_group.DONE  # the other holds on to the rows
            pack = self.shards.pack
            rows = pack.by_rank(self.buffer)
            self.flat, views = whole_buffer(pack.slots, rows)
            for number, view in enumerate(views):
                pack.take(rows, number, view)
                self.offsets.append(int(view.storage_offset()))
            self.buffer = None
        return self.flat

    @torch.no_grad()
    def views(self) -> list[Tensor]:
        flat = self.wait()
        slots = self.shards.pack.slots
        return [flat.as_strided(s.shape, _strides(s.shape), at) for s, at in zip(slots, self.offsets, strict=True)]


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


class GradientReturn:
    """The way back: whole gradients to shares, and to `.grad`. One flag for each says whether it was used."""

    def __init__(
        self, shards: UnitShards, numbers: Sequence[int], rest: tuple[str, ...], groups: Groups, axes: tuple[str, ...]
    ) -> None:
        self.numbers = list(numbers)
        self.pairs = [shards.pairs[number] for number in numbers]
        self.group = shards.group
        self.rest = groups[rest].process_group if rest else None
        specs = [spec for spec, _ in self.pairs]
        self.pack = Pack(specs, axes, groups.mesh.sizes, coordinates(groups), extra=len(specs))
        self.sent: list[tuple[Tensor, Tensor, process_group.PendingWork, bool]] = []

    def __str__(self) -> str:
        return f"the gradients of {name_some([spec.name for spec, _ in self.pairs])}"

    @torch.no_grad()
    def send(self, gradients: Sequence[Tensor | None], like: Tensor, wire: torch.dtype) -> None:
        """Start the sum of whole gradients (in the order of `numbers`) into shares."""
        full = all(gradient is not None for gradient in gradients)
        size = self.pack.parts * self.pack.width
        make = like.new_empty if full and not self.pack.padded else like.new_zeros
        flat = make(size, dtype=wire)
        rows = self.pack.by_rank(flat)
        flags = rows.narrow(1, self.pack.used, len(gradients))
        flags.copy_(torch.tensor([g is not None for g in gradients], dtype=flat.dtype, device=flat.device))
        for number, gradient in enumerate(gradients):
            if gradient is not None:
                self.pack.put(rows, number, dense(gradient))
        row = flat.new_empty(self.pack.width)
        flight_recorder.enter("reduce_scatter", self.group.process_group, self)
        work = process_group.reduce_scatter(row, flat, self.group.process_group)
        self.sent.append((row, flat, work, full))

    @torch.no_grad()
    def receive(self, leaf_of: Callable[[Tensor], Tensor]) -> None:
        """Wait for what was sent, and add it to `.grad`."""
        for row, _, work, full in self.sent:
            work.wait()
            if self.rest is not None:
                flight_recorder.enter("all_reduce", self.rest, self)
                process_group.all_reduce(row, self.rest).wait()
            flags = [1.0] * len(self.pairs) if full else row.narrow(0, self.pack.used, len(self.pairs)).tolist()
            for number, (spec, parameter) in enumerate(self.pairs):
                if flags[number] > 0 and needs_gradient(parameter):  # torch drops that of what was frozen since
                    _hand_out(leaf_of(parameter), self.pack.own(row, number, self.group.index), spec)
        self.sent.clear()

    def drop(self) -> None:
        """Wait for what was sent, and forget it."""
        for _, _, work, _ in self.sent:
            work.wait()
        self.sent.clear()


def _hand_out(leaf: Tensor, share: Tensor, spec: ParameterSpec) -> None:
    """Add a share that is summed to `.grad`, with the user's hooks around."""
    hooks = leaf.hooks if isinstance(leaf, ShardedParameter) else ParameterHooks()
    if hooks.before:
        share = hooks.change(wrap_gradient(leaf, share))
    old = raw_gradient(leaf)
    set_raw_gradient(leaf, share.to(true_dtype(spec)) if old is None else old.add_(share))
    hooks.tell(leaf)

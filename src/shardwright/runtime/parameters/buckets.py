"""Flat buffers in which gradients of many parameters are summed over ranks at once.

`GradientSync` decides when; here is what one bucket does with what is put into it.

    Bucket        sums, and every rank gets all of it
    SplitBucket   ZeRO-2: sums, and every rank keeps the share that it owns
    TiedBucket    sums what other stages of a pipeline hold too, and leaves handing out to `pipeline.ties`
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from shardwright.errors import InputError
from shardwright.storage import ParameterSpec, zero_axes

from ..collectives import process_group
from ..faults import flight_recorder
from ..world import Groups
from .full_tensors import coordinates, name_some, true_dtype
from .hooks import ParameterHooks
from .packing import Pack
from .sharded import ShardedParameter, Untouched, raw_gradient, set_raw_gradient, wrap_gradient


class BucketSlot:
    """One parameter: its slot, and what is known of its gradient in the running backward."""

    def __init__(self, spec: ParameterSpec, parameter: Parameter) -> None:
        self.spec = spec
        self.parameter = parameter
        self.number = 0
        self.bucket: GradientBucket
        self.seen = False  # its gradient of this backward is in the bucket
        self.passing = False  # autograd is about to set .grad to it
        self.local: Tensor | None = None  # the pending sums that it is to be added to
        self.true: Tensor | None = None  # the synced .grad that was there before
        self.hooks = parameter.hooks if isinstance(parameter, ShardedParameter) else ParameterHooks()

    @property
    def pending(self) -> bool:
        """Whether `.grad` holds local sums that were not synced yet; an optimizer looks at it too."""
        return getattr(self.parameter, "unsummed", False)

    @pending.setter
    def pending(self, unsummed: bool) -> None:
        self.parameter.unsummed = unsummed  # type: ignore[attr-defined]

    def set_aside(self) -> Tensor | None:
        """Take `.grad` away: the true one is kept here, a pending one is returned."""
        with Untouched():
            current, self.parameter.grad = self.parameter.grad, None
        if self.pending:
            self.pending = False
            if current is None:  # zero_grad came in between
                self.true = None
            return current
        self.true = current
        return None

    def put_back(self) -> None:
        """Undo `set_aside`: the gradient that was to come did not (it was captured by `torch.autograd.grad`)."""
        self.passing, self.pending = False, self.local is not None
        if self.local is None:
            self.local, self.true = self.true, None
        set_raw_gradient(self.parameter, self.local)
        self.local = None

    def hand_out(self, total: Tensor) -> None:
        """Make `.grad` the true gradient: what was there before, and this backward's sum."""
        true, self.true, self.seen = self.true, None, False
        if self.hooks.before:
            total = self.hooks.change(wrap_gradient(self.parameter, total))
        set_raw_gradient(self.parameter, total.to(true_dtype(self.spec)) if true is None else true.add_(total))
        self.hooks.tell(self.parameter)


class GradientBucket:
    """Slots in one flat buffer that is summed over `axes` at once."""

    def __init__(
        self, entries: Sequence[BucketSlot], axes: tuple[str, ...], groups: Groups, dtype: torch.dtype
    ) -> None:
        self.entries = list(entries)
        self.over = groups[axes]
        self.group = self.over.process_group
        self.dtype = dtype
        self.sizes = [entry.parameter.numel() for entry in entries]
        self.missing = len(entries)
        self.flat: Tensor | None = None
        self.slots: list[Tensor] = []
        self.flags: Tensor | None = None
        self.held_by_us = 0
        self.work: process_group.PendingWork = process_group.DONE
        for number, entry in enumerate(entries):
            entry.bucket, entry.number = self, number

    def __str__(self) -> str:
        return f"the gradients of {name_some([entry.spec.name for entry in self.entries])}"

    def open(self) -> None:
        """A buffer to write in. If anybody still looks at the last one's memory, it is theirs."""
        if self.flat is not None and _uses(self.flat) == self.held_by_us:
            return
        device = self.entries[0].parameter.device
        self.flat = torch.zeros(sum(self.sizes) + len(self.sizes), dtype=self.dtype, device=device)
        self.slots, at = [], 0
        for entry, size in zip(self.entries, self.sizes, strict=True):
            self.slots.append(self.flat.narrow(0, at, size).view(entry.parameter.shape))
            at += size
        self.flags = self.flat.narrow(0, at, len(self.sizes))
        self.held_by_us = _uses(self.flat)  # nothing temporary may be alive here

    def put(self, entry: BucketSlot, gradient: Tensor | None, pending: Tensor | None) -> None:
        """Write a gradient, pending sums included, into its slot."""
        if self.missing == len(self.entries):
            self.open()
        slot = self.slots[entry.number]
        first = gradient if gradient is not None else pending
        if first is None:
            slot.zero_()
        elif gradient is not None and pending is not None:
            torch.add(gradient, pending, out=slot)
        else:
            slot.copy_(first)
        entry.seen = first is not None
        self.missing -= 1

    def launch(self) -> None:
        assert self.flags is not None
        assert self.flat is not None
        self._mark(self.flags)
        flight_recorder.enter("all_reduce", self.group, self)
        self.work = process_group.all_reduce(self.flat, self.group)

    def _mark(self, flags: Tensor) -> None:
        seen = [entry.seen for entry in self.entries]
        if all(seen):
            flags.fill_(1)
        else:
            flags.copy_(torch.tensor(seen, dtype=flags.dtype))

    def finish(self) -> None:
        """Wait, and hand out the slots that anybody on the axes contributed to."""
        self._wait()
        assert self.flags is not None
        used = self._used(self.flags)
        for entry, slot, anybody in zip(self.entries, self.slots, used, strict=True):
            if anybody:
                if not entry.seen:
                    entry.set_aside()
                entry.hand_out(slot.detach())  # a tensor of its own, so that _uses counts it
        self.missing = len(self.entries)

    def _wait(self) -> None:
        self.work.wait()
        self.work = process_group.DONE

    def _used(self, flags: Tensor) -> list[bool]:
        if all(entry.seen for entry in self.entries):
            return [True] * len(self.entries)
        return [flag > 0 for flag in flags.tolist()]

    def drop(self) -> None:
        """Forget a backward that broke off."""
        self._wait()
        for entry in self.entries:
            if entry.passing:
                entry.put_back()
            if entry.seen:
                entry.seen = False
                set_raw_gradient(entry.parameter, entry.true)
                entry.true = None
        self.missing = len(self.entries)


class SplitBucket(GradientBucket):
    """A bucket of ZeRO-2: reduce-scattered, and only the own row is kept."""

    def __init__(
        self, entries: Sequence[BucketSlot], axes: tuple[str, ...], groups: Groups, dtype: torch.dtype
    ) -> None:
        super().__init__(entries, axes, groups, dtype)
        sizes = groups.mesh.sizes
        specs = [entry.spec for entry in entries]
        split = zero_axes(specs[0], sizes)
        self.pack = Pack(specs, split, sizes, coordinates(groups), extra=len(entries))
        self.split = groups[split]
        others = tuple(axis for axis in axes if axis not in split)
        self.others = groups[others].process_group if others else None
        self.row: Tensor | None = None

    def open(self) -> None:
        device = self.entries[0].parameter.device
        self.flat = torch.zeros(self.pack.parts * self.pack.width, dtype=self.dtype, device=device)

    def put(self, entry: BucketSlot, gradient: Tensor | None, pending: Tensor | None) -> None:
        if self.missing == len(self.entries):
            self.open()
        assert self.flat is not None
        parts = [part for part in (gradient, pending) if part is not None]
        if parts:
            total = parts[0] if len(parts) == 1 else parts[0] + parts[1]
            self.pack.put(self.pack.by_rank(self.flat), entry.number, total)
        entry.seen = bool(parts)
        self.missing -= 1

    def launch(self) -> None:
        assert self.flat is not None
        for row in self.pack.by_rank(self.flat):
            self._mark(row.narrow(0, self.pack.used, len(self.entries)))
        self.row = self.flat.new_empty(self.pack.width)
        flight_recorder.enter("reduce_scatter", self.split.process_group, self)
        self.work = process_group.reduce_scatter(self.row, self.flat, self.split.process_group)

    def finish(self) -> None:
        if self.row is None:  # was finished early
            return
        self._wait()
        if self.others is not None:
            flight_recorder.enter("all_reduce", self.others, self)
            process_group.all_reduce(self.row, self.others).wait()
        used = self._used(self.row.narrow(0, self.pack.used, len(self.entries)))
        for entry, anybody in zip(self.entries, used, strict=True):
            if anybody:
                share = self.pack.own(self.row, entry.number, self.split.index)
                shard = entry.parameter.shard if isinstance(entry.parameter, ShardedParameter) else None
                assert shard is not None
                old = raw_gradient(shard)
                if entry.hooks.before:
                    share = entry.hooks.change(wrap_gradient(shard, share))
                gradient = share.detach().to(shard.device, true_dtype(entry.spec))
                set_raw_gradient(shard, gradient if old is None else old.add_(share.to(old.device)))
                set_raw_gradient(entry.parameter, None)
                entry.hooks.tell(entry.parameter)
            entry.seen, entry.true = False, None
        self.flat = self.row = None
        self.missing = len(self.entries)

    def drop(self) -> None:
        super().drop()
        self.flat = self.row = None


class TiedBucket(GradientBucket):
    """Parameters that other stages hold too. There may be nobody in the own stage to sum with."""

    def launch(self) -> None:
        if self.group is not None:
            super().launch()
        elif self.flags is not None:
            self._mark(self.flags)

    def finish(self) -> None:
        """Wait only: what other stages have is still to be added."""
        self._wait()

    def totals(self) -> list[tuple[BucketSlot, Tensor | None]]:
        """The sums of this stage, None where none of its ranks used a parameter."""
        assert self.flags is not None
        self.missing = len(self.entries)
        used = self._used(self.flags)
        return [(e, slot if any_ else None) for e, slot, any_ in zip(self.entries, self.slots, used, strict=True)]


def expect_plain(spec: ParameterSpec, gradient: Tensor) -> None:
    """Refuse what can't be added to `.grad` after a sum over ranks."""
    if gradient.requires_grad:
        raise InputError(
            f"backward(create_graph=True) reached parameter {spec.name}, and a .grad that is summed over ranks has no "
            "graph; use torch.autograd.grad(loss, parameters, create_graph=True), whose gradients have one, or leave "
            "create_graph out"
        )


def dense(gradient: Tensor) -> Tensor:
    """A gradient that can be summed in a flat buffer: `EmbeddingBag(sparse=True)` gives the rows that were read."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def make_dense(parameter: Tensor) -> None:
    """Have no sparse `.grad`: an update of its rows and one of all rows, most with zeros, are the same."""
    gradient = raw_gradient(parameter)
    if gradient is not None and gradient.is_sparse:
        set_raw_gradient(parameter, gradient.to_dense())


def _uses(flat: Tensor) -> int:
    return int(torch._C._storage_Use_Count(flat.untyped_storage()._cdata))

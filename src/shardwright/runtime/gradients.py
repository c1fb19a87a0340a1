"""Gradients become true once a backward, in buckets, while backward still runs.

A parameter used on several ranks has a gradient that is a sum over those ranks. Autograd
calls two hooks of each leaf with this backward's complete local gradient: one before it is
added to `.grad`, which sets the old `.grad` aside, and one after all hooks of the user, which
copies it into the parameter's slot of a flat bucket. A full bucket is summed over its axes
without waiting. A callback at the end of backward waits for all of them and hands the slots
out:

    backward   last layer ............ first layer | end
    buckets    [1 MiB] [   4 MiB   ] [   4 MiB   ] | wait, .grad = slot (or old + slot)
    network            ====  ============  =========

Buckets go out strictly in order, the same on every rank. A parameter that this backward did
not use enters as zeros; a flag for each parameter travels with the bucket, so that a
parameter nobody used keeps the `.grad` it had and one that somebody used has the same
gradient everywhere.

Under `no_sync` local gradients pile up in `.grad` and count as pending; the next backward
with sync (or `flush`) takes them along. At ZeRO level 2 a bucket is reduce-scattered, and
only the share that this rank owns is kept, as the gradient of the parameter's `shard`.
Parameters that level 3 splits are not handled here but in `zero`.

Not supported: `create_graph=True`, and a backward inside a backward (reentrant checkpoints).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from shardwright.errors import InputError, RankError

from .faults import told
from .holding import Held, coordinates, summing_axes, zero_axes
from .packing import Pack
from .parameters import ShardParameter, Untouched, raw_gradient, set_raw_gradient
from .world import Groups


class Entry:
    """One parameter: its slot, and what is known of its gradient in the running backward."""

    def __init__(self, held: Held, parameter: Parameter) -> None:
        self.held = held
        self.parameter = parameter
        self.number = 0
        self.bucket: Bucket
        self.seen = False  # its gradient of this backward is in the bucket
        self.passing = False  # autograd is about to set .grad to it
        self.local: Tensor | None = None  # the pending sums that it is to be added to
        self.pending = False  # .grad holds local sums that were not synced yet
        self.true: Tensor | None = None  # the synced .grad that was there before

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
        set_raw_gradient(self.parameter, total if true is None else true.add_(total))


class Bucket:
    """Slots in one flat buffer that is summed over `axes` at once."""

    def __init__(self, entries: Sequence[Entry], axes: tuple[str, ...], groups: Groups) -> None:
        self.entries = list(entries)
        self.group = groups[axes].process_group
        self.dtype = entries[0].held.dtype
        self.sizes = [entry.parameter.numel() for entry in entries]
        self.missing = len(entries)
        self.flat: Tensor | None = None
        self.slots: list[Tensor] = []
        self.flags: Tensor | None = None
        self.held_by_us = 0
        self.work: dist.Work | None = None
        for number, entry in enumerate(entries):
            entry.bucket, entry.number = self, number

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

    def put(self, entry: Entry, gradient: Tensor | None, pending: Tensor | None) -> None:
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
        self.work = dist.all_reduce(self.flat, group=self.group, async_op=True)

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
        if self.work is not None:
            self.work.wait()
            self.work = None

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


class SplitBucket(Bucket):
    """A bucket at ZeRO level 2: reduce-scattered, and only the own row is kept."""

    def __init__(self, entries: Sequence[Entry], axes: tuple[str, ...], groups: Groups) -> None:
        super().__init__(entries, axes, groups)
        sizes = groups.mesh.sizes
        helds = [entry.held for entry in entries]
        split = zero_axes(helds[0], sizes)
        self.pack = Pack(helds, split, sizes, coordinates(groups), extra=len(entries))
        self.split = groups[split]
        others = tuple(axis for axis in axes if axis not in split)
        self.others = groups[others].process_group if others else None
        self.row: Tensor | None = None

    def open(self) -> None:
        device = self.entries[0].parameter.device
        self.flat = torch.zeros(self.pack.parts * self.pack.width, dtype=self.dtype, device=device)

    def put(self, entry: Entry, gradient: Tensor | None, pending: Tensor | None) -> None:
        if self.missing == len(self.entries):
            self.open()
        assert self.flat is not None
        parts = [part for part in (gradient, pending) if part is not None]
        if parts:
            total = parts[0] if len(parts) == 1 else parts[0] + parts[1]
            self.pack.put(self.pack.rows(self.flat), entry.number, total)
        entry.seen = bool(parts)
        self.missing -= 1

    def launch(self) -> None:
        assert self.flat is not None
        for row in self.pack.rows(self.flat):
            self._mark(row.narrow(0, self.pack.used, len(self.entries)))
        self.row = self.flat.new_empty(self.pack.width)
        self.work = dist.reduce_scatter_single(self.row, self.flat, group=self.split.process_group, async_op=True)

    def finish(self) -> None:
        if self.row is None:  # was finished early
            return
        self._wait()
        if self.others is not None:
            dist.all_reduce(self.row, group=self.others)
        used = self._used(self.row.narrow(0, self.pack.used, len(self.entries)))
        for entry, anybody in zip(self.entries, used, strict=True):
            if anybody:
                share = self.pack.own(self.row, entry.number, self.split.index)
                shard = entry.parameter.shard if isinstance(entry.parameter, ShardParameter) else None
                assert shard is not None
                old = raw_gradient(shard)
                set_raw_gradient(shard, share.detach() if old is None else old.add_(share))
                set_raw_gradient(entry.parameter, None)
            entry.seen, entry.true = False, None
        self.flat = self.row = None
        self.missing = len(self.entries)

    def drop(self) -> None:
        super().drop()
        self.flat = self.row = None


def _uses(flat: Tensor) -> int:
    return int(torch._C._storage_Use_Count(flat.untyped_storage()._cdata))


class GradientSync:
    """Keeps `.grad` of all given parameters true. `params` are in the order of their use in forward.

    Those of several meshes have groups of their own; `groups` is for parameters that do not know theirs. Ranks that
    are in two meshes together must give parameters in the same order.
    """

    def __init__(
        self,
        params: Sequence[tuple[Held, Parameter]],
        groups: Groups | None = None,
        bucket_mb: float = 25.0,  # fewer meetings of the ranks win over earlier ones
        first_mb: float = 1.0,
    ) -> None:
        self.enabled = True
        self.buckets = _buckets(params, groups, bucket_mb, first_mb)
        self._entries = [entry for bucket in self.buckets for entry in bucket.entries]
        self._next = 0  # the first bucket that was not launched in this backward
        self._finished = 0
        self._task = -1  # the backward that is running, as autograd numbers them
        self._handles: list[Any] = []
        for entry in self._entries:
            leaf: Any = entry.parameter
            self._handles.append(leaf.register_hook(partial(self._arrived, entry)))
            self._handles.append(leaf.register_post_accumulate_grad_hook(partial(self._passed, entry)))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within this, backward only adds up local gradients."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    def flush(self) -> None:
        """Sync what is pending, without a backward. All ranks must call it. Returns at once if nothing is."""
        if any(entry.pending for entry in self._entries):
            self._end()

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()

    def begin(self) -> None:
        """A backward runs that others take part in: sync at its end, even if no gradient comes by here."""
        task = torch._C._current_graph_task_id()
        if self.enabled and self.buckets and task != self._task:
            self._begin(task)

    @told
    def _arrived(self, entry: Entry, gradient: Tensor) -> None:
        """Autograd has this backward's gradient of one parameter, and is about to add it to `.grad`."""
        _expect_plain(entry, gradient)
        if not self.enabled:
            if not entry.pending:
                entry.set_aside()
                entry.pending = True
            elif raw_gradient(entry.parameter) is None:  # zero_grad came in between
                entry.true = None
            return
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._begin(task)
        entry.local = entry.set_aside()
        entry.passing = True

    @told
    def _passed(self, entry: Entry, parameter: Tensor) -> None:
        """Autograd has set `.grad` to the local gradient, after all hooks of the user: it goes into the bucket."""
        if entry.passing:
            gradient, local = raw_gradient(parameter), entry.local
            entry.passing, entry.local = False, None
            set_raw_gradient(parameter, None)
            entry.bucket.put(entry, gradient, local)
            if entry.bucket.missing == 0:
                self._launch_full()

    def _begin(self, task: int) -> None:
        if self._task != -1:  # the last backward raised before its end
            for bucket in self.buckets:
                bucket.drop()
        self._task, self._next, self._finished = task, 0, 0
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _launch_full(self) -> None:
        while self._next < len(self.buckets) and self.buckets[self._next].missing == 0:
            self.buckets[self._next].launch()
            self._next += 1
            early = self.buckets[self._finished]
            if isinstance(early, SplitBucket) and self._next - self._finished > 2:
                early.finish()  # its whole-sized buffer must not live until the end
                self._finished += 1

    @told
    @torch.no_grad()
    def _end(self) -> None:
        """Complete the buckets that lack gradients, wait for all, hand out."""
        while self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            for entry in bucket.entries:
                if entry.passing:
                    entry.put_back()
                if not entry.seen:
                    bucket.put(entry, None, entry.set_aside() if entry.pending else None)
            self._launch_full()
        for bucket in self.buckets[self._finished :]:
            bucket.finish()
        self._task, self._next, self._finished = -1, 0, 0


Kind = tuple[Groups, tuple[str, ...], tuple[str, ...], torch.dtype]
"""The mesh, the axes to sum over, those that share the result out, and the dtype: what one bucket has in common."""


def _expect_plain(entry: Entry, gradient: Tensor) -> None:
    if gradient.requires_grad:
        raise InputError(
            f"backward(create_graph=True) reached parameter {entry.held.name}; gradients of gradients do not pass "
            "through the sum over ranks, leave create_graph out"
        )
    if gradient.is_sparse:
        raise InputError(f"parameter {entry.held.name} has a sparse gradient; build its Embedding with sparse=False")


def _buckets(
    params: Sequence[tuple[Held, Parameter]], groups: Groups | None, bucket_mb: float, first_mb: float
) -> list[Bucket]:
    """Buckets in the order in which backward completes them. A key has one open bucket at a time."""
    kinds: dict[Kind, list[list[Entry]]] = defaultdict(list)
    room: dict[Kind, float] = {}
    order: list[tuple[Kind, int]] = []
    for held, parameter in reversed(params):
        own = parameter.groups if isinstance(parameter, ShardParameter) else None
        mesh_groups = own or groups
        if mesh_groups is None:
            raise RankError(f"parameter {held.name} does not know the groups of its mesh, so it can't be synced")
        axes = summing_axes(held, mesh_groups.mesh)
        split = zero_axes(held, mesh_groups.mesh.sizes)
        if not held.trainable or not axes or (held.level == 3 and split):
            continue
        with Untouched():
            size = parameter.numel() * parameter.element_size()
        key = (mesh_groups, axes, split if held.level == 2 else (), held.dtype)
        if not kinds[key] or size > room[key]:
            first = all(kind[0] is not mesh_groups for kind, _ in order)  # which all ranks of the mesh must agree on
            room[key] = (first_mb if first else bucket_mb) * 2**20
            order.append((key, len(kinds[key])))
            kinds[key].append([])
        kinds[key][-1].append(Entry(held, parameter))
        room[key] -= size
    return [(SplitBucket if key[2] else Bucket)(kinds[key][number], key[1], key[0]) for key, number in order]

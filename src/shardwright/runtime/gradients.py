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
Buckets are summed in the dtype of the parameter, or in another one (`dtype`), and handed out in the
gradient's own.
Parameters that level 3 splits are not handled here but in `zero`.

Not supported: `create_graph=True`, and a backward inside a backward (reentrant checkpoints).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from shardwright.errors import InputError, RankError

from .buckets import Bucket, Entry, SplitBucket, TiedBucket
from .faults import told
from .holding import Held, summing_axes, zero_axes
from .parameters import ShardParameter, Untouched, raw_gradient, set_raw_gradient
from .world import Groups


class Tied(Protocol):
    """Parameters that other stages of a pipeline hold too (`pipeline.ties`)."""

    def __contains__(self, name: object) -> bool: ...

    def finish(self, buckets: Sequence[TiedBucket]) -> None:
        """Hand out the sums over all stages."""


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
        ties: Tied | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.enabled, self.ties = True, ties
        self.buckets = _buckets(params, groups, bucket_mb, first_mb, ties or (), dtype)
        self._tied = [bucket for bucket in self.buckets if isinstance(bucket, TiedBucket)]
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
        if self._tied or any(entry.pending for entry in self._entries):
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
    def _arrived(self, entry: Entry, gradient: Tensor | None) -> None:
        """Autograd has this backward's gradient of one parameter, and is about to add it to `.grad`."""
        if gradient is None:  # a function of which it is an input has none for it
            return
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
        if self._tied and self.ties is not None:
            self.ties.finish(self._tied)
        self._task, self._next, self._finished = -1, 0, 0


class Kind(NamedTuple):
    """What the parameters of one bucket have in common."""

    groups: Groups
    axes: tuple[str, ...]  # to sum over
    split: tuple[str, ...]  # those of them that share the result out
    dtype: torch.dtype
    tied: bool

    def bucket(self, entries: Sequence[Entry]) -> Bucket:
        made = TiedBucket if self.tied else SplitBucket if self.split else Bucket
        return made(entries, self.axes, self.groups, self.dtype)


def _expect_plain(entry: Entry, gradient: Tensor) -> None:
    if gradient.requires_grad:
        raise InputError(
            f"backward(create_graph=True) reached parameter {entry.held.name}; gradients of gradients do not pass "
            "through the sum over ranks, leave create_graph out"
        )
    if gradient.is_sparse:
        raise InputError(f"parameter {entry.held.name} has a sparse gradient; build its Embedding with sparse=False")


def _buckets(
    params: Sequence[tuple[Held, Parameter]],
    groups: Groups | None,
    bucket_mb: float,
    first_mb: float,
    ties: Container[str],
    dtype: torch.dtype | None,
) -> list[Bucket]:
    """Buckets in the order in which backward completes them. A kind has one open bucket at a time."""
    kinds: dict[Kind, list[list[Entry]]] = defaultdict(list)
    room: dict[Kind, float] = {}
    order: list[tuple[Kind, int]] = []
    for held, parameter in reversed(params):
        kind = _kind(held, parameter, groups, held.name in ties, dtype)
        if kind is None:
            continue
        with Untouched():
            size = parameter.numel() * parameter.element_size()
        if not kinds[kind] or size > room[kind]:
            first = all(other.groups is not kind.groups for other, _ in order)  # all ranks of the mesh must agree
            room[kind] = (first_mb if first else bucket_mb) * 2**20
            order.append((kind, len(kinds[kind])))
            kinds[kind].append([])
        kinds[kind][-1].append(Entry(held, parameter))
        room[kind] -= size
    return [kind.bucket(kinds[kind][number]) for kind, number in order]


def _kind(
    held: Held, parameter: Parameter, groups: Groups | None, tied: bool, dtype: torch.dtype | None
) -> Kind | None:
    """In which kind of bucket a parameter is, or None if its gradient is true as it comes."""
    own = parameter.groups if isinstance(parameter, ShardParameter) else None
    groups = own or groups
    if groups is None:
        raise RankError(f"parameter {held.name} does not know the groups of its mesh, so it can't be synced")
    axes = summing_axes(held, groups.mesh)
    split = zero_axes(held, groups.mesh.sizes)
    if held.level == 3 and split:  # comes as a share that is summed
        axes, split = (), ()
    if not held.trainable or not (axes or tied):
        return None
    return Kind(groups, axes, split if held.level == 2 and not tied else (), dtype or held.dtype, tied)

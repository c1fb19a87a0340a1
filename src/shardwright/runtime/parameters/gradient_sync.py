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
with sync (or `flush`) takes them along. Under ZeRO-2 a bucket is reduce-scattered, and
only the share that this rank owns is kept, as the gradient of the parameter's `shard`.
Buckets are summed in the dtype of the parameter, or in another one (`dtype`), and handed out in the
gradient's own.
Parameters that ZeRO-3 splits are not handled here but in `zero3`.

`torch.autograd.grad` has no use for `.grad`: what it asks for is summed at once, one parameter after the other, by an
op that has a gradient of its own, and handed out as a shard where it is one.

Not supported: adding to `.grad` with `create_graph=True`, and a backward inside a backward (reentrant checkpoints).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from shardwright.errors import InputError, RankError
from shardwright.storage import ParameterSpec, effective_storage, summing_axes

from ..collectives import comm
from ..faults.watch import report_failure
from ..world import Groups
from .buckets import BucketSlot, GradientBucket, SplitBucket, TiedBucket, expect_plain, make_dense
from .full_tensors import compute_dtype, name_some
from .gradient_destination import destination_of, leaf_node, needs_gradient
from .hooks import check_put_off
from .sharded import ShardedParameter, Untouched, raw_gradient, set_raw_gradient, wrap_gradient
from .storage_runtime import runtime_class


class TiedParameters(Protocol):
    """Parameters that other stages of a pipeline hold too (`pipeline.ties`)."""

    def __contains__(self, name: object) -> bool: ...

    def finish(self, buckets: Sequence[TiedBucket]) -> None:
        """Hand out the sums over all stages."""


@dataclass(slots=True)
class Accumulation:
    """Which of several backwards makes gradients true: the last of every so many."""

    every: int = 1
    count: int = 0  # how many there were
    task: int = -1  # the newest, as autograd numbers them

    def come(self, task: int) -> None:
        """A backward reaches parameters."""
        if task != self.task:
            self.task, self.count = task, self.count + 1

    @property
    def is_last(self) -> bool:
        return self.count % self.every == 0


class GradientSync:
    """Keeps `.grad` of all given parameters true. `params` are in the order of their use in forward.

    Those of several meshes have groups of their own; `groups` is for parameters that do not know theirs. Ranks that
    are in two meshes together must give parameters in the same order.
    """

    def __init__(
        self,
        params: Sequence[tuple[ParameterSpec, Parameter]],
        groups: Groups | None = None,
        bucket_mb: float = 25.0,  # fewer meetings of the ranks win over earlier ones
        first_mb: float = 1.0,
        ties: TiedParameters | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.ties, self.turns = ties, Accumulation()
        self._paused = False  # by no_sync
        self.buckets = _buckets(params, groups, bucket_mb, first_mb, ties or (), dtype)
        self._tied = [bucket for bucket in self.buckets if isinstance(bucket, TiedBucket)]
        self._entries = [entry for bucket in self.buckets for entry in bucket.entries]
        self._next = 0  # the first bucket that was not launched in this backward
        self._finished = 0
        self._task = -1  # the backward that is running, as autograd numbers them
        self._newest = (-1, False)  # the last backward that came by, and whether its gradients are for its caller
        self._frozen = [(spec, leaf) for spec, leaf in params if not spec.trainable]
        self._handles: list[Any] = []
        with Untouched():
            for entry in self._entries:
                leaf: Any = entry.parameter
                if isinstance(leaf, ShardedParameter):
                    leaf.hooks.summed_later = True
                self._handles.append(leaf.register_hook(partial(self._arrived, entry)))
                self._handles.append(leaf.register_post_accumulate_grad_hook(partial(self._passed, entry)))
            self._own_hooks = {id(entry.parameter): _count_hooks(entry.parameter) for entry in self._entries}
            synced = {id(entry.parameter) for entry in self._entries}
            for _, leaf in params:
                if id(leaf) not in synced and leaf.requires_grad:
                    self._handles.append(leaf.register_hook(partial(self._complete, leaf)))
                    self._handles.append(leaf.register_post_accumulate_grad_hook(make_dense))

    def check_frozen(self) -> None:
        """Refuse a parameter that was frozen when the plan was made: no rank would sum its gradient."""
        with Untouched():
            thawed = [spec.name for spec, leaf in self._frozen if leaf.requires_grad]
        if thawed:
            raise InputError(
                f"the parameters {name_some(thawed)} were frozen when the model was compiled and now need gradients, "
                "which the plan does not sum; parallelize with requires_grad=True for all that is ever trained, and "
                "freeze afterwards (p.requires_grad_(False) on the parallelized model), which may change at any time"
            )

    @property
    def enabled(self) -> bool:
        """Whether the backward that came last makes gradients true."""
        return not self._paused and self.turns.is_last

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within this, backward only adds up local gradients."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

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
        self.turns.come(task)
        if self.enabled and self.buckets and task != self._task:
            self._begin(task)

    def _is_for_caller(self, leaf: Tensor) -> bool:
        """Whether `torch.autograd.grad` runs: a backward is for `.grad` or for its caller, with all its leaves."""
        task = torch._C._current_graph_task_id()
        if self._newest[0] != task:
            with Untouched():
                self._newest = task, destination_of(leaf_node(leaf)) == "caller"
        return self._newest[1]

    def _complete(self, leaf: Tensor, gradient: Tensor | None) -> Tensor | None:
        """A gradient that nothing has to be added to, but that may be that of a shard."""
        if gradient is None or not needs_gradient(leaf) or not self._is_for_caller(leaf):
            return None
        return wrap_gradient(leaf, gradient)

    @report_failure
    def _arrived(self, entry: BucketSlot, gradient: Tensor | None) -> Tensor | None:
        """Autograd has this backward's gradient of one parameter, and is about to add it to `.grad`."""
        if gradient is None or not needs_gradient(entry.parameter):
            return None  # a function of which it is an input has none for it, or it was frozen since: torch drops it
        if self._is_for_caller(entry.parameter):
            return _summed(entry, gradient)
        expect_plain(entry.spec, gradient)
        if not isinstance(entry.parameter, ShardedParameter):
            check_alone(entry.parameter, self._own_hooks[id(entry.parameter)])
        task = torch._C._current_graph_task_id()
        self.turns.come(task)
        if not self.enabled:
            check_put_off(entry.hooks, entry.spec.name)
            if not entry.pending:
                entry.set_aside()
                entry.pending = True
            elif raw_gradient(entry.parameter) is None:  # zero_grad came in between
                entry.true = None
            return None
        if task != self._task:
            self._begin(task)
        entry.local = entry.set_aside()
        entry.passing = True
        return None

    @report_failure
    def _passed(self, entry: BucketSlot, parameter: Tensor) -> None:
        """Autograd has set `.grad` to the local gradient: it goes into the bucket."""
        make_dense(parameter)
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

    @report_failure
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


def _count_hooks(parameter: Any) -> int:
    return len(parameter._backward_hooks or ()) + len(getattr(parameter, "_post_accumulate_grad_hooks", None) or ())


def check_alone(parameter: Tensor, own: int) -> None:
    """Refuse hooks on a parameter outside of all compiled parts: autograd calls them before it is summed."""
    if _count_hooks(parameter) > own:
        raise InputError(
            f"parameter {getattr(parameter, 'key', '')} is outside of the compiled parts and has hooks, which would "
            'see the gradient of one data-parallel group; with inputs="global" all ranks see the same, or compile all '
            "of the model"
        )


def check_frozen(*syncs: GradientSync | None) -> None:
    """Refuse a call that trains what nobody sums."""
    for sync in syncs:
        if sync is not None:
            sync.check_frozen()


class BucketKind(NamedTuple):
    """What the parameters of one bucket have in common."""

    groups: Groups
    axes: tuple[str, ...]  # to sum over
    split: tuple[str, ...]  # those of them that share the result out
    dtype: torch.dtype
    bucket: type[GradientBucket]


def _summed(entry: BucketSlot, gradient: Tensor) -> Tensor:
    """A gradient that `torch.autograd.grad` gives its caller: true, with a graph if that is asked for, and a shard."""
    spec, bucket = entry.spec, entry.bucket
    if gradient.is_sparse:
        raise InputError(
            f"torch.autograd.grad asks for the gradient of parameter {spec.name}, which is sparse, and those that are "
            "summed over ranks are dense; build its Embedding with sparse=False, or call loss.backward()"
        )
    if isinstance(bucket, TiedBucket):
        raise InputError(
            f"torch.autograd.grad asks for the gradient of parameter {spec.name}, which several stages of the pipeline "
            "hold; call loss.backward() and read .grad, or use a plan without pp"
        )
    total = comm.all_reduce(gradient, bucket.over)
    return entry.hooks.change(wrap_gradient(entry.parameter, total))


def _buckets(
    params: Sequence[tuple[ParameterSpec, Parameter]],
    groups: Groups | None,
    bucket_mb: float,
    first_mb: float,
    ties: Container[str],
    dtype: torch.dtype | None,
) -> list[GradientBucket]:
    """Buckets in the order in which backward completes them. A kind has one open bucket at a time."""
    kinds: dict[BucketKind, list[list[BucketSlot]]] = defaultdict(list)
    room: dict[BucketKind, float] = {}
    order: list[tuple[BucketKind, int]] = []
    for spec, parameter in reversed(params):
        kind = _kind(spec, parameter, groups, spec.name in ties, dtype)
        if kind is None:
            continue
        with Untouched():
            size = parameter.numel() * parameter.element_size()
        if not kinds[kind] or size > room[kind]:
            first = all(other.groups is not kind.groups for other, _ in order)  # all ranks of the mesh must agree
            room[kind] = (first_mb if first else bucket_mb) * 2**20
            order.append((kind, len(kinds[kind])))
            kinds[kind].append([])
        kinds[kind][-1].append(BucketSlot(spec, parameter))
        room[kind] -= size
    return [kind.bucket(kinds[kind][number], kind.axes, kind.groups, kind.dtype) for kind, number in order]


def _kind(
    spec: ParameterSpec, parameter: Parameter, groups: Groups | None, tied: bool, dtype: torch.dtype | None
) -> BucketKind | None:
    """In which kind of bucket a parameter is, or None if its gradient is true as it comes."""
    own = parameter.groups if isinstance(parameter, ShardedParameter) else None
    groups = own or groups
    if groups is None:
        raise RankError(f"parameter {spec.name} does not know the groups of its mesh, so it can't be synced")
    storage = effective_storage(spec, groups.mesh.sizes)
    axes = () if storage.shards_parameter else summing_axes(spec, groups.mesh)  # its share comes summed (`zero3`)
    if not spec.trainable or not (axes or tied):
        return None
    if tied:
        return BucketKind(groups, axes, (), dtype or compute_dtype(spec), TiedBucket)
    split = storage.axes if storage.shards_gradient else ()
    return BucketKind(groups, axes, split, dtype or compute_dtype(spec), runtime_class(storage, GradientBucket))

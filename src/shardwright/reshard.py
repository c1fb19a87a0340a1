"""How a value gets from one layout to another: the reshards that exist, each one collective forward and backward.

What a reshard does forward decides what it does backward, because a layout carries its gradient's
layout with it (I invariant, R replicate, P partial, S shard):

    from -> to   forward          backward           kind               generated code
    P -> I       all_reduce       -                  all_reduce         comm.all_reduce(x, g)
    P -> R       all_reduce       all_reduce         all_reduce_to_r    comm.all_reduce(x, g, dst=R)
    I -> R       -                all_reduce         replicate          comm.replicate(x, g)
    S -> I       all_gather       slice              all_gather         comm.all_gather(x, dim, g)
    S -> R       all_gather       reduce_scatter     all_gather_to_r    comm.all_gather(x, dim, g, dst=R)
    I -> S       slice            all_gather         shard              comm.shard(x, dim, g)
    R -> S       slice            zero-pad           shard_from_r       comm.shard(x, dim, g, src=R)
    P -> S       reduce_scatter   all_gather         reduce_scatter     comm.reduce_scatter(x, dim, g)
    S -> P       zero-pad         slice              zero_pad           comm.zero_pad(x, dim, g)
    S -> S'      all_to_all       all_to_all         all_to_all         comm.all_to_all(x, dim, dim', g)
    I -> P       zero but on one  -                  partial            comm.partial(x, g)
    R -> I       -                zero but on one    invariant          comm.invariant(x, g)

A partial maximum or minimum has one reshard, `reduce`, and no gradient. Over several axes at once (one group of their
product) go sums of one kind, and all_gather, shard, reduce_scatter and zero_pad of shards that are one shard together.

Shards of one dim are ordered, and a step takes off or adds the minor-most. Where two of them take different factors
of the dim their order is only a way to write them (`reordered`, `applied_after`), so either can be first. Where they
take the same factor, one has to be gathered before the other can come.

Which of the paths through these steps is taken is a matter of prices: `cost.reshard_search`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from .layout import (
    INVARIANT,
    MB,
    REPLICATE,
    Block,
    Layout,
    Mesh,
    Partial,
    Placement,
    Shard,
    join_shards,
    make_layout,
    replicated,
)

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
COLLECTIVES: dict[str, tuple[Collective | None, Collective | None]] = {  # step: collective forward, backward
    "all_reduce": ("all_reduce", None),
    "replicate": (None, "all_reduce"),
    "all_reduce_to_r": ("all_reduce", "all_reduce"),
    "all_gather": ("all_gather", None),
    "all_gather_to_r": ("all_gather", "reduce_scatter"),
    "shard": (None, "all_gather"),
    "shard_from_r": (None, None),
    "reduce_scatter": ("reduce_scatter", "all_gather"),
    "zero_pad": (None, None),
    "all_to_all": ("all_to_all", "all_to_all"),
    "partial": (None, None),
    "invariant": (None, None),
    "reduce": ("all_reduce", None),
}
SUMS = ("all_reduce", "replicate", "all_reduce_to_r", "reduce")
"""The kinds that any axes can do at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reshard:
    """One step: the runtime's name for it, the axes, and where it shards or joins."""

    kind: str
    axes: tuple[str, ...]
    after: Layout
    dim: int | None = None
    sharding: Shard | None = None
    to_dim: int | None = None
    to_sharding: Shard | None = None
    reduction: str = "sum"

    @property
    def sends(self) -> bool:
        """Whether it communicates in forward, and not in backward only."""
        return COLLECTIVES[self.kind][0] is not None


# The order of the shards of a dim.


def reordered(layout: Layout, axis: str, sizes: Mapping[str, int]) -> Layout | None:
    """The same layout written with the shard of `axis` minor-most on its dim, if that is possible."""
    split = layout.shard_of(axis)
    if split is None:
        return None
    dim, _ = split
    shards = list(layout.shards[dim])
    at = next(index for index, shard in enumerate(shards) if shard.axis == axis)
    while at + 1 < len(shards):
        swapped = _swap(shards[at], shards[at + 1], sizes)
        if swapped is None:
            return None
        shards[at], shards[at + 1] = swapped
        at += 1
    every = [tuple(shards) if index == dim else old for index, old in enumerate(layout.shards)]
    return Layout(shards=tuple(every), rest=layout.rest)


def _swap(major: Shard, minor: Shard, sizes: Mapping[str, int]) -> tuple[Shard, Shard] | None:
    """(minor, major) in the order in which the old minor one is applied first; None if they take one factor."""
    if not _both_plain(major, minor, sizes):
        return None
    parts, other = sizes[major.axis], sizes[minor.axis]
    (a,), (b,) = major.blocks, minor.blocks
    inner = a.size // parts
    if b.outer % (a.outer * inner) == 0 and a.inner % (b.size * b.inner) == 0:  # minor lies inside
        first = Shard(axis=minor.axis, blocks=(Block(b.outer * parts, b.size, b.inner),))
        return first, Shard(axis=major.axis, blocks=(Block(a.outer, a.size, a.inner // other),))
    if a.outer % (b.outer * b.size) == 0 and b.inner % (inner * a.inner) == 0:  # minor lies outside
        first = Shard(axis=minor.axis, blocks=(Block(b.outer, b.size, b.inner * parts),))
        return first, Shard(axis=major.axis, blocks=(Block(a.outer // other, a.size, a.inner),))
    return None


def _both_plain(a: Shard, b: Shard, sizes: Mapping[str, int]) -> bool:
    return all(s.repeat == 1 and len(s.blocks) == 1 and s.even(sizes[s.axis]) for s in (a, b))


def applied_first(shards: Sequence[Shard], at: int, sizes: Mapping[str, int]) -> Shard | None:
    """One of the shards of a dim, as it is written if it is applied before all others; None if it can't be."""
    shard: Shard | None = shards[at]
    for major in reversed(shards[:at]):
        swapped = _swap(major, shard, sizes) if shard is not None else None
        shard = swapped[0] if swapped is not None else None
    return shard


def applied_after(first: Shard, shard: Shard, sizes: Mapping[str, int]) -> Shard | None:
    """A shard of the full dim, as it is written if `first` is applied before it; None if they take one factor."""
    if not _both_plain(first, shard, sizes):
        return None
    (a,), (b,), parts = first.blocks, shard.blocks, sizes[first.axis]
    if b.outer % (a.outer * a.size) == 0 and a.inner % (b.size * b.inner) == 0:  # it lies inside
        return Shard(axis=shard.axis, blocks=(Block(b.outer // parts, b.size, b.inner),))
    if a.outer % (b.outer * b.size) == 0 and b.inner % (a.size * a.inner) == 0:  # it lies outside
        return Shard(axis=shard.axis, blocks=(Block(b.outer, b.size, b.inner // parts),))
    return None


def same_placement(a: Layout, b: Layout, sizes: Mapping[str, int]) -> bool:
    """Whether two layouts put the same elements in the same places."""
    if a == b:
        return True
    if a.rest != b.rest:
        return False
    for ours, theirs in zip(a.shards, b.shards, strict=True):
        if ours != theirs:
            if {shard.axis for shard in ours} != {shard.axis for shard in theirs}:
                return False
            alone = [{applied_first(s, at, sizes) for at in range(len(s))} for s in (ours, theirs)]
            if None in alone[0] or alone[0] != alone[1]:
                return False
    return True


# The steps.


def reshards_from(layout: Layout, goal: Layout, sizes: Mapping[str, int], gradient: bool) -> Iterator[Reshard]:
    """Every useful step: towards what the goal has on an axis, or to invariant on the way; and several at once."""
    sums: dict[tuple[str, str], list[Reshard]] = {}
    for axis in sorted(layout.axes | goal.axes):
        current = layout.placement(axis)
        from_one = (
            _steps_from_shard(layout, goal, axis, sizes, gradient)
            if current is None
            else _steps_from_copies(layout, goal, axis, current, sizes, gradient)
        )
        for step in from_one:
            yield step
            if step.kind in SUMS:
                sums.setdefault((step.kind, step.reduction), []).append(step)
    for steps in sums.values():
        for count in range(2, len(steps) + 1):
            for chosen in combinations(steps, count):
                yield _sum_over_all(layout, chosen, sizes)
    for dim in range(len(layout.shards)):
        yield from _joins(layout, goal, dim, sizes, gradient)
        yield from _splits(layout, goal, dim, sizes)


def _steps_from_shard(
    layout: Layout, goal: Layout, axis: str, sizes: Mapping[str, int], gradient: bool
) -> Iterator[Reshard]:
    moved = reordered(layout, axis, sizes)
    split = moved.shard_of(axis) if moved is not None else None
    if moved is None or split is None:
        return
    dim, shard = split
    bare, wanted = moved.without_shard(axis), goal.shard_of(axis)
    yield from _joined(bare, goal, (axis,), dim, shard, gradient)
    if wanted is not None and wanted[0] != dim and (to := _next_shard(bare, goal, axis, sizes)) is not None:
        after = bare.with_shard(wanted[0], to)
        yield Reshard(
            kind="all_to_all", axes=(axis,), dim=dim, sharding=shard, to_dim=wanted[0], to_sharding=to, after=after
        )


def _joined(
    bare: Layout, goal: Layout, axes: tuple[str, ...], dim: int, shard: Shard, gradient: bool
) -> Iterator[Reshard]:
    """The steps that take shards off, which leave `bare`."""
    yield Reshard(kind="all_gather", axes=axes, dim=dim, sharding=shard, after=bare)
    wanted = {goal.placement(axis) for axis in axes}
    if wanted == {REPLICATE} and gradient:
        yield Reshard(kind="all_gather_to_r", axes=axes, dim=dim, sharding=shard, after=_placed(bare, axes, REPLICATE))
    if wanted == {Partial("sum")}:
        yield Reshard(kind="zero_pad", axes=axes, dim=dim, sharding=shard, after=_placed(bare, axes, Partial("sum")))


def _placed(layout: Layout, axes: tuple[str, ...], placement: Placement) -> Layout:
    return make_layout(layout.shards, {**dict(layout.rest), **dict.fromkeys(axes, placement)})


def _steps_from_copies(
    layout: Layout, goal: Layout, axis: str, current: Placement, sizes: Mapping[str, int], gradient: bool
) -> Iterator[Reshard]:
    wanted = goal.placement(axis)

    def step(kind: str, to: Placement, reduction: str = "sum") -> Reshard:
        return Reshard(kind=kind, axes=(axis,), after=layout.with_placement(axis, to), reduction=reduction)

    if isinstance(current, Partial) and current.op != "sum":
        yield step("reduce", INVARIANT, current.op)
        return
    if isinstance(current, Partial):
        yield step("all_reduce", INVARIANT)
        if wanted == REPLICATE and gradient:
            yield step("all_reduce_to_r", REPLICATE)
    elif current == INVARIANT:
        if wanted == REPLICATE:
            yield step("replicate", REPLICATE)
        if wanted == Partial("sum"):
            yield step("partial", wanted)
    else:
        yield step("invariant", INVARIANT)
    split = goal.shard_of(axis)
    if split is not None and (to := _next_shard(layout, goal, axis, sizes)) is not None:
        after = layout.with_shard(split[0], to)
        yield Reshard(kind=_sharding_kind(current), axes=(axis,), dim=split[0], sharding=to, after=after)


def _sharding_kind(current: Placement) -> str:
    return "reduce_scatter" if isinstance(current, Partial) else "shard" if current == INVARIANT else "shard_from_r"


def _next_shard(layout: Layout, goal: Layout, axis: str, sizes: Mapping[str, int]) -> Shard | None:
    """The goal's shard of an axis as the next one on its dim, if it can be that as the layout is now."""
    split = goal.shard_of(axis)
    assert split is not None
    wanted, present = goal.shards[split[0]], layout.shards[split[0]]
    at = wanted.index(split[1])
    if present == wanted[:at]:
        return split[1]
    shard = applied_first(wanted, at, sizes)
    for other in present:
        shard = applied_after(other, shard, sizes) if shard is not None else None
    return shard


def _sum_over_all(layout: Layout, steps: Sequence[Reshard], sizes: Mapping[str, int]) -> Reshard:
    axes = {step.axes[0] for step in steps}
    after = layout
    for step in steps:
        after = after.with_placement(step.axes[0], step.after.placement(step.axes[0]) or INVARIANT)
    ordered = tuple(axis for axis in sizes if axis in axes)
    return Reshard(kind=steps[0].kind, axes=ordered, after=after, reduction=steps[0].reduction)


def _joins(layout: Layout, goal: Layout, dim: int, sizes: Mapping[str, int], gradient: bool) -> Iterator[Reshard]:
    """The minor-most shards of a dim, taken off at once."""
    shards = layout.shards[dim]
    for start in range(len(shards) - 1):
        joined = joint_shard(shards[start:], sizes)
        if joined is not None:
            axes = tuple(shard.axis for shard in shards[start:])
            rows = tuple(shards[:start] if at == dim else every for at, every in enumerate(layout.shards))
            yield from _joined(Layout(shards=rows, rest=layout.rest), goal, axes, dim, joined, gradient)


def _splits(layout: Layout, goal: Layout, dim: int, sizes: Mapping[str, int]) -> Iterator[Reshard]:
    """The next shards of the goal on a dim, added at once."""
    wanted, present = goal.shards[dim], len(layout.shards[dim])
    if wanted[:present] != layout.shards[dim]:
        return
    for end in range(present + 2, len(wanted) + 1):
        shards = wanted[present:end]
        axes = tuple(shard.axis for shard in shards)
        current, joined = {layout.placement(axis) for axis in axes}, joint_shard(shards, sizes)
        (placement,) = current if len(current) == 1 else (None,)
        if joined is None or placement is None or (isinstance(placement, Partial) and placement.op != "sum"):
            continue
        after = layout
        for shard in shards:
            after = after.with_shard(dim, shard)
        yield Reshard(kind=_sharding_kind(placement), axes=axes, dim=dim, sharding=joined, after=after)


def joint_shard(shards: Sequence[Shard], sizes: Mapping[str, int]) -> Shard | None:
    """Several shards of a dim as one over all their axes, which are ranks; None where there is no such."""
    return None if any(shard.axis == MB for shard in shards) else join_shards(shards, sizes)


def forget_gradient(layout: Layout) -> Layout:
    """The layout of a value that has no gradient: there R is I."""
    if not any(placement == REPLICATE for _, placement in layout.rest):
        return layout
    return make_layout(layout.shards, {name: placement for name, placement in layout.rest if placement != REPLICATE})


def parameter_layout(uses: Sequence[Layout], mesh: Mesh, rank: int) -> Layout:
    """How a parameter is sharded: as its most sharded use, with gradients that are reduced once a step."""
    if not uses:
        return replicated(rank)
    best = max(uses, key=lambda use: sum(mesh.axis(shard.axis).size for shards in use.shards for shard in shards))
    cut_axes = {shard.axis for shards in best.shards for shard in shards}
    rest: dict[str, Placement] = {}
    for axis in mesh.axes:
        if axis.name in cut_axes:
            continue
        split = any(use.shard_of(axis.name) is not None or use.placement(axis.name) == REPLICATE for use in uses)
        rest[axis.name] = REPLICATE if split else INVARIANT
    return make_layout(best.shards, rest)

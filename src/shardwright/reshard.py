"""How a value gets from one layout to another: reshards on one axis each, and the cheapest way through them.

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

A partial maximum or minimum has one reshard, `reduce`, and no gradient.

Shards of one dim are ordered: only the minor-most can be taken off, and a new one is always minor. Where
two of them split different factors of a dim, their order does not matter, and `reordered` says so.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Literal

from .errors import LayoutError
from .layout import INVARIANT, REPLICATE, Block, Layout, Mesh, Partial, Placement, Shard, make_layout, replicated

LATENCY = 20_000.0
"""What starting a collective costs, in bytes that could have been moved meanwhile."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Reshard:
    """One converter: the runtime's name for it, the axis, and where it cuts or joins."""

    kind: str
    axes: tuple[str, ...]
    after: Layout
    dim: int | None = None
    sharding: Shard | None = None
    to_dim: int | None = None
    to_sharding: Shard | None = None
    reduction: str = "sum"

    @property
    def communicates(self) -> bool:
        return any(COLLECTIVES[self.kind])

    @property
    def sends(self) -> bool:
        """Whether it talks in forward, and not in backward only."""
        return COLLECTIVES[self.kind][0] is not None


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
    parts, other = sizes[major.axis], sizes[minor.axis]
    if any(shard.repeat != 1 or len(shard.blocks) != 1 for shard in (major, minor)):
        return None
    if not (major.even(parts) and minor.even(other)):
        return None
    (a,), (b,) = major.blocks, minor.blocks
    inner = a.size // parts
    if b.outer % (a.outer * inner) == 0 and a.inner % (b.size * b.inner) == 0:  # minor lies inside
        first = Shard(axis=minor.axis, blocks=(Block(b.outer * parts, b.size, b.inner),))
        return first, Shard(axis=major.axis, blocks=(Block(a.outer, a.size, a.inner // other),))
    if a.outer % (b.outer * b.size) == 0 and b.inner % (inner * a.inner) == 0:  # minor lies outside
        first = Shard(axis=minor.axis, blocks=(Block(b.outer, b.size, b.inner * parts),))
        return first, Shard(axis=major.axis, blocks=(Block(a.outer // other, a.size, a.inner),))
    return None


def same_placement(a: Layout, b: Layout, sizes: Mapping[str, int]) -> bool:
    """Whether two layouts put the same elements in the same places."""
    if a == b:
        return True
    if a.rest != b.rest or [{c.axis for c in d} for d in a.shards] != [{c.axis for c in d} for d in b.shards]:
        return False
    for shards in b.shards:
        for shard in shards:
            moved = reordered(a, shard.axis, sizes)
            if moved is None:
                return False
            a = moved
    return a == b


def local_bytes(layout: Layout, whole_bytes: float, sizes: Mapping[str, int]) -> float:
    return whole_bytes / math.prod(sizes[shard.axis] for shards in layout.shards for shard in shards)


def reshard_cost(step: Reshard, before: Layout, whole_bytes: float, sizes: Mapping[str, int], gradient: bool) -> float:
    """Bytes on the wire plus latency, both directions; a stand-in until a cluster says better."""
    parts = math.prod(sizes[name] for name in step.axes)
    ratio = (parts - 1) / parts
    large = max(local_bytes(before, whole_bytes, sizes), local_bytes(step.after, whole_bytes, sizes))
    forward, backward = {
        "all_reduce": (2.0, 0.0), "replicate": (0.0, 2.0), "all_reduce_to_r": (2.0, 2.0), "all_gather": (1.0, 0.0),
        "all_gather_to_r": (1.0, 1.0), "shard": (0.0, 1.0), "shard_from_r": (0.0, 0.0), "reduce_scatter": (1.0, 1.0),
        "zero_pad": (0.0, 0.0), "all_to_all": (1.0 / parts, 1.0 / parts), "partial": (0.0, 0.0),
        "invariant": (0.0, 0.0), "reduce": (2.0, 0.0),
    }[step.kind]  # fmt: skip
    cost = 0.01 * large + 1.0  # even a copy is not free
    for part in (forward, backward if gradient else 0.0):
        if part:
            cost += part * ratio * large + LATENCY
    return cost


def reshards_from(layout: Layout, goal: Layout, sizes: Mapping[str, int], gradient: bool) -> Iterator[Reshard]:
    """Every useful step on one axis: towards what the goal has there, or to WHOLE on the way."""
    for axis in sorted(layout.axes | goal.axes):
        wanted, current = goal.shard_of(axis), layout.shard_of(axis)
        if current is not None:
            yield from _steps_from_split(layout, axis, current, wanted, goal.placement(axis), sizes, gradient)
        else:
            placement = layout.placement(axis)
            assert placement is not None
            yield from _steps_from_rest(layout, axis, placement, wanted, goal.placement(axis), gradient)


def _steps_from_split(
    layout: Layout,
    axis: str,
    current: tuple[int, Shard],
    wanted: tuple[int, Shard] | None,
    placement: Placement | None,
    sizes: Mapping[str, int],
    gradient: bool,
) -> Iterator[Reshard]:
    moved = reordered(layout, axis, sizes)
    if moved is None:
        return
    dim, shard = next((d, c) for d, shards in enumerate(moved.shards) for c in shards if c.axis == axis)
    bare = moved.without_shard(axis)
    yield Reshard(kind="all_gather", axes=(axis,), dim=dim, sharding=shard, after=bare)
    if placement == REPLICATE and gradient:
        yield Reshard(
            kind="all_gather_to_r", axes=(axis,), dim=dim, sharding=shard, after=bare.with_placement(axis, REPLICATE)
        )
    if isinstance(placement, Partial) and placement.op == "sum":
        yield Reshard(
            kind="zero_pad", axes=(axis,), dim=dim, sharding=shard, after=bare.with_placement(axis, placement)
        )
    if wanted is not None and (to := _fits(bare, wanted)) is not None:
        after = bare.with_shard(wanted[0], to)
        if wanted[0] != dim:
            yield Reshard(
                kind="all_to_all", axes=(axis,), dim=dim, sharding=shard, to_dim=wanted[0], to_sharding=to, after=after
            )


def _steps_from_rest(
    layout: Layout,
    axis: str,
    current: Placement,
    wanted: tuple[int, Shard] | None,
    placement: Placement | None,
    gradient: bool,
) -> Iterator[Reshard]:
    def step(kind: str, to: Placement, reduction: str = "sum") -> Reshard:
        return Reshard(kind=kind, axes=(axis,), after=layout.with_placement(axis, to), reduction=reduction)

    if isinstance(current, Partial) and current.op != "sum":
        yield step("reduce", INVARIANT, current.op)
        return
    if isinstance(current, Partial):
        yield step("all_reduce", INVARIANT)
        if placement == REPLICATE and gradient:
            yield step("all_reduce_to_r", REPLICATE)
    elif current == INVARIANT:
        if placement == REPLICATE:
            yield step("replicate", REPLICATE)
        if isinstance(placement, Partial):
            yield step("partial", placement)
    else:
        yield step("invariant", INVARIANT)
    if wanted is not None and (to := _fits(layout, wanted)) is not None:
        kind = "reduce_scatter" if isinstance(current, Partial) else "shard" if current == INVARIANT else "shard_from_r"
        yield Reshard(kind=kind, axes=(axis,), dim=wanted[0], sharding=to, after=layout.with_shard(wanted[0], to))


def _fits(layout: Layout, wanted: tuple[int, Shard]) -> Shard | None:
    """The goal's cut, if it can be the next one on its dim as the layout is now."""
    dim, shard = wanted
    return shard if all(other.axis != shard.axis for other in layout.shards[dim]) else None


@lru_cache(maxsize=65536)
def _search(
    starts: tuple[tuple[Layout, float], ...],
    goal: Layout,
    shape: tuple[int, ...],
    whole_bytes: float,
    size_items: tuple[tuple[str, int], ...],
    gradient: bool,
) -> tuple[int, tuple[Reshard, ...], float]:
    sizes = dict(size_items)
    order = count()
    queue: list[tuple[float, int, Layout, int, tuple[Reshard, ...]]] = []
    for index, (start, cost) in enumerate(starts):
        heapq.heappush(queue, (cost, next(order), start, index, ()))
    done: set[Layout] = set()
    while queue:
        cost, _, layout, index, path = heapq.heappop(queue)
        if same_placement(layout, goal, sizes):
            return index, path, cost
        if layout in done:
            continue
        done.add(layout)
        for step in reshards_from(layout, goal, sizes, gradient):
            if _consistent(step.after, shape, sizes):
                further = cost + reshard_cost(step, layout, whole_bytes, sizes, gradient)
                heapq.heappush(queue, (further, next(order), step.after, index, (*path, step)))
    raise LayoutError(f"no way from {starts[0][0]} to {goal} for a shape of {list(shape)}")


def _consistent(layout: Layout, shape: Sequence[int], sizes: Mapping[str, int]) -> bool:
    """Whether every cut counts the elements that the cuts before it leave (on the first device)."""
    for size, shards in zip(shape, layout.shards, strict=True):
        for shard in shards:
            if shard.elements != size:
                return False
            size = shard.local(sizes[shard.axis], 0)
    return True


def find_reshards(
    starts: Sequence[Layout],
    goal: Layout,
    shape: Sequence[int],
    item_size: int,
    sizes: Mapping[str, int],
    gradient: bool,
) -> tuple[int, tuple[Reshard, ...], float]:
    """The cheapest steps to `goal` from any of `starts`: (which start, the steps, their cost)."""
    if not gradient:
        starts = [forget_gradient(layout) for layout in starts]
        goal = forget_gradient(goal)
    return _search(
        tuple((layout, 0.0) for layout in starts),
        goal,
        tuple(shape),
        float(math.prod(shape) * item_size),
        tuple(sorted(sizes.items())),
        gradient,
    )


def forget_gradient(layout: Layout) -> Layout:
    """The layout of a value that has no gradient: FANNED means nothing there."""
    if not any(placement == REPLICATE for _, placement in layout.rest):
        return layout
    return make_layout(layout.shards, {name: placement for name, placement in layout.rest if placement != REPLICATE})


@dataclass(slots=True)
class LayoutForm:
    """A value in one layout, and the step that makes it from another form of the same value."""

    layout: Layout
    parent: LayoutForm | None = None
    step: Reshard | None = None
    name: str | None = None  # set by who places it, once it stands in a program


def forms_of(
    produced: Layout,
    goals: Sequence[Layout],
    shape: Sequence[int],
    item_size: int,
    sizes: Mapping[str, int],
    gradient: bool,
) -> tuple[LayoutForm, dict[Layout, LayoutForm]]:
    """The form that is produced, and for each layout that a use wants its form.

    They make a tree: uses are served in the order of their cost, each from the nearest form that is there already.
    """

    def steps(starts: list[Layout], goal: Layout) -> tuple[int, tuple[Reshard, ...], float]:
        return find_reshards(starts, goal, shape, item_size, sizes, gradient)

    root = LayoutForm(layout=produced if gradient else forget_gradient(produced))
    if all(goal is produced for goal in goals):  # nearly always: equal layouts are one
        return root, {root.layout: root}
    known, by_use = [root], dict[Layout, LayoutForm]()
    wanted = {goal if gradient else forget_gradient(goal) for goal in goals}
    for goal in sorted(wanted, key=lambda goal: (steps([root.layout], goal)[2], str(goal), repr(goal))):
        index, path, _ = steps([form.layout for form in known], goal)
        form = known[index]
        for step in path:
            there = next((other for other in known if other.layout == step.after), None)
            form = there or LayoutForm(layout=step.after, parent=form, step=step)
            if there is None:
                known.append(form)
        by_use[goal] = form
    return root, by_use


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

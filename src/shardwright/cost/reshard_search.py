"""The cheapest reshards between layouts, by the prices of `reshard_prices`: a path for one use, a tree for several."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import NamedTuple

from ..errors import LayoutError
from ..layout import Layout
from ..reshard import Reshard, forget_gradient, reshards_from, same_placement
from .reshard_prices import Price, ReshardPrices


class Path(NamedTuple):
    """The steps from one layout to another, and what they cost together."""

    steps: tuple[Reshard, ...]
    cost: float


def find_reshards(
    start: Layout, goal: Layout, shape: Sequence[int], item_size: int, prices: ReshardPrices, gradient: bool
) -> Path:
    """The cheapest path from one layout of a value to another."""
    for layout in (start, goal):
        if not _fits(layout, shape, prices):
            raise LayoutError(f"no way from {start} to {goal} for a shape of {list(shape)}")
    if not gradient:
        start, goal = forget_gradient(start), forget_gradient(goal)
    return cheapest_path(start, goal, float(math.prod(shape) * item_size), prices, gradient)


def _fits(layout: Layout, shape: Sequence[int], prices: ReshardPrices) -> bool:
    """Whether every shard counts the elements that those before it leave (on the first device)."""
    for size, shards in zip(shape, layout.shards, strict=True):
        for shard in shards:
            if shard.elements != size:
                return False
            size = shard.local(prices.sizes[shard.axis], 0)
    return True


def cheapest_path(start: Layout, goal: Layout, bytes: float, prices: ReshardPrices, gradient: bool) -> Path:
    """The cheapest path of a value of so many bytes (unsharded); of equal ones that with the fewest steps."""
    key = (start, goal, bytes, gradient)
    path = prices.paths.get(key)
    if path is None:
        path = prices.paths[key] = _search(start, goal, bytes, prices, gradient)
    return path


def _search(start: Layout, goal: Layout, bytes: float, prices: ReshardPrices, gradient: bool) -> Path:
    sizes, order = prices.sizes, count()
    queue: list[tuple[float, int, int, Layout, tuple[Reshard, ...]]] = [(0.0, 0, next(order), start, ())]
    done: set[Layout] = set()
    while queue:
        cost, length, _, layout, steps = heapq.heappop(queue)
        if same_placement(layout, goal, sizes):
            last = tuple(replace(step, after=goal) for step in steps[-1:])  # written as the goal is
            return Path((*steps[:-1], *last), cost)
        if layout in done:
            continue
        done.add(layout)
        for step in reshards_from(layout, goal, sizes, gradient):
            if step.after not in done:
                further = cost + sum(step_price(step, layout, bytes, prices, gradient))
                heapq.heappush(queue, (further, length + 1, next(order), step.after, (*steps, step)))
    raise LayoutError(f"no way from {start} to {goal}")


def step_price(step: Reshard, before: Layout, bytes: float, prices: ReshardPrices, gradient: bool) -> Price:
    """The price of a step of a path, of a value of so many bytes (unsharded)."""
    return prices.step(step.kind, step.axes, step_bytes(step, before, bytes, prices), gradient)


def step_bytes(step: Reshard, before: Layout, bytes: float, prices: ReshardPrices) -> float:
    """The bytes that a device has of a value without shards on the axes of a step."""
    for shards in before.shards:
        for shard in shards:
            if shard.axis not in step.axes:
                bytes /= prices.sizes[shard.axis]
    return bytes


def path_price(start: Layout, steps: Sequence[Reshard], bytes: float, prices: ReshardPrices, gradient: bool) -> Price:
    """The price of some steps one after the other."""
    copy = copy_back = send = send_back = 0.0
    for step in steps:
        price = step_price(step, start, bytes, prices, gradient)
        copy, copy_back, send, send_back = copy + price[0], copy_back + price[1], send + price[2], send_back + price[3]
        start = step.after
    return copy, copy_back, send, send_back


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
    prices: ReshardPrices,
    gradient: bool,
) -> tuple[LayoutForm, dict[Layout, LayoutForm]]:
    """The form that is produced, and for each layout that a use wants its form.

    They make a tree, in which what several uses need is made once. The planner has a value with several uses first
    resharded to one layout (a hub), and from there to each use. The tree is built by way of every layout that might be
    that one, each use from the nearest form that is there, and the cheapest is taken: so it costs no more.
    """
    if all(goal is produced for goal in goals):  # nearly always: equal layouts are one
        root = LayoutForm(layout=produced if gradient else forget_gradient(produced))
        return root, {root.layout: root}
    tree = cheapest_tree(produced, goals, shape, item_size, prices, gradient)
    forms = [LayoutForm(layout=tree.layouts[0])]
    for parent, step in tree.branches:
        forms.append(LayoutForm(layout=step.after, parent=forms[parent], step=step))
    return forms[0], {goal: forms[at] for goal, at in tree.ends.items()}


def cheapest_tree(
    produced: Layout,
    goals: Iterable[Layout],
    shape: Sequence[int],
    item_size: int,
    prices: ReshardPrices,
    gradient: bool,
) -> ReshardTree:
    """The tree that leads from a layout to those that uses want."""
    if not gradient:
        produced, goals = forget_gradient(produced), map(forget_gradient, goals)
    wanted = tuple(dict.fromkeys(goals))
    key = (produced, wanted, tuple(shape), item_size, gradient)
    tree = prices.paths.get(key)
    if tree is None:
        hubs = (produced, *wanted) if len(wanted) > 1 else (produced,)
        trees = [ReshardTree(produced, hub, wanted, shape, item_size, prices, gradient) for hub in hubs]
        tree = prices.paths[key] = min(trees, key=lambda tree: tree.cost)  # the first of equal ones
    return tree


class ReshardTree:
    """All forms of a value by way of a hub: the first is produced, each of the others made from one before it."""

    def __init__(
        self, root: Layout, hub: Layout, goals: Sequence[Layout], shape: Sequence[int], item_size: int,
        prices: ReshardPrices, gradient: bool,
    ) -> None:  # fmt: skip
        self.layouts, self.cost = [root], 0.0
        self.branches: list[tuple[int, Reshard]] = []
        self.ends: dict[Layout, int] = {}
        self._value = (shape, item_size, prices, gradient)
        self._grow(hub)
        left = list(goals)
        while left:
            nearest = min(left, key=lambda goal: (self._nearest(goal)[1].cost, str(goal), repr(goal)))
            self.ends[nearest] = self._grow(nearest)
            left.remove(nearest)

    def _nearest(self, goal: Layout) -> tuple[int, Path]:
        paths = [(at, find_reshards(layout, goal, *self._value)) for at, layout in enumerate(self.layouts)]
        return min(paths, key=lambda path: (path[1].cost, len(path[1].steps)))

    def _grow(self, goal: Layout) -> int:
        """Add what leads to a layout; its number."""
        at, path = self._nearest(goal)
        self.cost += path.cost
        for step in path.steps:
            self.branches.append((at, step))
            self.layouts.append(step.after)
            at = len(self.layouts) - 1
        return at

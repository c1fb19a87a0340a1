"""The price of a reshard for all pairs of layouts at once, as the planner needs it.

On one axis a change of placement is a step or two (the table of `reshard`; two go by way of invariant). On several axes
they follow each other in the best order, each on what the others have left of the value by then:

    price(a, b) = min over orders of  sum over axes of  change(axis, a, b, the axes that shard the value meanwhile)

Where several axes change alike, one step over their product may take their place. These are paths that the search for
a single pair (`reshard_search`) goes through too, so it never finds a more expensive one. Not every order is possible:
a shard that takes a factor of a dim from another axis has to wait until that has left it. There an axis may be lifted:
made invariant before the others change, and what it has to be after. Shards that keep their place among those of their
dim (uneven ones under others) are priced by the search.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import combinations, permutations
from typing import NamedTuple

import numpy as np

from ..cluster import Cluster
from ..layout import INVARIANT, Layout, Mesh, Partial, Shard
from ..reshard import applied_after, applied_first, forget_gradient, joint_shard
from .reshard_prices import ClusterPrices, Price
from .reshard_search import cheapest_path, path_price
from .resources import COUNT

Place = tuple[str, int, Shard | tuple[Shard, ...] | None]
"""A placement on one axis: a letter, the dim of a shard, and the shard as if it were alone on that dim; if it can't be
written so, with those before it."""

Unit = tuple[int, ...]
"""Axes of a mesh, by number, that are changed at once."""

STEPS = {
    "PI": "all_reduce", "IR": "replicate", "PR": "all_reduce_to_r", "SI": "all_gather", "SR": "all_gather_to_r",
    "IS": "shard", "RS": "shard_from_r", "PS": "reduce_scatter", "SP": "zero_pad", "IP": "partial", "RI": "invariant",
    "MI": "reduce",
}  # fmt: skip
"""From one letter to another: the kind of reshard."""

LETTERS = "SIRPM"
"""Shard, invariant, replicate, pending sum, pending maximum or minimum."""

S = LETTERS.index("S")
INV = LETTERS.index("I")


def _codes(*changes: str) -> np.ndarray:
    return np.array([a + b in changes for a in LETTERS for b in LETTERS])


FROM, TO = ([LETTERS.index(change[end]) for change in STEPS] for end in (0, 1))

SUMMED, JOINED, SPLIT = _codes("PI", "PR", "IR"), _codes("SI", "SR", "SP"), _codes("IS", "RS", "PS")
"""Whether several axes can change so at once: sums, and shards of one dim that are one shard together."""


class ReshardTables(ClusterPrices):
    """Prices of all pairs of layouts on one mesh of one cluster. Answers are kept."""

    def __init__(self, mesh: Mesh, cluster: Cluster, placed: Mesh | None = None) -> None:
        super().__init__(mesh, cluster, placed)
        self._tables: dict[tuple[tuple[str, ...], float, bool], tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        self._numbers: dict[Place, int] = {}
        self._places: list[Place] = []
        self._placed: dict[tuple[Layout, bool], tuple[int, ...]] = {}
        self._joint: dict[tuple[Layout, Unit], tuple[bool, bool]] = {}
        self._clashes = np.zeros((0, 0), dtype=bool)

    def prices(self, starts: Sequence[Layout], goals: Sequence[Layout], bytes: float, gradient: bool) -> np.ndarray:
        """[start, goal, resource]: what each reshard of a value of so many bytes (unsharded) uses."""
        every = np.array([self._places_of(layout, gradient) for layout in (*starts, *goals)], dtype=np.intp)
        pairs = _Pairs(every, len(starts), self._places)
        single: list[Unit] = [(axis,) for axis in pairs.moving]
        joint = {unit: alike for unit in pairs.several() if (alike := self._alike(pairs, unit, starts, goals))}
        tables = {unit: self._changes(unit, pairs.places, bytes, gradient) for unit in (*single, *joint)}
        waits, cheapest = self._waits(pairs), _Cheapest(pairs.shape)
        for order in permutations(single):
            cheapest.offer(_in_turn(pairs, tables, order), _possible(order, waits))
        for unit, alike in joint.items():
            for order in permutations([unit, *(other for other in single if other[0] not in unit)]):
                allowed = alike.allowed(order[0] == unit, order[-1] == unit)
                cheapest.offer(_in_turn(pairs, tables, order), allowed & _possible(order, waits))
        for lifted in pairs.moving if waits else ():
            ends, waiting = self._lift(pairs, lifted, bytes, gradient), np.logical_or.reduce([*waits.values()])
            for order in permutations([unit for unit in single if unit != (lifted,)]):
                cheapest.offer(ends + _in_turn(pairs, tables, order, lifted), waiting & _possible(order, waits))
        for i, j in np.argwhere(pairs.stuck):
            cheapest.rows[i, j] = self._searched(starts[i], goals[j], bytes, gradient)
        prices = np.zeros((*pairs.shape, COUNT))
        prices[..., 0:4] = cheapest.rows
        return prices

    def _searched(self, start: Layout, goal: Layout, bytes: float, gradient: bool) -> Price:
        """The price of one pair, by the search."""
        if not gradient:
            start, goal = forget_gradient(start), forget_gradient(goal)
        return path_price(start, cheapest_path(start, goal, bytes, self, gradient).steps, bytes, self, gradient)

    def _places_of(self, layout: Layout, gradient: bool) -> tuple[int, ...]:
        """The number of a layout's place on each axis."""
        key = (layout, gradient)
        if key not in self._placed:
            places = [self._place(layout if gradient else forget_gradient(layout), axis) for axis in self.mesh.names]
            for place in places:
                if place not in self._numbers:
                    self._numbers[place] = len(self._places)
                    self._places.append(place)
            self._placed[key] = tuple(self._numbers[place] for place in places)
        return self._placed[key]

    def _place(self, layout: Layout, axis: str) -> Place:
        split = layout.shard_of(axis)
        if split is not None:
            shards = layout.shards[split[0]]
            at = shards.index(split[1])
            return "S", split[0], applied_first(shards, at, self.sizes) or shards[: at + 1]
        placement = layout.placement(axis)
        if isinstance(placement, Partial):
            return ("P" if placement.op == "sum" else "M"), -1, None
        return ("I" if placement == INVARIANT else "R"), -1, None

    # -- steps over axes -------------------------------------------------------------------

    def _changes(self, unit: Unit, places: list[list[Place]], bytes: float, gradient: bool) -> np.ndarray:
        """[from, to, which of the other axes shard the value, (compute, compute back, send, send back)]."""
        axis_places = places[unit[0]]
        index = np.array([LETTERS.index(place[0]) for place in axis_places])
        dims = np.array([place[1] for place in axis_places])
        split = (index == S)[:, None] & (index == S)[None, :]
        crosses = split & (dims[:, None] != dims[None, :])
        letters, exchange, regather = self._by_mask(unit, bytes, gradient)
        changes: np.ndarray = letters[:, index[:, None], index[None, :]].transpose(1, 2, 0, 3).copy()
        if split.any():
            changes[crosses] = exchange
            changes[split & ~crosses] = regather
        changes[np.arange(len(axis_places)), np.arange(len(axis_places))] = 0.0
        return changes

    def _by_mask(self, unit: Unit, bytes: float, gradient: bool) -> tuple[np.ndarray, ...]:
        """The tables of a unit, for each set of other axes that shard the value."""
        axes, bases = tuple(self.mesh.names[number] for number in unit), [bytes]
        for at, other in enumerate(self.mesh.axes):
            if at not in unit:  # the first is the lowest bit of a mask
                bases += [base / other.size for base in bases]
        return tuple(map(np.array, zip(*(self._table(axes, base, gradient) for base in bases), strict=True)))

    def _lift(self, pairs: _Pairs, axis: int, bytes: float, gradient: bool) -> np.ndarray:
        """Making an axis invariant before all others change, and what it has to be after that."""
        letters, *_ = self._by_mask((axis,), bytes, gradient)
        before, after = pairs.mask((axis,), ()), pairs.mask((axis,), pairs.axes)
        start, goal = np.divmod(pairs.codes[axis], len(LETTERS))
        ends: np.ndarray = letters[before, start, INV] + letters[after, INV, goal]
        return ends

    def _table(self, axes: tuple[str, ...], base: float, gradient: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Changes on an axis, or on several at once, of a value that has `base` bytes without a shard on it.

        [letter, letter, ...], from a shard of one dim to one of another, and to another shard of the same dim.
        """
        key = (axes, base, gradient)
        if key not in self._tables:
            direct = np.zeros((len(LETTERS), len(LETTERS), 4))
            direct[..., 0] = np.inf
            direct[FROM, TO] = [self.step(kind, axes, base, gradient) for kind in STEPS.values()]
            by_way = direct[:, INV][:, None] + direct[INV][None]  # of invariant
            letters, regather = _cheaper(direct, by_way), by_way[S, S]
            exchange = np.array(self.step("all_to_all", axes, base, gradient))
            self._tables[key] = letters, _cheaper(exchange, regather), regather
        return self._tables[key]

    def _alike(
        self, pairs: _Pairs, unit: Unit, starts: Sequence[Layout], goals: Sequence[Layout]
    ) -> _ChangedAlike | None:
        """Which pairs may change a unit at once; None if none does."""
        codes = pairs.codes[unit[0]]
        equal = (SUMMED | JOINED | SPLIT)[codes]
        for axis in unit[1:]:
            equal = equal & (pairs.codes[axis] == codes)
        if not equal.any():
            return None
        joined, split = equal & JOINED[codes], equal & SPLIT[codes]
        for i in np.flatnonzero(joined.any(1)).tolist():
            joined[i] &= self._is_joint(starts[i], unit)[0]
        for j in np.flatnonzero(split.any(0)).tolist():
            split[:, j] &= self._is_joint(goals[j], unit)[1]
        alike = _ChangedAlike(equal & SUMMED[codes], joined, split)
        return alike if any(part.any() for part in alike) else None

    def _is_joint(self, layout: Layout, unit: Unit) -> tuple[bool, bool]:
        """Whether the shards of a unit are one together and the minor-most of a dim; and whether they are all of it."""
        key = (layout, unit)
        if key not in self._joint:
            axes = {self.mesh.names[number] for number in unit}
            shards = next((every for every in layout.shards if every and every[-1].axis in axes), ())
            last = shards[-len(unit) :]
            joined = {shard.axis for shard in last} == axes and joint_shard(last, self.sizes) is not None
            self._joint[key] = joined, joined and len(shards) == len(unit)
        return self._joint[key]

    # -- orders ----------------------------------------------------------------------------

    def _waits(self, pairs: _Pairs) -> dict[tuple[int, int], np.ndarray]:
        """(axis, another): the pairs in which the other has to leave a dim before the axis can shard it."""
        waits = {}
        clashes = self._all_clashes()
        for other, axis in permutations(pairs.moving, 2):
            waiting = clashes[pairs.start_numbers[:, other][:, None], pairs.goal_numbers[:, axis][None, :]]
            if waiting.any():
                waiting &= pairs.moves(other) & pairs.moves(axis)
                if waiting.any():
                    waits[axis, other] = waiting
        return waits

    def _all_clashes(self) -> np.ndarray:
        """[place, place]: whether shards of two axes take the same factor of a dim."""
        known, count = len(self._clashes), len(self._places)
        if known < count:
            larger = np.zeros((count, count), dtype=bool)
            larger[:known, :known] = self._clashes
            for new in range(known, count):
                dim = self._places[new][1]
                for old in range(new) if dim >= 0 else ():
                    if self._places[old][1] == dim:
                        larger[new, old] = larger[old, new] = self._clash(self._places[new], self._places[old])
            self._clashes = larger
        return self._clashes

    def _clash(self, a: Place, b: Place) -> bool:
        first, second = a[2], b[2]
        if not isinstance(first, Shard) or not isinstance(second, Shard):
            return True
        return applied_after(first, second, self.sizes) is None


class _ChangedAlike(NamedTuple):
    """The pairs that may change several axes at once: at any time, before all other axes, after all others."""

    summed: np.ndarray
    joined: np.ndarray
    split: np.ndarray

    def allowed(self, first: bool, last: bool) -> np.ndarray:
        allowed: np.ndarray = self.summed | (self.joined & first) | (self.split & last)
        return allowed


class _Cheapest:
    """For each pair the price of the cheapest path so far: its sum, and its parts."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.sums = np.full(shape, np.inf)
        self.rows = np.zeros((*shape, 4))
        self.rows[..., 0] = np.inf

    def offer(self, total: np.ndarray, allowed: np.ndarray | np.bool) -> None:
        sums = total.sum(-1)
        better = (sums < self.sums) & allowed
        np.copyto(self.sums, sums, where=better)
        np.copyto(self.rows, total, where=better[..., None])


def _in_turn(
    pairs: _Pairs, tables: Mapping[Unit, np.ndarray], order: Sequence[Unit], lifted: int | None = None
) -> np.ndarray:
    """The price of all pairs if units change in an order. `lifted`: an axis that does not shard anything meanwhile."""
    total, before = np.zeros((*pairs.shape, 4)), list[int]()
    for unit in order:
        total += tables[unit][*pairs.at(unit[0]), pairs.mask(unit, before, lifted)]
        before += unit
    return total


def _possible(order: Sequence[Unit], waits: Mapping[tuple[int, int], np.ndarray]) -> np.ndarray | np.bool:
    """Which pairs can go in an order of units."""
    place = {number: at for at, unit in enumerate(order) for number in unit}
    possible: np.ndarray | np.bool = np.True_
    for (axis, other), waiting in waits.items():
        if axis in place and other in place and place[axis] < place[other]:
            possible = possible & ~waiting
    return possible


def _cheaper(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    chosen: np.ndarray = np.where((b.sum(-1) < a.sum(-1))[..., None], b, a)
    return chosen


class _Pairs:
    """All pairs of some layouts to start from and some to get to: how each lies on every axis, by number."""

    def __init__(self, every: np.ndarray, starts: int, known: Sequence[Place]) -> None:
        """`every` has the number of the place on each axis, among those known, for all starts and then all goals."""
        self.axes, self.shape = range(every.shape[1]), (starts, every.shape[0] - starts)
        self.start_numbers, self.goal_numbers = every[:starts], every[starts:]
        self.places: list[list[Place]] = []
        self.at_start: list[np.ndarray] = []
        self.at_goal: list[np.ndarray] = []
        for axis in self.axes:
            column = every[:, axis]
            numbers = np.array(sorted(set(column.tolist())), dtype=np.intp)
            at = np.searchsorted(numbers, column)
            self.places.append([known[number] for number in numbers])
            self.at_start.append(at[:starts])
            self.at_goal.append(at[starts:])
        self.moving = [axis for axis in self.axes if len(self.places[axis]) > 1]  # on the others all lie alike
        letters = [np.array([LETTERS.index(place[0]) for place in places]) for places in self.places]
        ends = [[letters[axis][at] for at in self.at(axis)] for axis in self.axes]
        self.codes = [start * len(LETTERS) + goal for start, goal in ends]
        self.sharded = [[(end == S).astype(np.intp) for end in both] for both in ends]

    def at(self, axis: int) -> tuple[np.ndarray, np.ndarray]:
        """From which place to which every pair goes on an axis."""
        return self.at_start[axis][:, None], self.at_goal[axis][None, :]

    def moves(self, axis: int) -> np.ndarray:
        """Which pairs change on an axis."""
        start, goal = self.at(axis)
        changed: np.ndarray = start != goal
        return changed

    @property
    def stuck(self) -> np.ndarray:
        """Which pairs change a shard whose place among the others of its dim is fixed."""
        stuck = np.zeros(self.shape, dtype=bool)
        for axis in self.moving:
            fixed = np.array([isinstance(place[2], tuple) for place in self.places[axis]])
            if fixed.any():
                start, goal = self.at(axis)
                stuck = stuck | (self.moves(axis) & (fixed[start] | fixed[goal]))
        return stuck

    def several(self) -> Iterator[Unit]:
        """All sets of two axes or more on which something moves."""
        for size in range(2, len(self.moving) + 1):
            yield from combinations(self.moving, size)

    def mask(self, unit: Unit, before: Collection[int], lifted: int | None = None) -> np.ndarray:
        """Which of the other axes shard the value when a unit has its turn after others, as bits."""
        mask = np.zeros(self.shape, dtype=np.intp)
        for bit, axis in enumerate(axis for axis in self.axes if axis not in unit):
            if axis == lifted:
                continue
            mask = mask + (self.sharded[axis][axis in before] << bit)
        return mask

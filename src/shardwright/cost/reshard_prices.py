"""The price of a reshard, for all pairs of layouts at once.

On one axis a step from one placement to another is a collective forward and one backward (the table of
`reshard`). On several axes the steps follow each other in the best order, each on what the others have left of the
value by then:

    price(a, b) = min over orders of  sum over axes of  step(axis, a, b, the axes that shard the value meanwhile)

Where several axes have the same pending sum, one all_reduce over their product may take their place.

Shards of one dim that take the same factor can't change places: if the major one changes under a minor one that stays,
the minor one is gathered before and sharded again after. What `lower` really does is found by a search over steps, and
is never more expensive.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from itertools import combinations, permutations

import numpy as np

from ..cluster import Cluster, Collective, Device, Span, collective_time
from ..layout import INVARIANT, Layout, Mesh, Partial
from ..reshard import COLLECTIVES, reordered
from .resources import COUNT
from .training import backend_traits

Place = tuple[str, int, object]
"""A placement on one axis: S with its dim and shard, I, R or P."""

Unit = tuple[int, ...]
"""Axes of a mesh, by number, that are changed at once."""

STEPS = {
    ("P", "I"): "all_reduce", ("I", "R"): "replicate", ("P", "R"): "all_reduce_to_r", ("S", "I"): "all_gather",
    ("S", "R"): "all_gather_to_r", ("I", "S"): "shard", ("R", "S"): "shard_from_r", ("P", "S"): "reduce_scatter",
    ("S", "P"): "zero_pad", ("I", "P"): "partial", ("R", "I"): "invariant", ("R", "P"): "partial",
}  # fmt: skip
"""(from, to): the kind of reshard. From R to P there are two, which send nothing."""

LETTERS = "SIRPM"
"""Shard, invariant, replicate, pending sum, pending maximum or minimum."""

SUMS = np.array([a + b in ("PI", "PR", "IR") for a in LETTERS for b in LETTERS])
"""Whether a step from one letter to another makes a sum, forward, backward or both."""


def place_on(layout: Layout, axis: str) -> Place:
    """How a layout lies on one axis."""
    shard = layout.shard_of(axis)
    if shard is not None:
        return "S", shard[0], shard[1]
    placement = layout.placement(axis)
    if isinstance(placement, Partial):
        return "P", -1, placement.op
    return ("I" if placement == INVARIANT else "R"), -1, None


def slowest_device(cluster: Cluster, ranks: Sequence[int]) -> Device:
    """The one that the others wait for."""
    if len(cluster.devices) == 1:
        return cluster.devices[0]
    return min({cluster.device(rank) for rank in ranks}, key=lambda device: max(peak for _, peak in device.flops))


class ReshardPrices:
    """Prices on one mesh of one cluster. Answers are kept.

    `placed` is the mesh of real devices, with axes of the same names, where an axis of `mesh` is partly one in time.
    """

    def __init__(self, mesh: Mesh, cluster: Cluster, placed: Mesh | None = None) -> None:
        self.mesh, self.cluster, self.placed = mesh, cluster, placed or mesh
        self.device = slowest_device(cluster, self.placed.devices)
        self.traits = backend_traits(self.device.name, cluster.nodes)
        self._tables: dict[tuple[tuple[str, ...], float, bool], tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        self._numbers: dict[Place, int] = {}
        self._places: list[Place] = []
        self._placed: dict[tuple[Layout, bool], tuple[int, ...]] = {}
        self._stuck_known: dict[tuple[Layout, str, str], bool] = {}
        self._times: dict[tuple[Collective, float, tuple[str, ...]], float] = {}
        self._spans: dict[tuple[str, ...], tuple[Span, ...]] = {
            (axis,): cluster.spans(self.placed, (axis,)) for axis in mesh.names
        }

    def collective(self, kind: Collective, bytes: float, axes: Sequence[str]) -> float:
        """Seconds of a collective over axes, with `bytes` as in `cluster.collective`."""
        key = (kind, bytes, tuple(axes))
        if key not in self._times:
            if key[2] not in self._spans:
                self._spans[key[2]] = self.cluster.spans(self.placed, key[2])
            spans = self._spans[key[2]]
            self._times[key] = max(collective_time(kind, bytes, span, self.cluster.measured) for span in spans)
        return self._times[key]

    def waited(self, kind: Collective, bytes: float, axes: Sequence[str]) -> float:
        """Seconds of a collective that the next op waits for."""
        return self.collective(kind, bytes, axes) + self.cluster.meeting

    def copy(self, bytes: float) -> float:
        return self.device.op_time(0.0, bytes, "copy", "")

    def prices(self, starts: Sequence[Layout], goals: Sequence[Layout], bytes: float, gradient: bool) -> np.ndarray:
        """[start, goal, resource]: what each reshard of a value of so many bytes (unsharded) uses."""
        prices = np.zeros((len(starts), len(goals), COUNT))
        best = np.full((len(starts), len(goals)), np.inf)
        every = np.array([self._places_of(layout, gradient) for layout in (*starts, *goals)], dtype=np.intp)
        pairs = _Pairs(every, len(starts), self._places)
        single = [(number,) for number in pairs.moving]
        joint = {unit: alike for unit in pairs.several() if (alike := pairs.alike(unit)).any()}
        tables = {unit: self._steps(unit, pairs.places, bytes, gradient) for unit in (*single, *joint)}
        for together in (None, *joint):
            units = single if together is None else [together, *(unit for unit in single if unit[0] not in together)]
            for order in permutations(units):
                total = np.zeros((len(starts), len(goals), 4))
                for place, unit in enumerate(order):
                    before = [number for numbers in order[:place] for number in numbers]
                    total += tables[unit][*pairs.at(unit[0]), pairs.mask(unit, before)]
                sums = total.sum(-1)
                better = (sums < best) & (True if together is None else joint[together])
                best = np.where(better, sums, best)
                prices[..., 0:4] = np.where(better[..., None], total, prices[..., 0:4])
        self._lift(prices, starts, goals, pairs, bytes, gradient)
        return prices

    def _places_of(self, layout: Layout, gradient: bool) -> tuple[int, ...]:
        """The number of a layout's place on each axis."""
        key = (layout, gradient)
        if key not in self._placed:
            places = [_forget(place_on(layout, axis), gradient) for axis in self.mesh.names]
            for place in places:
                if place not in self._numbers:
                    self._numbers[place] = len(self._places)
                    self._places.append(place)
            self._placed[key] = tuple(self._numbers[place] for place in places)
        return self._placed[key]

    def _steps(self, unit: Unit, places: list[list[Place]], bytes: float, gradient: bool) -> np.ndarray:
        """[from, to, which of the other axes shard the value, (compute, compute back, send, send back)]."""
        axes = tuple(self.mesh.names[number] for number in unit)
        others = [other for at, other in enumerate(self.mesh.axes) if at not in unit]
        axis_places = places[unit[0]]
        index = np.array([LETTERS.index(_letter(place)) for place in axis_places])
        dims = np.array([place[1] for place in axis_places])
        split = (index == LETTERS.index("S"))[:, None] & (index == LETTERS.index("S"))[None, :]
        crosses = split & (dims[:, None] != dims[None, :])
        bases = [bytes]
        for other in others:  # the first is the lowest bit of a mask
            bases += [base / other.size for base in bases]
        letters, exchange, regather = map(
            np.array, zip(*(self._table(axes, base, gradient) for base in bases), strict=True)
        )
        steps: np.ndarray = letters[:, index[:, None], index[None, :]].transpose(1, 2, 0, 3).copy()
        if split.any():
            steps[crosses] = exchange
            steps[split & ~crosses] = regather
        steps[np.arange(len(axis_places)), np.arange(len(axis_places))] = 0.0
        return steps

    def _table(self, axes: tuple[str, ...], base: float, gradient: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Steps on an axis, or on several at once, of a value that has `base` bytes without a shard on it.

        [letter, letter, ...], from a shard of one dim to one of another, and to another shard of the same dim.
        """
        key = (axes, base, gradient)
        if key not in self._tables:
            parts = math.prod(self.mesh.sizes[axis] for axis in axes)
            letters = np.zeros((len(LETTERS), len(LETTERS), 4))
            letters[..., 0] = np.inf
            for (a, b), kind in STEPS.items():
                forward, backward = COLLECTIVES[kind]
                ahead = self.waited(forward, base, axes) if forward else 0.0
                back = self.waited(backward, base, axes) if backward and gradient else 0.0
                copies = [self.copy(_copied(sent, {a, b}, base, parts)) for sent in (forward, backward)]
                letters[LETTERS.index(a), LETTERS.index(b)] = (copies[0], copies[1] * gradient, ahead, back)
            letters[LETTERS.index("M"), LETTERS.index("I")] = (
                self.copy(base), 0.0, self.waited("all_reduce", base, axes), 0.0
            )  # fmt: skip
            copy, time = self.copy(2 * base / parts), self.waited("all_to_all", base / parts, axes)
            exchange = np.array([copy, copy * gradient, time, time * gradient])
            copy, time = self.copy(base), self.waited("all_gather", base, axes)
            self._tables[key] = letters, exchange, np.array([copy, copy * gradient, time, time * gradient])
        return self._tables[key]

    def _lift(
        self,
        prices: np.ndarray,
        starts: Sequence[Layout],
        goals: Sequence[Layout],
        pairs: _Pairs,
        bytes: float,
        gradient: bool,
    ) -> None:
        """Add what it takes to gather a minor shard while the major one under it changes."""
        names, at_start, at_goal = self.mesh.names, pairs.at_start, pairs.at_goal
        for major, minor in ((x, y) for x in pairs.moving for y in range(x + 1, len(names))):
            stuck = [self._stuck(layouts, names[major], names[minor]) for layouts in (starts, goals)]
            moved = at_start[major][:, None] != at_goal[major][None, :]
            stays = at_start[minor][:, None] == at_goal[minor][None, :]
            replicated = [index for index, place in enumerate(pairs.places[minor]) if place[0] in "IR"]
            lifted = np.argwhere(moved & stays & (stuck[0][:, None] | stuck[1][None, :]))
            table = self._steps((minor,), pairs.places, bytes, gradient) if len(lifted) else np.zeros(0)
            for i, j in lifted:
                state = at_start[minor][i]
                if replicated:
                    prices[i, j, 0:4] += table[state, replicated[0], 0] + table[replicated[0], state, 0]
                else:
                    prices[i, j, 0:4] *= 3  # no such value is ever whole, so nobody has asked what that costs

    def _stuck(self, layouts: Sequence[Layout], major: str, minor: str) -> np.ndarray:
        """Which layouts have two shards of one dim that can't change places."""

        def is_stuck(layout: Layout) -> bool:
            key = (layout, major, minor)
            if key not in self._stuck_known:
                outer, inner = layout.shard_of(major), layout.shard_of(minor)
                together = outer is not None and inner is not None and outer[0] == inner[0]
                self._stuck_known[key] = together and reordered(layout, major, self.mesh.sizes) is None
            return self._stuck_known[key]

        return np.array([is_stuck(layout) for layout in layouts], dtype=bool)


class _Pairs:
    """All pairs of some layouts to start from and some to get to: how each lies on every axis, by number."""

    def __init__(self, every: np.ndarray, starts: int, known: Sequence[Place]) -> None:
        """`every` has the number of the place on each axis, among those known, for all starts and then all goals."""
        self.axes, self.shape = range(every.shape[1]), (starts, every.shape[0] - starts)
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
        letters = [np.array([LETTERS.index(_letter(place)) for place in places]) for places in self.places]
        ends = [[letters[axis][at] for at in self.at(axis)] for axis in self.axes]
        self.codes = [start * len(LETTERS) + goal for start, goal in ends]
        self.sharded = [[(end == LETTERS.index("S")).astype(np.intp) for end in both] for both in ends]

    def at(self, axis: int) -> tuple[np.ndarray, np.ndarray]:
        """From which place to which every pair goes on an axis."""
        return self.at_start[axis][:, None], self.at_goal[axis][None, :]

    def several(self) -> Iterator[Unit]:
        """All sets of two axes or more on which something moves."""
        for size in range(2, len(self.moving) + 1):
            yield from combinations(self.moving, size)

    def alike(self, unit: Unit) -> np.ndarray:
        """Which pairs have the same sum to make over all axes of a unit, forward, backward or both."""
        equal: np.ndarray = SUMS[self.codes[unit[0]]]
        for axis in unit[1:]:
            equal = equal & (self.codes[axis] == self.codes[unit[0]])
        return equal

    def mask(self, unit: Unit, before: Collection[int]) -> np.ndarray:
        """Which of the other axes shard the value when a unit has its turn after others, as bits."""
        mask = np.zeros(self.shape, dtype=np.intp)
        for bit, axis in enumerate(axis for axis in self.axes if axis not in unit):
            mask = mask + (self.sharded[axis][axis in before] << bit)
        return mask


def _copied(kind: Collective | None, letters: set[str], base: float, parts: int) -> float:
    """Bytes that are copied around a collective: what is gathered or scattered along a dim is put in order."""
    if kind in ("all_gather", "reduce_scatter"):
        return base
    if kind is not None or letters == {"I", "R"}:
        return 0.0
    return base / parts if "S" in letters else base  # take a share, or keep on one


def _letter(place: Place) -> str:
    return "M" if place[0] == "P" and place[2] != "sum" else place[0]


def _forget(place: Place, gradient: bool) -> Place:
    return ("I", -1, None) if place[0] == "R" and not gradient else place

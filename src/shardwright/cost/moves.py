"""The price of bringing a value from one layout to another, for all pairs of layouts at once.

On one axis a step from one placement to another is a collective forward and one backward (the table of
`conversion`). On several axes the steps follow each other in the best order, each on what the others have left of the
value by then:

    price(a, b) = min over orders of  sum over axes of  step(axis, a, b, the axes that cut the value meanwhile)

Cuts of one dim that take the same factor can't change places: if the major one changes under a minor one that stays,
the minor one is gathered before and cut again after. What `lower` really does is found by a search over steps, and is
never dearer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations, product

import numpy as np

from ..cluster import Cluster, Collective, Span, collective_time
from ..conversion import reordered
from ..layout import WHOLE, Layout, Mesh, Partial
from .resources import COUNT

Place = tuple[str, int, object]
"""A placement on one axis: S with its dim and cut, W, F or P."""

# (from, to): collective forward, collective backward
STEPS: dict[tuple[str, str], tuple[Collective | None, Collective | None]] = {
    ("P", "W"): ("all_reduce", None), ("W", "F"): (None, "all_reduce"), ("P", "F"): ("all_reduce", "all_reduce"),
    ("S", "W"): ("all_gather", None), ("S", "F"): ("all_gather", "reduce_scatter"), ("W", "S"): (None, "all_gather"),
    ("F", "S"): (None, None), ("P", "S"): ("reduce_scatter", "all_gather"), ("S", "P"): (None, None),
    ("W", "P"): (None, None), ("F", "W"): (None, None), ("F", "P"): (None, None),
}  # fmt: skip


def place_on(layout: Layout, axis: str) -> Place:
    """How a layout lies on one axis."""
    found = layout.cut_of(axis)
    if found is not None:
        return "S", found[0], found[1]
    placement = layout.placement(axis)
    if isinstance(placement, Partial):
        return "P", -1, placement.op
    return ("W" if placement == WHOLE else "F"), -1, None


class Moves:
    """Prices on one mesh of one cluster. Answers are kept."""

    def __init__(self, mesh: Mesh, cluster: Cluster) -> None:
        self.mesh, self.cluster = mesh, cluster
        self.device = cluster.device(0)
        self._times: dict[tuple[Collective, float, tuple[str, ...]], float] = {}
        self._spans: dict[tuple[str, ...], tuple[Span, ...]] = {
            (axis,): cluster.spans(mesh, (axis,)) for axis in mesh.names
        }

    def collective(self, kind: Collective, bytes: float, axes: Sequence[str]) -> float:
        """Seconds of a collective over axes, with `bytes` as in `cluster.collective`."""
        key = (kind, bytes, tuple(axes))
        if key not in self._times:
            if key[2] not in self._spans:
                self._spans[key[2]] = self.cluster.spans(self.mesh, key[2])
            spans = self._spans[key[2]]
            self._times[key] = max(collective_time(kind, bytes, span, self.cluster.measured) for span in spans)
        return self._times[key]

    def copy(self, bytes: float) -> float:
        return self.device.op_time(0.0, bytes, "copy", "")

    def prices(self, starts: Sequence[Layout], goals: Sequence[Layout], bytes: float, gradient: bool) -> np.ndarray:
        """[start, goal, resource]: what each conversion of a value of so many bytes (whole) uses."""
        axes = self.mesh.names
        found = np.zeros((len(starts), len(goals), COUNT))
        places: list[list[Place]] = [[] for _ in axes]
        at_start = np.zeros((len(axes), len(starts)), dtype=np.intp)
        at_goal = np.zeros((len(axes), len(goals)), dtype=np.intp)
        for number, axis in enumerate(axes):
            known: dict[Place, int] = {}
            for target, layouts in ((at_start, starts), (at_goal, goals)):
                for index, layout in enumerate(layouts):
                    target[number, index] = known.setdefault(_forget(place_on(layout, axis), gradient), len(known))
            places[number] = list(known)
        tables = [self._steps(number, places, bytes, gradient) for number in range(len(axes))]
        cut = [np.array([place[0] == "S" for place in held], dtype=np.intp) for held in places]
        best = np.full((len(starts), len(goals)), np.inf)
        for order in permutations(range(len(axes))):
            total = np.zeros((len(starts), len(goals), 4))
            for place, number in enumerate(order):
                mask = np.zeros((len(starts), len(goals)), dtype=np.intp)
                others = [other for other in range(len(axes)) if other != number]
                for bit, other in enumerate(others):
                    done = other in order[:place]
                    split = cut[other][at_goal[other]][None, :] if done else cut[other][at_start[other]][:, None]
                    mask = mask + (split << bit)
                total += tables[number][at_start[number][:, None], at_goal[number][None, :], mask]
            sums = total.sum(-1)
            better = sums < best
            best = np.where(better, sums, best)
            found[..., 0:4] = np.where(better[..., None], total, found[..., 0:4])
        self._lift(found, starts, goals, at_start, at_goal, tables, places)
        return found

    def _steps(self, number: int, places: list[list[Place]], bytes: float, gradient: bool) -> np.ndarray:
        """[from, to, which of the other axes cut the value, (compute, compute back, send, send back)]."""
        axis = self.mesh.axes[number]
        others = [other for at, other in enumerate(self.mesh.axes) if at != number]
        held = places[number]
        found = np.zeros((len(held), len(held), 2 ** len(others), 4))
        for mask in range(2 ** len(others)):
            base = bytes
            for bit, other in enumerate(others):
                base /= other.size if mask >> bit & 1 else 1
            for (i, a), (j, b) in product(enumerate(held), repeat=2):
                if a != b:
                    found[i, j, mask] = self._step(a, b, base, axis.name, axis.size, gradient)
        return found

    def _step(self, a: Place, b: Place, base: float, axis: str, parts: int, gradient: bool) -> tuple[float, ...]:
        """One step on one axis; `base` is what the value has without a cut on this axis."""
        if a[0] == b[0] == "S":
            if a[1] != b[1]:
                time = self.collective("all_to_all", base / parts, (axis,))
                copy = self.copy(2 * base / parts)
                return copy, copy * gradient, time, time * gradient
            time = self.collective("all_gather", base, (axis,))  # another factor of the same dim: gather, take
            copy = self.copy(base)
            return copy, copy * gradient, time, time * gradient
        if (b[0] == "P" and b[2] != "sum") or a[0] == b[0]:
            return np.inf, 0.0, 0.0, 0.0
        forward, backward = STEPS[a[0], b[0]]
        ahead = self.collective(forward, base, (axis,)) if forward else 0.0
        back = self.collective(backward, base, (axis,)) if backward and gradient else 0.0
        moved = 0.0 if {a[0], b[0]} == {"W", "F"} else base if "P" in (a[0], b[0]) else base / parts
        copied = self.copy(moved)
        return copied, copied * gradient, ahead, back

    def _lift(
        self,
        found: np.ndarray,
        starts: Sequence[Layout],
        goals: Sequence[Layout],
        at_start: np.ndarray,
        at_goal: np.ndarray,
        tables: list[np.ndarray],
        places: list[list[Place]],
    ) -> None:
        """Add what it takes to lift a minor cut while the major one under it changes."""
        names = self.mesh.names
        for major, minor in ((x, y) for x in range(len(names)) for y in range(x + 1, len(names))):
            stuck = [self._stuck(layouts, names[major], names[minor]) for layouts in (starts, goals)]
            moved = at_start[major][:, None] != at_goal[major][None, :]
            stays = at_start[minor][:, None] == at_goal[minor][None, :]
            whole = [index for index, place in enumerate(places[minor]) if place[0] in "WF"]
            for i, j in np.argwhere(moved & stays & (stuck[0][:, None] | stuck[1][None, :])):
                state = at_start[minor][i]
                if whole:
                    found[i, j, 0:4] += tables[minor][state, whole[0], 0] + tables[minor][whole[0], state, 0]
                else:
                    found[i, j, 0:4] *= 3  # no such value is ever whole, so nobody has asked what that costs

    def _stuck(self, layouts: Sequence[Layout], major: str, minor: str) -> np.ndarray:
        """Which layouts have two cuts of one dim that can't change places."""

        def is_stuck(layout: Layout) -> bool:
            one, other = layout.cut_of(major), layout.cut_of(minor)
            together = one is not None and other is not None and one[0] == other[0]
            return together and reordered(layout, major, self.mesh.sizes) is None

        return np.array([is_stuck(layout) for layout in layouts], dtype=bool)


def _forget(place: Place, gradient: bool) -> Place:
    return ("W", -1, None) if place[0] == "F" and not gradient else place

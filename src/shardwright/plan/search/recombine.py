"""Two points mixed into a better one.

Where two points differ, the variables fall apart into components that no factor joins. Each component is a switch of
its own: taking it from the second point changes the resources by a vector that does not depend on the others
(`Switches`). Layers of one kind thus mix two ways to run them, which is what a single minimiser of weights can't do.

Choosing switches (`choose`) is a knapsack: memory for time. Greedily by gain per byte, the best number of them, then
one switch or a pair exchanged as long as the true time (with its max) gets better.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .problem import FactorGroup, Floats, Ints, Point, Problem

MOST_KINDS = 256  # of switches, up to which all pairs are tried
MOST_EXCHANGES = 200
GAIN = 1e-12  # relative: what an exchange must gain, so that rounding does not go round in circles


@dataclass(frozen=True, eq=False)
class Switches:
    """The components in which `other` differs from `base`."""

    base: Point
    other: Point
    component: Ints  # of each variable, -1 where both points agree
    changes: Floats  # what each adds to the base's resources: [component, K]

    def flip(self, on: NDArray[np.bool_]) -> Ints:
        """The states with these components taken from the other point."""
        switched = np.append(on, False)[self.component]
        return np.where(switched, self.other.states, self.base.states)


def recombine(problem: Problem, base: Point, other: Point, weights: Floats) -> Point | None:
    """The best mix found of two points within the limit, or None. Weights tell what time is worth at the start."""
    switches = compare(problem, base, other)
    if not len(switches.changes):
        return None
    on = choose(problem, base.resources, switches.changes, weights)
    return None if on is None else problem.point(switches.flip(on))


def blend(problem: Problem, base: Point, other: Point, share: float) -> Point:
    """A mix with this share of the switches on, whether or not it fits: something to mix a third point with."""
    switches = compare(problem, base, other)
    count = len(switches.changes)
    return problem.point(switches.flip(np.arange(count) < share * count))


def compare(problem: Problem, base: Point, other: Point) -> Switches:
    differs = base.states != other.states
    touched = [group.rows[differs[group.rows].any(axis=1)] for group in problem.groups]
    component = _components(differs, touched)
    changes = np.zeros((int(component.max(initial=-1)) + 1, len(problem.memory)))
    for group, rows in zip(problem.groups, touched, strict=True):
        if len(rows):
            some = FactorGroup(group.table, rows)
            at = component[rows].max(axis=1)
            np.add.at(changes, at, some.look_up(other.states) - some.look_up(base.states))
    return Switches(base, other, component, changes)


def _components(differs: NDArray[np.bool_], touched: list[Ints]) -> Ints:
    """Number the parts into which the differing variables fall, by handing the lowest number around."""
    label = np.where(differs, np.arange(len(differs)), -1)
    edges = [np.zeros((0, 2), dtype=np.intp)]
    for rows in touched:
        highest = np.where(differs[rows], rows, -1).max(axis=1)
        for column in rows.T:
            real = differs[column] & (column != highest)
            edges.append(np.stack([column[real], highest[real]], axis=1))
    first, second = np.concatenate(edges).T
    while (label[first] != label[second]).any():
        low = np.minimum(label[first], label[second])
        high = np.maximum(label[first], label[second])
        np.minimum.at(label, high, low)
        label = np.where(differs, label[label], -1)
    component = np.full(len(differs), -1, dtype=np.intp)
    component[differs] = np.unique(label[differs], return_inverse=True)[1]
    return component


def choose(problem: Problem, start: Floats, changes: Floats, weights: Floats) -> NDArray[np.bool_] | None:
    """Which changes to add to the start, so that time is small within the limit. None if nothing found fits."""
    tries = [_by_rate(problem, changes, weights), (np.zeros(len(changes), dtype=bool), np.arange(len(changes)))]
    candidates = [_best_prefix(problem, start, changes, on, order) for on, order in tries]
    time, on = min(candidates, key=lambda each: each[0])
    return None if np.isinf(time) else _exchange(problem, start, changes, on)


def _by_rate(problem: Problem, changes: Floats, weights: Floats) -> tuple[NDArray[np.bool_], Ints]:
    """The leanest way to set the switches, and then an order in which to flip those that pay memory for time."""
    gain, price = -(changes @ weights), changes @ problem.memory
    on = (price < 0) | ((price == 0) & (gain > 0))
    pays = np.flatnonzero(gain * price > 0)
    rate = np.abs(gain[pays]) / np.abs(price[pays])
    return on, pays[np.argsort(-rate, kind="stable")]


def _best_prefix(
    problem: Problem, start: Floats, changes: Floats, on: NDArray[np.bool_], order: Ints
) -> tuple[float, NDArray[np.bool_]]:
    """Flip the switches one by one in this order, and keep the best of all that fit on the way."""
    flips = np.where(on[order], -1.0, 1.0)[:, None] * changes[order]
    sums = start + changes[on].sum(axis=0) + np.concatenate([np.zeros((1, len(start))), np.cumsum(flips, axis=0)])
    times = np.where(problem.fits(sums @ problem.memory), problem.times(sums), np.inf)
    best = int(times.argmin())
    flipped = on.copy()
    flipped[order[:best]] ^= True
    return float(times[best]), flipped


def _exchange(problem: Problem, start: Floats, changes: Floats, on: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Flip one or two switches at a time while time gets better. Equal switches are tried once."""
    scale = np.maximum(np.abs(changes).max(axis=0), 1e-300)
    kind = np.unique(np.round(changes / scale, 9), axis=0, return_inverse=True)[1].reshape(-1)
    for _ in range(MOST_EXCHANGES):
        now = start + changes[on].sum(axis=0)
        firsts = np.unique(kind * 2 + on, return_index=True)[1]  # one switch for each kind and position
        flips = np.where(on[firsts], -1.0, 1.0)[:, None] * changes[firsts]
        count = len(firsts)
        first, second = np.triu_indices(count) if count <= MOST_KINDS else (np.arange(count), np.arange(count))
        moved = now + flips[first] + np.where((first != second)[:, None], flips[second], 0.0)
        times = np.where(problem.fits(moved @ problem.memory), problem.times(moved), np.inf)
        best = int(times.argmin())
        if not times[best] < problem.time(now) - GAIN * abs(problem.time(now)):
            break
        on[list({int(firsts[first[best]]), int(firsts[second[best]])})] ^= True
    return on

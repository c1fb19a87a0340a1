"""The search: a bound from weights, points met on the way, mixes of them, and the exact front where it stays small.

relax    a quick bound on time, whatever the memory
solve    1. weights and prices that give the best bound (dual.py), each solve exact (elimination.py)
         2. mixes of the points that were met (recombine.py)
         3. if there still is a gap: all that could close it (pareto.py), given up when it is too much
         Graphs too wide for elimination go to an integer programme instead (ilp.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations, islice

import numpy as np

from .dual import Dual
from .elimination import TooWide, eliminate
from .ilp import least_of_each, solve_ilp
from .narrow import narrow
from .pareto import ParetoSearch, Stopped, TooMany
from .problem import ROUNDING, Floats, Point, Problem, Solution
from .recombine import blend, recombine

QUICK = 6  # solves of `relax`
WIDER = 6  # how often the gap of the exact search doubles, at most
SHARES = (0.25, 0.5, 0.75)  # of blends
THIN = (64, 16)  # vectors of a cell in a mix of points
POOL = 6  # points of which all pairs are mixed
SMALL = 0.01  # a gap that is worth little effort
LITTLE = 1 / 8  # of the exact search's effort

Stop = Callable[[], bool]
Progress = Callable[[float, float], None]  # the best time so far (maybe inf) and the bound


def relax(problem: Problem) -> float:
    """A quick lower bound on the time of anything, without the memory limit."""
    try:
        dual = Dual(problem, eliminate(problem), limited=False)
    except TooWide:
        return least_of_each(problem, np.sum([np.mean(forms, axis=0) for forms in problem.phases], axis=0))
    for _ in islice(dual.steps(), QUICK):
        pass
    return dual.bound


def least_memory(problem: Problem) -> float:
    """What anything takes at least; infinity if everything is forbidden. Too low where the graph is too wide."""
    try:
        elimination = eliminate(problem)
    except TooWide:
        return least_of_each(problem, problem.memory)
    return elimination.least(problem.memory)[0]


def solve(
    problem: Problem,
    *,
    upper: float = math.inf,
    stop: Stop | None = None,
    progress: Progress | None = None,
    aim: float = 0.001,
    hint: Floats | None = None,
    exact: bool = True,
) -> Solution:
    """The fastest states within the limit, and how near to the best they are known to be.

    Ends early when the bound exceeds `upper`, when `stop()` says so, or when the gap is at most `aim`. `hint` are the
    multipliers of a solution of a problem like this one: with them the bound is good from the start. Without `exact`
    it is content with mixes of the points that were met.
    """
    search = _Solver(problem, upper, stop or (lambda: False), progress or (lambda time, bound: None), aim, hint, exact)
    try:
        eliminate(problem)
    except TooWide as reason:
        return solve_ilp(problem, stop=search.stop, aim=aim, because=str(reason))
    return search.run()


@dataclass(eq=False)
class _Solver:
    problem: Problem
    upper: float
    stop: Stop
    progress: Progress
    aim: float
    hint: Floats | None
    exact: bool = True
    best: Point | None = None
    bound: float = -math.inf
    stopped: bool = False

    def run(self) -> Solution:
        limited = math.isfinite(self.problem.limit)
        dual = Dual(self.problem, eliminate(self.problem), limited=limited, hint=self.hint)
        if limited and math.isinf(self.upper) and not dual.fits():  # with nothing to beat it is asked in any case
            self.bound = math.inf
            return self.solution(dual)
        for point in dual.steps():
            self.offer(point)
            self.mix(dual, self.best, point)
            if self.done(dual.bound):
                break
        self.bound = max(self.bound, dual.bound)
        if self.best is not None and not self.done(dual.bound):
            for improve in (self.mix_pool, self.splice, self.search_front) if self.exact else (self.mix_pool,):
                improve(dual)
                if self.done(dual.bound):
                    break
        return self.solution(dual)

    def done(self, bound: float) -> bool:
        """Whether to stop here. Something that fits is found first: at most one more solve."""
        self.bound = max(self.bound, bound)
        self.progress(math.inf if self.best is None else self.best.time, self.bound)
        if self.bound > self.upper:
            return True
        if self.best is None:
            return False
        self.stopped = self.stopped or self.stop()
        return self.stopped or self.near

    @property
    def near(self) -> bool:
        """Whether the gap is within the aim."""
        return self.within(max(self.aim, ROUNDING))

    def within(self, gap: float) -> bool:
        return self.best is not None and self.best.time <= self.bound + gap * abs(self.bound)

    def offer(self, point: Point | None) -> None:
        if point is not None and self.problem.fits(point.memory) and (self.best is None or point.time < self.best.time):
            self.best = point

    def mix(self, dual: Dual, first: Point | None, second: Point) -> None:
        if first is not None and first is not second and not self.near:
            self.offer(recombine(self.problem, first, second, dual.space.of_time(dual.best)))

    def pool(self, dual: Dual) -> list[Point]:
        """The points that are least at the best weights, each once."""
        y = np.concatenate([[1.0], dual.best])
        near = sorted(range(len(dual.points)), key=lambda i: float(dual.cuts[i] @ y))
        distinct = {dual.points[i].states.tobytes(): dual.points[i] for i in near}
        return list(distinct.values())[:POOL]

    def mix_pool(self, dual: Dual) -> None:
        """Mix all pairs of the pool; while the gap is large also blends of its first, and the best point with each."""
        pool = self.pool(dual)
        for first, second in combinations(pool, 2):
            self.mix(dual, first, second)
        for first, second in combinations(pool[: len(dual.best) + 1], 2):
            if self.within(SMALL) or self.aim > SMALL:  # a rough answer is all that is wanted
                return
            for share in SHARES if len(dual.best) > 1 else ():  # with one multiplier two points are enough
                blended = blend(self.problem, first, second, share)
                for third in pool:
                    self.mix(dual, blended, third)
        before = math.inf
        while self.best is not None and self.best.time < before:
            before = self.best.time
            for second in pool:
                self.mix(dual, self.best, second)

    def splice(self, dual: Dual) -> None:
        """Mix the pool and the best point in every way, as far as fronts of some length show it."""
        assert self.best is not None
        if self.within(SMALL):
            return
        small = narrow(self.problem, self.pool(dual)[: len(dual.best) + 1])
        inside = Dual(small.problem, eliminate(small.problem), dual.limited)
        inside.solve(dual.best)
        gap = max(self.best.time - inside.bound, 0.0)
        for thin in THIN:
            try:
                front = ParetoSearch(inside).search(gap / 4, self.stop, thin)
            except TooMany:
                continue
            except Stopped:
                self.stopped = True
                return
            if front is not None:
                self.offer(self.problem.point(small.widen(front.states)))
            return

    def search_front(self, dual: Dual) -> None:
        """All that is within a gap of the bound: a small gap first, then wider ones, until the best is among it."""
        assert self.best is not None
        gap = (self.best.time - dual.bound) / 2**WIDER
        effort = LITTLE if self.within(SMALL) else 1.0
        try:
            fronts = ParetoSearch(dual)
            while not self.done(self.bound):
                self.offer(fronts.search(gap, self.stop, effort=effort))
                self.bound = min(self.best.time, dual.bound + gap)  # all that is faster would have been found
                gap *= 2
        except TooMany:
            return
        except Stopped:
            self.stopped = True

    def solution(self, dual: Dual) -> Solution:
        best = self.best
        if best is None:
            none = (None, None, math.inf, math.inf)
            proved = math.isinf(self.bound)
            return Solution(*none, self.bound, proved, dual.least_memory, self.stopped, dual.best)
        known = dual.least_memory > -math.inf
        least = dual.least_memory if known else dual.elimination.least(self.problem.memory)[0]
        exact = best.time <= self.bound + ROUNDING * abs(self.bound)
        states = tuple(best.states.tolist())
        bound = min(self.bound, best.time)
        return Solution(states, best.resources, best.time, best.memory, bound, exact, least, self.stopped, dual.best)

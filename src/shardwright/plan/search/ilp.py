"""The same problem as an integer programme, solved by HiGHS: for graphs too wide to eliminate, and as a second opinion.

    x[v, s] in {0, 1}        variable v has state s;  sum over s = 1
    y[f, cell] >= 0          factor f is in this cell;  sum over the cells with state s of v = x[v, s]
    t[p]                     phase p takes this long;  t[p] >= form . r for each of its forms
    minimise sum of t, where memory . r <= limit and r = sum of y times the tables

y is whole where x is, so x alone is asked to be. Forbidden cells have no y. Factors of one variable need none: their
cells are the x themselves. HiGHS comes with the package `highspy`, which is optional.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ...errors import PlanError
from .problem import ROUNDING, Floats, Ints, Problem, Solution


def least_of_each(problem: Problem, weights: Floats) -> float:
    """A bound on any weighted sum of resources: every factor at its least. Crude, but it needs no tables."""
    total = 0.0
    for group in problem.groups:
        allowed = np.isfinite(group.table[..., 0])
        total += len(group.rows) * float((group.table[allowed] @ weights).min(initial=math.inf))
    return total


def solve_ilp(
    problem: Problem, *, stop: Callable[[], bool] | None = None, aim: float = 0.0, because: str = ""
) -> Solution:
    """What `solve` gives, by branch and bound. Stopped before anything was found it has no states."""
    programme = _Programme(problem)
    highs = _load(because)
    solver = highs.Highs()
    for option, value in {
        "output_flag": False,
        "mip_rel_gap": aim,
        "mip_abs_gap": ROUNDING,
        "mip_feasibility_tolerance": ROUNDING,
        "primal_feasibility_tolerance": ROUNDING,
    }.items():
        solver.setOptionValue(option, value)
    solver.passModel(programme.model(highs))
    stopped = []
    if stop is not None:

        def ask(event: Any) -> None:
            if stop():
                stopped.append(True)
                event.interrupt()

        solver.cbMipInterrupt += ask
        solver.cbSimplexInterrupt += ask
    solver.run()
    least = least_of_each(problem, problem.memory)
    status, info = solver.getModelStatus(), solver.getInfo()
    if status in (highs.HighsModelStatus.kInfeasible, highs.HighsModelStatus.kUnboundedOrInfeasible):
        return Solution(None, None, math.inf, math.inf, math.inf, True, least, False)
    bound = float(info.mip_dual_bound) * programme.unit
    if info.primal_solution_status != highs.SolutionStatus.kSolutionStatusFeasible:
        if not stopped:
            raise PlanError(f"HiGHS gave up on a plan: {solver.modelStatusToString(status)}")
        return Solution(None, None, math.inf, math.inf, bound, False, least, True)
    point = problem.point(programme.states(np.array(solver.getSolution().col_value)))
    exact = point.time <= bound + 1e-6 * abs(bound)
    states = tuple(point.states.tolist())
    bound = min(bound, point.time)
    return Solution(states, point.resources, point.time, point.memory, bound, exact, least, bool(stopped))


def _load(because: str) -> Any:
    try:
        return importlib.import_module("highspy")
    except ImportError:
        raise PlanError(
            f"the plan's graph is too wide for exact elimination{f' ({because})' if because else ''}, and the integer "
            'programme that would do instead needs highspy: pip install "shardwright[ilp]", or constrain the plan'
        ) from None


class _Programme:
    """The columns and rows of the integer programme. Time is counted in `unit`, memory in limits."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        weights = np.sum([np.mean(forms, axis=0) for forms in problem.phases], axis=0)
        crude = least_of_each(problem, weights)
        self.unit = crude if 0 < crude < math.inf else 1.0
        self.first = np.concatenate([[0], np.cumsum(problem.sizes)]).astype(np.intp)  # column of each variable
        self.columns = int(self.first[-1])
        self.resources = [np.zeros((self.columns, len(problem.memory)))]  # of each column
        self.rows: list[tuple[float, float, Ints, Floats]] = []  # lower, upper, columns, coefficients
        self.upper = np.ones(self.columns)
        for v, size in enumerate(problem.sizes):
            self.rows.append((1.0, 1.0, self.first[v] + np.arange(size), np.ones(size)))
        for group in problem.groups:
            for row in group.rows.tolist():
                self._add_factor(group.table, row)

    def _add_factor(self, table: Floats, variables: list[int]) -> None:
        allowed = np.isfinite(table[..., 0])
        if len(variables) == 1:
            own = self.first[variables[0]] + np.flatnonzero(allowed)
            self.resources[0][own] += table[allowed]
            self.upper[self.first[variables[0]] + np.flatnonzero(~allowed)] = 0.0
            return
        cells = np.nonzero(allowed)
        columns = self.columns + np.arange(len(cells[0]))
        self.columns += len(columns)
        self.resources.append(table[allowed])
        for axis, v in enumerate(variables):
            for state in range(self.problem.sizes[v]):
                inside = columns[cells[axis] == state]
                coefficients = np.append(np.ones(len(inside)), -1.0)
                self.rows.append((0.0, 0.0, np.append(inside, self.first[v] + state), coefficients))

    def model(self, highs: Any) -> Any:
        """As HiGHS takes it, with a column for the time of each phase at the end."""
        problem, phases = self.problem, len(self.problem.phases)
        resources = np.concatenate(self.resources)
        times = self.columns + np.arange(phases)
        rows = list(self.rows)
        everything = np.arange(self.columns)
        for time, forms in zip(times, problem.phases, strict=True):
            for form in forms:
                costs = np.append(resources @ form / self.unit, -1.0)
                rows.append((-math.inf, 0.0, np.append(everything, time), costs))
        if math.isfinite(problem.limit):
            scale = abs(problem.limit) or 1.0
            rows.append((-math.inf, problem.limit / scale, everything, resources @ problem.memory / scale))
        lp = highs.HighsLp()
        lp.num_col_, lp.num_row_ = self.columns + phases, len(rows)
        lp.col_cost_ = np.append(np.zeros(self.columns), np.ones(phases))
        lp.col_lower_ = np.append(np.zeros(self.columns), np.full(phases, -math.inf))
        upper = np.append(self.upper, np.ones(self.columns - len(self.upper)))
        lp.col_upper_ = np.append(upper, np.full(phases, math.inf))
        lp.row_lower_ = np.array([row[0] for row in rows])
        lp.row_upper_ = np.array([row[1] for row in rows])
        lp.a_matrix_.format_ = highs.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.concatenate([[0], np.cumsum([len(row[2]) for row in rows])])
        lp.a_matrix_.index_ = np.concatenate([row[2] for row in rows])
        lp.a_matrix_.value_ = np.concatenate([row[3] for row in rows])
        integer, real = highs.HighsVarType.kInteger, highs.HighsVarType.kContinuous
        choices = int(self.first[-1])
        lp.integrality_ = [integer] * choices + [real] * (self.columns + phases - choices)
        return lp

    def states(self, columns: Floats) -> Ints:
        """The state of each variable: its largest x."""
        sizes = self.problem.sizes
        return np.array([columns[self.first[v] :][:size].argmax() for v, size in enumerate(sizes)], dtype=np.intp)

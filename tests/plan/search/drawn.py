"""Random problems, small enough to try everything, and problems of many equal layers."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import strategies as st

from shardwright.plan.search import CostFactor, Problem

KINDS = 3  # resources: two that take time, and memory
MEMORY = np.array([0.0, 0.0, 1.0])
ONE_FORM = ((np.array([1.0, 0.5, 0.0]),),)
PHASES = [
    ONE_FORM,
    ((np.array([1.0, 0.0, 0.0]), np.array([0.0, 1.0, 0.0])),),
    (
        (np.array([1.0, 0.0, 0.0]), np.array([0.0, 1.0, 0.0])),
        (np.array([0.5, 0.0, 0.1]), np.array([0.0, 2.0, 0.0]), np.array([0.3, 0.3, 0.3])),
        (np.array([0.0, 0.0, 0.2]),),
    ),
]


def table(random: np.random.Generator, *sizes: int, forbid: float = 0.0) -> np.ndarray:
    costs = random.integers(0, 20, (*sizes, KINDS)) + np.where(random.random() < 0.5, random.random((*sizes, KINDS)), 0)
    costs[random.random(sizes) < forbid, 0] = np.inf
    return costs


@st.composite
def problems(draw, most=6, forbid=0.1, phases=None, limited=None) -> Problem:
    """Any graph of up to `most` variables of up to 4 states, with factors of 1 to 4 variables."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count = int(random.integers(1, most + 1))
    sizes = tuple(int(size) for size in random.integers(1, 5, count))
    factors = []
    for _ in range(int(random.integers(1, 2 * count + 1))):
        arity = min(count, int(random.choice([1, 2, 2, 2, 3, 4])))
        variables = tuple(int(v) for v in random.choice(count, arity, replace=False))
        costs = table(random, *(sizes[v] for v in variables), forbid=forbid * draw(st.booleans()))
        factors.append(CostFactor(variables, costs))
    blocks = tuple(sorted(int(b) for b in random.integers(0, 3, count)))
    chosen = PHASES[draw(st.integers(0, len(PHASES) - 1))] if phases is None else phases
    problem = Problem(sizes, tuple(factors), blocks, chosen, MEMORY)
    limited = draw(st.booleans()) if limited is None else limited
    return with_limit(problem, draw(st.floats(-0.1, 0.9))) if limited else problem


@st.composite
def layered(draw, width=3, phases=None, limited=None, hub=None, forbid=0.1) -> Problem:
    """Equal layers in a row, their tables shared, each joined to the next; maybe with one variable that all share."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    hub = draw(st.booleans()) if hub is None else hub
    chosen = PHASES[draw(st.integers(0, len(PHASES) - 1))] if phases is None else phases
    limited = draw(st.booleans()) if limited is None else limited
    layers, states = draw(st.sampled_from([(4, 2), (3, 3), (5, 2)]))
    problem = repeat(random, layers, width, states, chosen, hub=hub, forbid=forbid)
    return with_limit(problem, draw(st.floats(-0.1, 0.9))) if limited else problem


def repeat(random, layers, width, states, phases=ONE_FORM, *, hub=False, forbid=0.0) -> Problem:
    inside = [((v - 1, v), table(random, states, states, forbid=forbid)) for v in range(1, width)]
    inside += [((v,), table(random, states)) for v in range(width)]
    if width > 2:
        inside.append(((2, 0, 1), table(random, states, states, states)))
    joined = [((-1, 0), table(random, states, states)), ((-1, width - 1), table(random, states, states))]
    shared = table(random, states, 2)
    first = 1 if hub else 0
    factors = []
    for layer in range(layers):
        start = first + layer * width
        for places, costs in [*inside, *(joined if layer else [])]:
            factors.append(CostFactor(tuple(start + place for place in places), costs))
        if hub:
            factors.append(CostFactor((start, 0), shared))
    sizes = (2,) * first + (states,) * (layers * width)
    blocks = (0,) * first + tuple(layer for layer in range(layers) for _ in range(width))
    return Problem(sizes, tuple(factors), blocks, phases, MEMORY)


def wide_problem(count: int, states: int) -> Problem:
    """A clique: every variable touches every other."""
    random = np.random.default_rng(0)
    factors = tuple(CostFactor((i, j), table(random, states, states)) for i in range(count) for j in range(i))
    return Problem((states,) * count, factors, (0,) * count, ONE_FORM, MEMORY)


def with_limit(problem: Problem, part: float) -> Problem:
    """With a memory limit between the least (0) and the most (1) that a factor can take, all summed."""
    least = sum(factor.table[..., 2].min() for factor in problem.factors)
    most = sum(factor.table[..., 2].max() for factor in problem.factors)
    return at_most(problem, round(float(least + part * (most - least)), 6))  # no limits that are rounding errors


def at_most(problem: Problem, limit: float) -> Problem:
    return Problem(problem.sizes, problem.factors, problem.blocks, problem.phases, problem.memory, limit)


def everything(problem: Problem) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All states that are not forbidden, with their times and memories, by plain addition."""
    states = np.indices(problem.sizes, dtype=np.intp).reshape(len(problem.sizes), -1).T
    resources = sum(factor.table[tuple(states[:, list(factor.variables)].T)] for factor in problem.factors)
    allowed = np.isfinite(resources[:, 0])
    states, resources = states[allowed], resources[allowed]
    return states, problem.times(resources), resources @ problem.memory


def best_time(problem: Problem) -> float:
    """The time of the best states within the limit, infinite if there are none."""
    _, times, memories = everything(problem)
    return float(times[problem.fits(memories)].min(initial=math.inf))

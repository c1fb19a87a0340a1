"""Min-sum by eliminating variables, exact for one linear objective w . r, with equal steps done once.

    leaf       T_f[x] = table_f[x] . w                                                        Elimination.run
    step       T_new[x on the rest] = min over x_v of the sum of all tables that contain v     Step.lowest
    value      min over x of w . r(x) = the sum of the tables that have no variables left      Run.value
    states     backwards: x_v = the argmin of its step at the states of the rest               EliminationRun.walk

A step is known by its input tables and by how their variables coincide, so the steps of equal layers are one step
(hash-consing). `eliminate` finds the steps once for a problem, whatever the weights: a layer's inside is ordered once
for each distinct layer, its borders follow in rounds (see order.py). 1000 equal layers then cost one layer and about
log2(1000) products of borders. The walk back goes through the distinct steps too, all its places at once: a step's
inputs are older than it, so when steps are walked from the youngest, the states that a step asks for are there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from ...errors import PlanError
from .order import Borders, Scope, split_variables
from .problem import MOST_VARIABLES, FactorGroup, Floats, Ints, Problem

CHUNK = 2**16  # cells of a temporary array: half a MB, which stays in the cache
FEW_CELLS = 2**12  # of a step that needs no such care
MOST_CELLS = 2**24  # of a table that is kept: 128 MB
MOST_DIMS = 60  # of a table: numpy has no more than 64
LITTLE_WORK = 2**20  # cells that any order may look at
MUCH_MORE = 4  # times the work of a problem that is like another, so that an order of its own is worth its while
MOST_WORK = 2**31  # cells that all steps together look at for one solve: some seconds


class TooWide(PlanError):
    """The tables of an elimination would be too large."""


@dataclass(frozen=True)
class StepTable:
    """A table as a step reads it: its axes in the step's order, with 1 where it lacks a variable."""

    node: int
    places: tuple[int, ...]  # for each axis of the table the axis of the step
    axes: tuple[int, ...]
    shape: tuple[int, ...]

    def view(self, tables: Sequence[Floats]) -> Floats:
        return tables[self.node].transpose(self.axes).reshape(self.shape)


@dataclass(frozen=True)
class EliminationStep:
    """One elimination: the variable is the first axis of `shape`, the rest are the axes of the new table."""

    inputs: tuple[StepTable, ...]  # the smallest first, so that sums stay small as long as they can
    shape: tuple[int, ...]

    def lowest(self, tables: Sequence[Floats], space: Floats) -> Floats:
        """The new table: the sum of the inputs, and its least over the first axis. `space` is for sums."""
        views = [operand.view(tables) for operand in self.inputs]
        states, rest = self.shape[0], self.shape[1:]
        cells = math.prod(rest)
        if cells * states <= FEW_CELLS:
            return np.asarray(np.minimum.reduce(add(views), axis=0))
        width = min(states, max(1, CHUNK // cells))
        best: Floats | None = None
        for start in range(0, states, width):
            count = min(width, states - start)
            room = space if count * cells <= len(space) else np.empty(count * cells)
            into = room[: count * cells].reshape(count, *rest)
            total = add_into([view[start : start + width] for view in views], into)
            least = np.asarray(np.minimum.reduce(total, axis=0))
            best = least if best is None else np.minimum(best, least, out=best)
        assert best is not None
        return best

    def costs(self, tables: Sequence[Floats], rest: Ints) -> Floats:
        """For each row of states of the rest what each state of the variable costs: [state, row]."""
        columns = []
        for operand in self.inputs:
            places = [rest[:, i] if size > 1 else 0 for i, size in enumerate(operand.shape[1:])]
            costs: Floats = operand.view(tables)[(slice(None), *places)]
            columns.append(costs if costs.ndim == 2 else costs[:, None])
        return add(columns)


def add(arrays: Sequence[Floats]) -> Floats:
    total = arrays[0]
    for array in arrays[1:]:
        total = total + array
    return total


def add_into(arrays: Sequence[Floats], into: Floats) -> Floats:
    """The same in memory that is there: what is as large as the sum is written to it."""
    total = arrays[0]
    for array in arrays[1:]:
        full = total is into or np.broadcast_shapes(total.shape, array.shape) == into.shape
        total = np.add(total, array, out=into) if full else total + array
    return total


@dataclass(frozen=True, eq=False)
class Elimination:
    """All steps of a problem in order. Tables are numbered: first the leaves, one for each group, then the steps."""

    groups: tuple[FactorGroup, ...]
    steps: tuple[EliminationStep, ...]
    rows: tuple[Ints, ...]  # for each step the places where it is taken: [place, (variable, *the rest)]
    roots: tuple[tuple[int, int], ...]  # tables without variables, and how often each counts
    variables: int
    leaves: Floats  # all cells of all groups' tables, forbidden ones 0: [cell, K]
    forbidden: NDArray[np.bool_]
    known: dict[bytes, tuple[float, Ints]] = field(default_factory=dict, repr=False)  # what was least at some weights

    @property
    def work(self) -> int:
        """The cells that one solve looks at."""
        return sum(math.prod(step.shape) for step in self.steps)

    @property
    def possible(self) -> bool:
        """Whether any states are not forbidden."""
        return not self.forbidden.any() or math.isfinite(self.least(np.zeros(self.leaves.shape[1]))[0])

    def with_tables(self, tables: Sequence[Floats]) -> Elimination:
        """The same steps for a problem that differs in its tables only, one for each group; or TooWide.

        An order is right for any sizes, and may only be slower than one that was made for them.
        """
        groups = tuple(FactorGroup(table, group.rows) for table, group in zip(tables, self.groups, strict=True))
        steps = self.steps
        if any(new.shape != old.table.shape for new, old in zip(tables, self.groups, strict=True)):
            steps = _resized(self.steps, [table.shape[:-1] for table in tables])
        return replace(self, groups=groups, steps=steps, known={}, **_leaves(groups, self.leaves.shape[1]))

    def fitting(self, tables: Sequence[Floats]) -> Elimination | None:
        """`with_tables`, or None where an order of its own is worth its while."""
        try:
            elimination = self.with_tables(tables)
        except TooWide:
            return None
        return elimination if elimination.work <= max(LITTLE_WORK, MUCH_MORE * self.work) else None

    def least(self, weights: Floats) -> tuple[float, Ints]:
        """The least value at these weights, and the states that attain it."""
        key = weights.tobytes()
        if key not in self.known:
            run = self.run(weights)
            self.known[key] = run.value, run.walk()
        return self.known[key]

    def run(self, weights: Floats) -> EliminationRun:
        """All tables for these weights."""
        cells = np.einsum("ck,k->c", self.leaves, weights)  # by one thread: more are in each other's way here
        cells[self.forbidden] = np.inf
        tables, start = [], 0
        for group in self.groups:
            shape = group.table.shape[:-1]
            stop = start + math.prod(shape)
            tables.append(cells[start:stop].reshape(shape))
            start = stop
        space = np.empty(CHUNK)
        for step in self.steps:
            tables.append(step.lowest(tables, space))
        return EliminationRun(self, tables)


@dataclass(frozen=True, eq=False)
class EliminationRun:
    """The tables of an elimination for some weights."""

    elimination: Elimination
    tables: list[Floats]

    @property
    def value(self) -> float:
        return sum(count * float(self.tables[node]) for node, count in self.elimination.roots)

    def walk(self) -> Ints:
        """The states of all variables that attain the value."""
        states = np.zeros(self.elimination.variables, dtype=np.intp)
        for step, rows in zip(reversed(self.elimination.steps), reversed(self.elimination.rows), strict=True):
            states[rows[:, 0]] = step.costs(self.tables, states[rows[:, 1:]]).argmin(axis=0)
        return states


_KNOWN: WeakKeyDictionary[Problem, Elimination] = WeakKeyDictionary()  # an answer that a problem can't change


def eliminate(problem: Problem) -> Elimination:
    """The steps of this problem, or TooWide."""
    first = problem.first or problem
    if first not in _KNOWN:
        _KNOWN[first] = _like(first) or _build(first)
    return _KNOWN[first]


def _build(problem: Problem) -> Elimination:
    try:
        return _by_layers(problem)
    except TooWide:
        return _at_large(problem)


def _like(problem: Problem) -> Elimination | None:
    """The steps of a problem that is like this one but for its tables; None if they are not known, or not good."""
    known = _KNOWN.get(problem.like) if problem.like is not None else None
    return known.fitting([group.table for group in problem.groups]) if known is not None else None


class _Steps:
    """Steps while they are found, each once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.shapes: list[tuple[int, ...]] = [group.table.shape[:-1] for group in problem.groups]
        self.known: dict[tuple[tuple[int, Scope], ...], int] = {}
        self.steps: list[EliminationStep] = []
        self.rows: list[list[Ints]] = []
        self.work = 0

    def take(self, sizes: Sequence[int], variable: int, rest: Scope, operands: Sequence[tuple[int, Scope]]) -> int:
        """The table that is left when the variable is eliminated from the given tables."""
        place = {v: i for i, v in enumerate((variable, *rest))}
        key = tuple(sorted((node, tuple(place[v] for v in scope)) for node, scope in operands))
        if key not in self.known:
            shape = tuple(sizes[v] for v in (variable, *rest))
            self.work += math.prod(shape)
            _check_width(shape, self.work)
            self.steps.append(_step((_input(node, places, shape) for node, places in key), shape))
            self.rows.append([])
            self.known[key] = len(self.shapes)
            self.shapes.append(shape[1:])
        return self.known[key]

    def mark(self, node: int, rows: Ints) -> None:
        """The step of this table is taken at these places."""
        self.rows[node - len(self.problem.groups)].append(rows)

    def finish(self, left: Sequence[int]) -> Elimination:
        problem = self.problem
        rows = tuple(np.concatenate(each) for each in self.rows)
        roots = tuple(sorted((node, left.count(node)) for node in set(left)))
        leaves = _leaves(problem.groups, len(problem.memory))
        return Elimination(problem.groups, tuple(self.steps), rows, roots, len(problem.sizes), **leaves)


def _resized(steps: Sequence[EliminationStep], shapes: list[tuple[int, ...]]) -> tuple[EliminationStep, ...]:
    """Steps on leaves of other shapes, to which those of the steps' own tables are added."""
    resized, work = [], 0
    for step in steps:
        sizes = [1] * len(step.shape)
        for operand in step.inputs:
            for place, size in zip(operand.places, shapes[operand.node], strict=True):
                sizes[place] = size
        shape = tuple(sizes)
        work += math.prod(shape)
        _check_width(shape, work)
        inputs = [_input(operand.node, operand.places, shape) for operand in step.inputs] if shape != step.shape else ()
        resized.append(_step(inputs, shape) if inputs else step)
        shapes.append(shape[1:])
    return tuple(resized)


def _check_width(shape: tuple[int, ...], work: int) -> None:
    """Refuse a step that is too large, or steps that together are; a step has its variable first."""
    cells = math.prod(shape[1:])
    if cells > MOST_CELLS or work > MOST_WORK or len(shape) > MOST_DIMS:
        raise TooWide(f"a table over {len(shape) - 1} variables would have {cells:,} cells")


def _step(inputs: Iterable[StepTable], shape: tuple[int, ...]) -> EliminationStep:
    return EliminationStep(tuple(sorted(inputs, key=lambda each: math.prod(each.shape))), shape)


def _leaves(groups: Sequence[FactorGroup], kinds: int) -> dict[str, Any]:
    """All cells of all tables, and which of them are forbidden."""
    leaves = np.concatenate([np.zeros((0, kinds)), *(group.table.reshape(-1, kinds) for group in groups)])
    forbidden = np.isinf(leaves[:, 0])
    leaves[forbidden] = 0.0
    return {"leaves": leaves, "forbidden": forbidden}


def _input(node: int, places: Scope, shape: tuple[int, ...]) -> StepTable:
    axes = tuple(sorted(range(len(places)), key=lambda axis: places[axis]))
    return StepTable(node, places, axes, tuple(size if i in places else 1 for i, size in enumerate(shape)))


def _at_large(problem: Problem) -> Elimination:
    """The steps when layers are not looked at: for problems whose borders are too wide."""
    tables = [(number, tuple(row)) for number, group in enumerate(problem.groups) for row in group.rows.tolist()]
    return _borders(problem, _Steps(problem), tables, np.zeros(len(problem.sizes), dtype=bool))


def _by_layers(problem: Problem) -> Elimination:
    """First the inside of each layer, once for all that are equal, then the borders."""
    inner = split_variables(problem)
    steps = _Steps(problem)
    layers, tables = _layers(problem, inner)
    for layer in layers:
        names = np.array(layer.copies)
        sizes = [problem.sizes[v] for v in names[0]]
        borders = Borders([scope for _, scope in layer.factors], sizes, np.flatnonzero(layer.inner).tolist())
        left = _follow(steps, borders, borders.cheapest(), sizes, layer.factors, names)
        for node, scope in left:
            tables += [(node, tuple(row)) for row in names[:, list(scope)].tolist()]
    return _borders(problem, steps, tables, inner)


def _borders(problem: Problem, steps: _Steps, tables: list[tuple[int, Scope]], gone: NDArray[np.bool_]) -> Elimination:
    """Eliminate all variables that are not gone yet."""
    used = np.zeros(len(problem.sizes), dtype=bool)
    for group in problem.groups:
        used[group.rows] = True
    borders = Borders([scope for _, scope in tables], problem.sizes, np.flatnonzero(used & ~gone).tolist())
    names = np.arange(len(problem.sizes))[None]
    left = _follow(steps, borders, borders.in_rounds(), problem.sizes, tables, names)
    return steps.finish([node for node, _ in left])


def _follow(
    steps: _Steps,
    borders: Borders,
    order: Iterator[int],
    sizes: Sequence[int],
    operands: Sequence[tuple[int, Scope]],
    names: Ints,
) -> list[tuple[int, Scope]]:
    """Take the steps of an order, in all copies at once (a row of names each); the tables that are left."""
    tables = dict(enumerate(operands))
    for number, v in enumerate(order, start=len(operands)):
        gone, rest = borders.eliminate(v, number)
        node = steps.take(sizes, v, rest, [tables.pop(each) for each in gone])
        steps.mark(node, names[:, (v, *rest)])
        tables[number] = (node, rest)
    return list(tables.values())


@dataclass(frozen=True)
class _Layer:
    """The inside of a layer with its own numbers for variables, and what its copies call them."""

    factors: tuple[tuple[int, Scope], ...]
    inner: NDArray[np.bool_]
    copies: list[Ints]


def _layers(problem: Problem, inner: NDArray[np.bool_]) -> tuple[list[_Layer], list[tuple[int, Scope]]]:
    """The distinct layers, and the factors that lie in none."""
    factors, block = _factor_rows(problem, inner)
    lone = [(row[0], tuple(v for v in row[1:] if v >= 0)) for row in factors[block < 0].tolist()]
    factors, block = factors[block >= 0], block[block >= 0]
    layers: dict[tuple[bytes, bytes], _Layer] = {}
    for part in np.split(factors, np.flatnonzero(np.diff(block)) + 1) if len(factors) else []:
        names, places = np.unique(part[:, 1:], return_inverse=True)
        places = places.reshape(part[:, 1:].shape)
        if names[0] < 0:  # the padding of short rows is no variable
            names, places = names[1:], places - 1
        local = np.concatenate([part[:, :1], places], axis=1)
        key = (local.tobytes(), inner[names].tobytes())
        if key not in layers:
            scopes = tuple((row[0], tuple(v for v in row[1:] if v >= 0)) for row in local.tolist())
            layers[key] = _Layer(scopes, inner[names], [])
        layers[key].copies.append(names)
    return list(layers.values()), lone


def _factor_rows(problem: Problem, inner: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """All factors as rows (table, variables, -1 for none), with the layer that each lies in or -1, sorted by both."""
    blocks = np.unique(np.array(problem.blocks, dtype=np.intp), return_inverse=True)[1]
    rows = [np.zeros((0, 2 + MOST_VARIABLES), dtype=np.intp)]
    for number, group in enumerate(problem.groups):
        count, width = group.rows.shape
        some = np.full((count, 2 + MOST_VARIABLES), -1, dtype=np.intp)
        some[:, 0] = np.where(inner[group.rows], blocks[group.rows], -1).max(axis=1)
        some[:, 1] = number
        some[:, 2 : 2 + width] = group.rows
        rows.append(some)
    everything = np.concatenate(rows)
    everything = everything[np.lexsort(everything.T[::-1])]
    return everything[:, 1:], everything[:, 0]

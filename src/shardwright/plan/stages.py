"""Stages: a graph cut into parts that run one after the other, and the values sent between them.

Most ops lie on **the line**, in the order of the graph, and a stage is a contiguous part of it. Ops off the line are
run by every stage that reads them, since that is cheaper than sending their results:

    constants       what depends on nothing that changes (masks, positions, rotary tables)
    of inputs       cheap ops that depend on inputs alone; every rank has the inputs
    of parameters   what depends on parameters alone; each such stage then stores the parameter

A value on the line is sent to every later stage that reads it, from any stage to any later one, once for each.
A cheap op whose inputs are all available in the later stage is run again there instead.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..cost import is_matmul
from ..errors import PlanError
from ..ir import Graph, Input, Op, Output
from ..ops.random import DROPOUTS
from ..rules import Analysis, is_random


@dataclass(frozen=True, slots=True, kw_only=True)
class StageValue:
    """A value that one stage produces and a later one reads."""

    value: str
    sender: int
    receiver: int


class OpSequence:
    """The ops of a graph that are cut into stages, in order; the others run where they are read."""

    def __init__(self, analysis: Analysis) -> None:
        self.analysis, self.graph = analysis, analysis.graph
        self.floating = _floating(analysis)
        self.ops = tuple(op for op in self.graph.ops if op.name not in self.floating)
        self.place = {op.name: at for at, op in enumerate(self.ops)}

    @cached_property
    def last_use(self) -> dict[str, int]:
        """For each value that the line makes, the place of the last op on the line that reads it."""
        last: dict[str, int] = {}
        for at, op in enumerate(self.ops):
            last.update(dict.fromkeys(op.inputs, at))
        return {name: at for name, at in last.items() if name in self.producer_at}

    @cached_property
    def producer_at(self) -> dict[str, int]:
        return {name: at for at, op in enumerate(self.ops) for name in op.outputs}

    @cached_property
    def crossing(self) -> tuple[int, ...]:
        """For each place on the line, the bytes that cross it; the first is what goes into the line, 0."""
        change = [0] * (len(self.ops) + 1)
        for name, last in self.last_use.items():
            change[self.producer_at[name] + 1] += self.graph.values[name].bytes
            change[last + 1] -= self.graph.values[name].bytes
        total, loads = 0, []
        for step in change[: len(self.ops)]:
            total += step
            loads.append(total)
        return tuple(loads)

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Where the line may be cut (before the op there): where least crosses, and not inside a checkpointed region.

        Of several places in a row between which nothing is multiplied, the last: a bias and an activation stay with
        their matmul.
        """
        ops, load, analysis = self.ops, (*self.crossing, 0), self.analysis
        places: list[int] = []
        for at in range(1, len(ops)):
            if ops[at].region is not None and ops[at].region == ops[at - 1].region:
                continue
            low = (at == 1 or load[at - 1] >= load[at]) and load[at] <= load[at + 1]
            alike = places[-1:] == [at - 1] and load[at] == load[at - 1]
            if alike and not is_matmul(analysis.signatures[ops[at - 1].name]):
                places[-1] = at
            elif low or at + 1 == len(ops):
                places.append(at)
        return tuple(places)

    def cuts_before(self, ops: Sequence[Op], count: int) -> tuple[int, ...]:
        """Where `count` stages begin that begin with these ops, the first aside."""
        at = sorted({self.place_of(op) for op in ops} - {0, len(self.ops)})
        if len(at) + 1 != count:
            raise PlanError(
                f"{count} stages are asked for, and {len(at)} modules that one begins with; name {count - 1}, each of "
                "which has ops before it, or none"
            )
        for place in at:
            region = self.ops[place].region
            if region is not None and region == self.ops[place - 1].region:
                raise PlanError(
                    f"a stage can't begin with {self.ops[place]}, which is inside of a region that the model "
                    "checkpoints; cut before or after it"
                )
        return tuple(at)

    def place_of(self, op: Op) -> int:
        """The place of an op, or of the next one on the line if it is not on it."""
        later = self.graph.ops[self.graph.ops.index(op) :]
        return next((self.place[other.name] for other in later if other.name in self.place), len(self.ops))

    def parts(self, cuts: Sequence[int]) -> tuple[tuple[str, ...], ...]:
        """The names of all ops by stage, where the line is cut before these places."""
        bounds = [0, *cuts, len(self.ops)]
        if any(a >= b for a, b in itertools.pairwise(bounds)):
            raise PlanError(f"a line of {len(self.ops)} ops can't be cut at {', '.join(map(str, cuts))}")
        stage_of = {
            op.name: number
            for number, (start, end) in enumerate(itertools.pairwise(bounds))
            for op in self.ops[start:end]
        }
        return self.settled(stage_of, len(bounds) - 1)

    def settled(self, stage_of: Mapping[str, int], count: int) -> tuple[tuple[str, ...], ...]:
        """All ops by stage, given where those on the line are: others are listed with the first that reads them."""
        stages = dict(stage_of)
        for op in reversed(self.graph.ops):
            if op.name in self.floating:
                readers = [stages[user.name] for name in op.outputs for user, _ in self.graph.users[name]]
                stages[op.name] = min(readers, default=count - 1)
        parts: list[list[str]] = [[] for _ in range(count)]
        for op in self.graph.ops:
            parts[stages[op.name]].append(op.name)
        return tuple(map(tuple, parts))


def _floating(analysis: Analysis) -> frozenset[str]:
    graph = analysis.graph
    changed = {buffer.value for buffer in graph.buffers if buffer.update is not None}
    updates = {update for _, update in graph.updates()}
    lean = {parameter.value for parameter in graph.parameters} | analysis.constants
    at_hand = {item.value for item in graph.inputs} | analysis.constants
    at_hand |= {buffer.value for buffer in graph.buffers} - changed
    floating: set[str] = set()
    for op in graph.ops:
        if analysis.is_constant(op):
            floating.add(op.name)
            continue
        if is_random(op) or op.target in DROPOUTS or any(name in updates for name in op.outputs):
            continue
        repeatable = bool(op.inputs) and not op.target.startswith("call.")
        if repeatable and all(name in at_hand for name in op.inputs) and is_cheap(analysis, op):
            floating.add(op.name)
            at_hand.update(op.outputs)
        elif repeatable and all(name in lean for name in op.inputs):
            floating.add(op.name)
            lean.update(op.outputs)
    return frozenset(floating)


def is_cheap(analysis: Analysis, op: Op) -> bool:
    """Whether running an op again costs less than sending what it makes."""
    signature = analysis.signatures[op.name]
    return op.target.startswith("aten.") and signature.rule is not None and not is_matmul(signature)


@dataclass(frozen=True, kw_only=True)
class StagedGraph:
    """A graph cut into stages: the graph of each, and the values sent between them."""

    graphs: tuple[Graph, ...]
    crossings: tuple[StageValue, ...]
    outputs: tuple[int, ...]  # for each output of the whole graph, the stage that gives it (-1 for a literal)

    @property
    def edges(self) -> frozenset[tuple[int, int]]:
        return frozenset((crossing.sender, crossing.receiver) for crossing in self.crossings)


def split_graph(line: OpSequence, parts: Sequence[Sequence[str]]) -> StagedGraph:
    """The graphs of all stages. `parts` names all ops of the graph, each once."""
    graph = line.graph
    stage_of = {name: number for number, part in enumerate(parts) for name in part}
    _check_order(line, stage_of)
    inside = [_inside(line, stage_of, number) for number in range(len(parts))]
    takes = [_inputs_from_outside(graph, ops) for ops in inside]
    gives: list[dict[str, None]] = [{} for _ in parts]
    crossings: list[StageValue] = []
    for receiver, values in enumerate(takes):
        for value in values:
            sender = stage_of[graph.producer[value].name]
            gives[sender].setdefault(value)
            crossings.append(StageValue(value=value, sender=sender, receiver=receiver))
    outputs = tuple(_sender(graph, output, stage_of) for output in graph.outputs)
    graphs = tuple(
        _subgraph(graph, inside[number], tuple(takes[number]), tuple(gives[number]), number, outputs)
        for number in range(len(parts))
    )
    _check_written(graph, graphs)
    return StagedGraph(graphs=graphs, crossings=tuple(crossings), outputs=outputs)


def _check_order(line: OpSequence, stage_of: Mapping[str, int]) -> None:
    for op in line.ops:
        for name in op.inputs:
            maker = line.graph.producer.get(name)
            if maker is not None and maker.name not in line.floating and stage_of[maker.name] > stage_of[op.name]:
                raise PlanError(
                    f"{op} is in stage {stage_of[op.name]} and reads {name}, which {maker} makes in the later "
                    f"stage {stage_of[maker.name]}; stages read from earlier ones only"
                )


def _check_written(graph: Graph, stages: Sequence[Graph]) -> None:
    """A parameter that forward writes to has one copy, or the others would keep the old value."""
    for written in (item.key for item in graph.parameters if item.update is not None):
        readers = [number for number, stage in enumerate(stages) if any(p.key == written for p in stage.parameters)]
        if len(readers) > 1:
            raise PlanError(
                f"forward writes to the parameter {written!r}, and the stages {readers} each hold a copy of it; cut "
                "the model elsewhere, or write to it in the training loop (max_norm: renormalize the weight there)"
            )


def _inside(line: OpSequence, stage_of: Mapping[str, int], number: int) -> set[str]:
    """The ops that a stage runs: its own on the line, those off the line that they read, cheap ones run again."""
    graph = line.graph
    ops = {op.name for op in line.ops if stage_of[op.name] == number}
    sinks = {graph.producer[name].name for name in graph.sinks() if name in graph.producer}
    ops |= {name for name in sinks if name in line.floating and stage_of[name] == number}
    for op in reversed(graph.ops):
        read = any(user.name in ops for name in op.outputs for user, _ in graph.users[name])
        if read and op.name in line.floating:
            ops.add(op.name)
    return ops | _again(line, ops)


def _again(line: OpSequence, inside: set[str]) -> set[str]:
    """Cheap ops of earlier stages all of whose inputs are at hand in this one, or come in anyway."""
    graph, repeated = line.graph, set[str]()
    at_hand = {name for op in graph.ops if op.name in inside for name in (*op.inputs, *op.outputs)}
    at_hand |= {item.value for item in graph.inputs}
    for op in graph.ops:
        if op.name in inside or op.name in line.floating or op.region is not None:
            continue
        read = any(user.name in inside for name in op.outputs for user, _ in graph.users[name])
        ready = all(name in at_hand and graph.parameter_of(name) is None for name in op.inputs)
        if read and ready and is_cheap(line.analysis, op) and not is_random(op) and op.target not in DROPOUTS:
            repeated.add(op.name)
    return repeated


def _inputs_from_outside(graph: Graph, inside: set[str]) -> dict[str, None]:
    values: dict[str, None] = {}
    for op in graph.ops:
        if op.name in inside:
            for name in op.inputs:
                maker = graph.producer.get(name)
                if maker is not None and maker.name not in inside:
                    values.setdefault(name)
    return values


def _sender(graph: Graph, output: Output, stage_of: Mapping[str, int]) -> int:
    if output.value is None:
        return -1
    maker = graph.producer.get(output.value)
    return 0 if maker is None else stage_of[maker.name]


def _subgraph(
    graph: Graph, inside: set[str], takes: tuple[str, ...], gives: tuple[str, ...], number: int, outputs: Sequence[int]
) -> Graph:
    ops = tuple(op for op in graph.ops if op.name in inside)
    produced = {name for op in ops for name in op.outputs}
    left = tuple(output for output, at in zip(graph.outputs, outputs, strict=True) if at == number)
    read = {name for op in ops for name in op.inputs} | {o.value for o in left if o.value is not None}
    leaving = tuple(Output(path=value, value=value) for value in gives) + left
    buffers = tuple(
        replace(buffer, update=buffer.update if buffer.update in produced else None)
        for buffer in graph.buffers
        if buffer.value in read or buffer.update in produced
    )
    if number == 0:  # what no op reads is held too
        read |= {item.value for item in graph.parameters if not graph.users[item.value]}
    inputs = tuple(item for item in graph.inputs if item.value in read)
    inputs += tuple(Input(value=value, path=value) for value in takes)
    parameters = tuple(
        replace(item, update=item.update if item.update in produced else None)
        for item in graph.parameters
        if item.value in read or item.update in produced
    )
    names = read | produced | {item.value for item in inputs} | {item.value for item in buffers}
    return replace(
        graph,
        values={name: value for name, value in graph.values.items() if name in names},
        inputs=inputs,
        parameters=parameters,
        buffers=buffers,
        ops=ops,
        outputs=leaving,
        returned=None,
    )


def balanced(line: OpSequence, weights: Sequence[float], count: int, slack: float = 0.05) -> tuple[int, ...]:
    """Where to cut a line into `count` parts: the heaviest as light as can be, within `slack` the least sent.

    weights     what each op of the line weighs
    """
    places = [0, *line.places, len(line.ops)]
    if len(places) - 1 < count:
        raise PlanError(
            f"{count} stages are asked for, and the model can be cut in {len(places) - 1} at most; use fewer"
        )
    before = [0.0]
    for weight in weights:
        before.append(before[-1] + weight)
    load = [before[at] for at in places]
    most = _lightest(load, count) * (1.0 + slack)
    ends = range(len(places))
    best: list[list[tuple[float, int]]] = [[(0.0, 0) if end == 0 else (math.inf, 0) for end in ends]]
    for part in range(1, count + 1):
        row = [(math.inf, 0)] * len(places)
        for end in ends[-1:] if part == count else ends[part : len(places) - (count - part)]:
            first = bisect.bisect_left(load, load[end] - most)
            sent = 0 if part == count else line.crossing[places[end]]
            row[end] = min((best[-1][start][0] + sent, start) for start in (*range(first, end), first))
        best.append(row)
    cuts, at = [], len(places) - 1
    for part in range(count, 1, -1):
        at = best[part][at][1]
        cuts.append(places[at])
    return tuple(reversed(cuts))


def _lightest(load: Sequence[float], count: int) -> float:
    """The smallest bound for which the line falls into `count` parts of at most that weight."""
    low = max(max(b - a for a, b in itertools.pairwise(load)), load[-1] / count)
    high = load[-1]
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if _parts(load, middle) <= count else (middle, high)
    return high * (1 + 1e-9)


def _parts(load: Sequence[float], most: float) -> int:
    parts, start = 1, 0
    for at in range(1, len(load)):
        if load[at] - load[start] > most:
            parts, start = parts + 1, at - 1
            if load[at] - load[start] > most:
                return len(load)
    return parts

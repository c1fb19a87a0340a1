"""What a plan costs: the time of a step and the memory of a device, and where they come from.

A plan is priced with the tables that the search uses, all its choices fixed; so a plan that a person or a policy
made and one that the search found are measured with one stick. Memory is that of a walk through the step (`cost.peak`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..cluster import Cluster
from ..conversion import SENDS, find_steps
from ..cost import Training, habits_of
from ..cost.moves import Moves
from ..cost.peak import Memory, peak
from ..cost.resources import Resource, memory, phases, seconds
from ..cost.sends import algorithm_sends
from ..errors import PlanError
from ..rules import Analysis
from .homes import Storing
from .kinds import Kinds
from .plan import Plan
from .search import Problem, solve
from .skeleton import EdgeTable, End, OpTable, Skeleton, UseTable
from .spaces import Spaces
from .tables import Tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """Collectives of one kind over the same axes. `beside`: kernels run meanwhile, and hide it as far as they last."""

    when: str  # "forward", "backward", "update"
    collective: str
    axes: tuple[str, ...]
    count: int
    seconds: float
    beside: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """An op or a conversion, and the seconds of a step that it takes."""

    name: str
    seconds: float
    kept: float  # bytes


@dataclass(frozen=True, kw_only=True)
class Price:
    """A step of a plan on a cluster."""

    used: np.ndarray
    overlap: float
    training: Training
    sent: tuple[Sent, ...]
    ops: tuple[Part, ...]  # the dearest first
    edges: tuple[Part, ...]
    memory: Memory
    limit: float

    @property
    def seconds(self) -> float:
        return seconds(self.used, phases(self.overlap, self.training.accumulate))

    @property
    def compute(self) -> float:
        both = self.used[Resource.COMPUTE_FORWARD] + self.used[Resource.COMPUTE_BACKWARD]
        return float(both) * self.training.accumulate

    @property
    def waited(self) -> float:
        """Communication that the next op waits for."""
        both = self.used[Resource.SEND_FORWARD] + self.used[Resource.SEND_BACKWARD]
        return float(both) * self.training.accumulate

    @property
    def beside(self) -> float:
        both = self.used[Resource.BESIDE_FORWARD] + self.used[Resource.BESIDE_BACKWARD]
        return float(both) * self.training.accumulate

    @property
    def update(self) -> float:
        return float(self.used[Resource.UPDATE])

    @property
    def exposed(self) -> float:
        """What is left to see of the communication beside kernels."""
        return max(0.0, self.seconds - self.compute - self.waited - self.update)

    def as_json(self) -> dict[str, Any]:
        """For a plan file."""
        held = self.memory
        kinds = ("parameters", "gradients", "optimizer", "activations", "buffers")
        return {
            "seconds": _short(self.seconds),
            "compute": _short(self.compute),
            "waited": _short(self.waited),
            "beside": _short(self.beside),
            "exposed": _short(self.exposed),
            "update": _short(self.update),
            "sent": [
                {
                    "when": sent.when,
                    "collective": sent.collective,
                    "axes": list(sent.axes),
                    "count": sent.count,
                    "seconds": _short(sent.seconds),
                    "beside": sent.beside,
                }
                for sent in self.sent
            ],
            "memory": {"peak": int(held.peak), **{kind: int(getattr(held, kind)) for kind in kinds}},
            "limit": int(self.limit),
        }


def price(
    facts: Analysis,
    cluster: Cluster,
    training: Training,
    plan: Plan,
    *,
    rows: tuple[str, ...] = (),
) -> Price:
    """What a step of a plan's entry for this graph costs."""
    entry = facts.graph.entry
    if entry not in plan.entries:
        raise PlanError(f"the plan has no entry {entry!r}; it has {', '.join(plan.entries)}")
    choices = plan.choices(entry)
    recompute = plan.entries[entry][0].recompute
    said: dict[str, object] = {**choices, **plan.storage}
    kinds = Kinds(facts, training, said)
    skeleton = Skeleton(kinds, {path: (frozenset([path]),) for path in recompute})
    spaces = Spaces(kinds, Moves(plan.mesh, cluster), fixed=choices)
    tables = Tables(skeleton, spaces, Storing(spaces, fixed=plan.storage), rows)
    overlap = cluster.overlap
    problem = Problem(
        sizes=tables.sizes,
        factors=tables.factors,
        blocks=tables.blocks,
        phases=phases(overlap, training.accumulate),
        memory=memory(),
    )
    solution = solve(problem)
    if solution.states is None:
        raise PlanError("the plan can't be priced: a parameter is used in layouts that no home serves")
    ops, edges = _parts(tables, solution.states)
    habits = habits_of(cluster.device(0).name)
    return Price(
        used=np.asarray(solution.resources),
        overlap=overlap,
        training=training,
        sent=_sent(tables, solution.states, choices),
        ops=ops,
        edges=edges,
        memory=peak(facts, plan.mesh, choices, plan.storage, training, recompute, habits=habits),
        limit=cluster.memory * (1.0 - training.margin),
    )


def _parts(tables: Tables, states: tuple[int, ...]) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    ops: list[Part] = []
    edges: list[Part] = []
    kinds = list(tables.skeleton.tables)
    for factor, entry in zip(tables.factors, tables.skeleton.entries, strict=True):
        used = factor.table[tuple(states[at] for at in factor.variables)]
        time, kept = float(used[: Resource.UPDATE].sum()), float(used[Resource.KEPT])
        table = kinds[entry.table]
        if isinstance(table, OpTable):
            ops.append(Part(name=entry.name, seconds=time, kept=kept))
        elif isinstance(table, EdgeTable | UseTable) and time > 0:
            name = f"{entry.name} to {entry.reader}" if entry.reader else entry.name
            edges.append(Part(name=name, seconds=time, kept=kept))
    ops.sort(key=lambda part: -part.seconds)
    edges.sort(key=lambda part: -part.seconds)
    return tuple(ops), tuple(edges)


def _sent(tables: Tables, states: tuple[int, ...], choices: Mapping[str, Mapping[str, str]]) -> tuple[Sent, ...]:
    """All collectives of a step, added up by kind and axes."""
    sums: dict[tuple[str, str, tuple[str, ...], bool], list[float]] = {}
    for when, collective, axes, time, beside in (
        *_of_values(tables, states), *_of_ops(tables, choices), *_of_parameters(tables, states)
    ):  # fmt: skip
        sums.setdefault((when, collective, axes, beside), []).append(time)
    order = ("forward", "backward", "update")
    return tuple(
        Sent(when=when, collective=collective, axes=axes, count=len(held), seconds=sum(held), beside=beside)
        for (when, collective, axes, beside), held in sorted(
            sums.items(), key=lambda item: (order.index(item[0][0]), item[0])
        )
    )


Entry = tuple[str, str, tuple[str, ...], float, bool]


def _of_values(tables: Tables, states: tuple[int, ...]) -> Iterator[Entry]:
    """The steps of conversions; the price of each edge is shared among its steps."""
    values, sizes = tables.graph.values, tables.mesh.sizes
    kinds = list(tables.skeleton.tables)
    for factor, entry in zip(tables.factors, tables.skeleton.entries, strict=True):
        table = kinds[entry.table]
        if not isinstance(table, EdgeTable | UseTable):
            continue
        used = factor.table[tuple(states[at] for at in factor.variables)]
        price = {"forward": float(used[Resource.SEND_FORWARD]), "backward": float(used[Resource.SEND_BACKWARD])}
        if not any(price.values()):
            continue
        if isinstance(table, UseTable):
            starts, goals = tables.homes[table.home].layouts, tables.layouts(End("in", table.kind, table.index))
        else:
            starts, goals = tables.layouts(table.start), tables.layouts(table.goal, table.value)
        source = starts[states[factor.variables[0]]]
        goal = goals[states[factor.variables[1]] if len(goals) > 1 else 0]
        value = values[entry.name]
        _, steps, _ = find_steps([source], goal, value.shape, tables.training.item(value), sizes, value.gradient)
        for when, time in price.items():
            sending = [step for step in steps if SENDS[step.kind][when == "backward"]]
            for step in sending:
                yield when, SENDS[step.kind][when == "backward"], step.axes, time / len(sending), False


def _of_ops(tables: Tables, choices: Mapping[str, Mapping[str, str]]) -> Iterator[Entry]:
    for name in tables.skeleton.ops:
        signature = tables.facts.signatures[name]
        for sent in algorithm_sends(signature, choices.get(name, {}), tables.mesh, tables.training):
            if sent.when == "forward" or tables.spaces.backward:
                time = tables.moves.collective(sent.collective, sent.bytes, sent.axes)
                yield sent.when, sent.collective, sent.axes, time, False


def _of_parameters(tables: Tables, states: tuple[int, ...]) -> Iterator[Entry]:
    whens = {Resource.BESIDE_FORWARD: "forward", Resource.BESIDE_BACKWARD: "backward", Resource.UPDATE: "update"}
    for parameter in tables.graph.parameters:
        if parameter.key not in tables.skeleton.homes:
            continue
        layout, held = tables.home(parameter.key, states)
        for sent in tables.storing.sends(parameter, layout, held, tables.skeleton.units[parameter.key]):
            beside = sent.resource != Resource.UPDATE
            yield whens[sent.resource], sent.collective, sent.axes, sent.seconds, beside


def _short(value: float) -> float:
    return float(f"{value:.4g}")

"""What a plan costs: the time of a step and the memory of a device, and where they come from.

A plan is priced with the tables that the search uses, all its choices fixed; so a plan that a person or a policy
made and one that the search found are compared on equal terms. Memory is simulated (`simulate_memory`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..cluster import Cluster
from ..cost import TrainingSetup
from ..cost.algorithm_collectives import algorithm_collectives
from ..cost.reshard_search import find_reshards
from ..cost.reshard_tables import ReshardTables
from ..cost.resources import Resource, phases, seconds
from ..errors import PlanError
from ..ir import Graph
from ..memory import MemoryPeak
from ..reshard import COLLECTIVES, Reshard
from ..rules import Analysis
from .digest import AxisUse, axis_uses, fold_parts, stored_bytes
from .op_kinds import OpKinds
from .plan import Plan
from .problem_structure import EdgeEnd, EdgeTable, FactorEntry, OpTable, ProblemStructure, Table, UseTable
from .search import solve
from .spaces import ChoiceSpaces, FixedChoices
from .storage_options import StoragePricing
from .tables import Tables


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedCollective:
    """Collectives of one kind over the same axes. `overlapped`: they run while kernels do, which hide them in part."""

    when: str  # "forward", "backward", "update"
    collective: str
    axes: tuple[str, ...]
    count: int
    seconds: float
    overlapped: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedPart:
    """An op, or the reshard of a value between two ops, and the seconds of a step that it takes."""

    name: str
    seconds: float
    saved: float  # bytes saved for backward
    sends: str = ""  # of a reshard: "all_gather over tp forward, ..."


@dataclass(frozen=True, kw_only=True)
class PlanPrice:
    """A step of a plan on a cluster."""

    made_for: Mapping[str, Any]  # the cluster, the batch, the training
    used: np.ndarray
    overlap: float
    training: TrainingSetup
    sent: tuple[PricedCollective, ...]
    ops: tuple[PricedPart, ...]  # the most expensive first
    edges: tuple[PricedPart, ...]
    axes: tuple[AxisUse, ...]
    stored: Mapping[str, float]  # bytes of full parameters, by how they are stored
    memory: MemoryPeak
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
        """Blocking communication: the next op waits for it."""
        both = self.used[Resource.SEND_FORWARD] + self.used[Resource.SEND_BACKWARD]
        return float(both) * self.training.accumulate

    @property
    def overlapped(self) -> float:
        both = self.used[Resource.BESIDE_FORWARD] + self.used[Resource.BESIDE_BACKWARD]
        return float(both) * self.training.accumulate

    @property
    def update(self) -> float:
        return float(self.used[Resource.UPDATE])

    @property
    def exposed(self) -> float:
        """Exposed communication: the overlapped part that kernels do not hide."""
        shown = self.seconds - self.compute - self.waited - self.update
        return shown if shown > 1e-9 * self.seconds else 0.0  # else a rounding error

    def hidden(self, when: str) -> float:
        """The fraction of the overlapped communication that kernels hide, in forward or backward."""
        kernels, overlapped = (float(self.used[Resource[f"{kind}_{when.upper()}"]]) for kind in ("COMPUTE", "BESIDE"))
        return self.overlap * min(kernels, overlapped) / overlapped if overlapped else 0.0

    def as_json(self) -> dict[str, Any]:
        """For a plan file."""
        memory = self.memory
        kinds = ("parameters", "gradients", "optimizer", "activations", "buffers", "inputs")
        return {
            "for": dict(self.made_for),
            "seconds": _short(self.seconds),
            "compute": _short(self.compute),
            "blocking": _short(self.waited),
            "overlapped": _short(self.overlapped),
            "exposed": _short(self.exposed),
            "update": _short(self.update),
            "axes": [use.as_json() for use in self.axes],
            "stored": {how: int(size) for how, size in self.stored.items()},
            "sent": [
                {
                    "when": sent.when,
                    "collective": sent.collective,
                    "axes": list(sent.axes),
                    "count": sent.count,
                    "seconds": _short(sent.seconds),
                    "hidden": _short(sent.seconds * self.hidden(sent.when) if sent.overlapped else 0.0),
                    "overlapped": sent.overlapped,
                }
                for sent in self.sent
            ],
            "ops": fold_parts(self.ops),
            "edges": fold_parts(self.edges),
            "memory": {"peak": int(memory.peak), **{kind: int(getattr(memory, kind)) for kind in kinds}},
            "at": {"phase": memory.at[1], "op": memory.at[0]},
            "limit": int(self.limit),
        }


def price(
    analysis: Analysis,
    cluster: Cluster,
    training: TrainingSetup,
    plan: Plan,
    *,
    replica_axes: tuple[str, ...] = (),
    limit: float | None = None,
    memory: MemoryPeak | None = None,
) -> PlanPrice:
    """What a step of a plan's entry for this graph costs.

    limit     the memory limit of a device in bytes, if less than it has
    memory    the result of a memory simulation, if there was one
    """
    entry = analysis.graph.entry
    if entry not in plan.entries:
        raise PlanError(f"the plan has no entry {entry!r}; it has {', '.join(plan.entries)}")
    choices = plan.choices(entry)
    recompute = plan.entries[entry][0].recompute
    decisions: dict[str, object] = {**choices, **plan.storage}
    kinds = OpKinds(analysis, training, decisions, plan.entries[entry][0].chunked_loss)
    skeleton = ProblemStructure(kinds, {path: (frozenset([path]),) for path in recompute})
    spaces = ChoiceSpaces(kinds, ReshardTables(plan.mesh, cluster), fixed=FixedChoices(choices))
    tables = Tables(skeleton, spaces, StoragePricing(spaces, fixed=plan.storage), replica_axes)
    solution = solve(tables.problem())
    if solution.states is None:
        raise PlanError("the plan can't be priced: a parameter is used in layouts that no storage serves")
    ops, reshards = _ops(tables, solution.states), tuple(_reshards(tables, solution.states))
    return PlanPrice(
        made_for={
            "cluster": str(cluster),
            "batch": analysis.graph.batch,
            "optimizer": training.optimizer,
            "compute": training.compute,
            "reduce": training.reduce,
            "masters": training.masters,
            "precision": training.precision_name,
            "accumulate": training.accumulate,
            "replica_axes": list(replica_axes),
            "outputs": _outputs(analysis.graph),
        },
        used=np.asarray(solution.resources),
        overlap=cluster.overlap,
        training=training,
        sent=_sent(tables, solution.states, reshards),
        ops=ops,
        edges=_most_expensive_first(
            PricedPart(name=reshard.name, seconds=reshard.seconds, saved=0.0, sends=reshard.describe())
            for reshard in reshards
        ),
        axes=axis_uses(analysis, plan.mesh, cluster, choices),
        stored=stored_bytes(analysis.graph, plan.storage),
        memory=memory or tables.peak(choices, plan.storage, recompute),
        limit=training.room(cluster.memory) if limit is None else limit,
    )


def _outputs(graph: Graph) -> str:
    """What leaves the model."""
    large = any(output.value is not None and graph.values[output.value].shape for output in graph.outputs)
    return "all" if large else "scalars"


def _most_expensive_first(parts: Iterator[PricedPart]) -> tuple[PricedPart, ...]:
    return tuple(sorted(parts, key=lambda part: -part.seconds))


def _ops(tables: Tables, states: tuple[int, ...]) -> tuple[PricedPart, ...]:
    times = tables.training.accumulate

    def parts() -> Iterator[PricedPart]:
        for table, entry, used in _entries(tables, states):
            if isinstance(table, OpTable):
                seconds = times * float(used[: Resource.UPDATE].sum())
                yield PricedPart(name=entry.name, seconds=seconds, saved=float(used[Resource.KEPT]))

    return _most_expensive_first(parts())


def _entries(tables: Tables, states: tuple[int, ...]) -> Iterator[tuple[Table, FactorEntry, np.ndarray]]:
    """Every factor: its table, what it is the price of, and what it uses."""
    kinds = list(tables.skeleton.tables)
    for factor, entry in zip(tables.factors, tables.skeleton.entries, strict=True):
        yield kinds[entry.table], entry, factor.table[tuple(states[at] for at in factor.variables)]


class PricedReshard(NamedTuple):
    """The reshard between a value's producer and a reader: its steps, and the seconds of each direction."""

    name: str
    steps: tuple[Reshard, ...]
    forward: float
    backward: float
    again: float  # forward, recomputed in backward

    @property
    def seconds(self) -> float:
        return self.forward + self.backward + self.again

    def sends(self) -> Iterator[tuple[str, str, tuple[str, ...], float]]:
        """(when, collective, axes, seconds): the price of a direction is shared among its steps."""
        directions = (("forward", 0, self.forward), ("backward", 1, self.backward), ("backward", 0, self.again))
        for when, back, time in directions:
            sending = [(kind, step.axes) for step in self.steps if (kind := COLLECTIVES[step.kind][back]) is not None]
            for kind, axes in sending if time else ():
                yield when, kind, axes, time / len(sending)

    def describe(self) -> str:
        """The collectives forward / backward, such as "all_gather tp / reduce_scatter tp"."""
        axes_of: dict[str, dict[str, dict[str, None]]] = {"forward": {}, "backward": {}}
        for when, kind, axes, _ in self.sends():
            axes_of[when].setdefault(kind, {}).update(dict.fromkeys(axes))
        both = (
            "; ".join(f"{kind} {', '.join(axes)}" for kind, axes in collectives.items())
            for collectives in axes_of.values()
        )
        return " / ".join(text or "-" for text in both)


def _reshards(tables: Tables, states: tuple[int, ...]) -> Iterator[PricedReshard]:
    """All reshards of a step that send something."""
    graph, times = tables.graph, tables.training.accumulate
    for (table, entry, used), factor in zip(_entries(tables, states), tables.factors, strict=True):
        if not isinstance(table, EdgeTable | UseTable):
            continue
        forward, backward = float(used[Resource.SEND_FORWARD]), float(used[Resource.SEND_BACKWARD])
        if not forward and not backward:
            continue
        if isinstance(table, UseTable):
            starts, goals = (
                tables.storage_options[table.parameter].layouts,
                tables.layouts(EdgeEnd("in", table.kind, table.index)),
            )
        else:
            starts, goals = tables.layouts(table.start), tables.layouts(table.goal, table.value)
        source = starts[states[factor.variables[0]]]
        goal = goals[states[factor.variables[1]] if len(goals) > 1 else 0]
        value = graph.values[entry.name]
        path = find_reshards(source, goal, value.shape, tables.training.item(value), tables.moves, value.gradient)
        again = forward if isinstance(table, EdgeTable) and _runs_again(table, states[factor.variables[-1]]) else 0.0
        yield PricedReshard(
            name=f"{_maker(tables, entry.name)} -> {entry.reader or 'its readers'}",
            steps=path.steps,
            forward=times * forward,
            backward=times * (backward - again),
            again=times * again,
        )


def _runs_again(table: EdgeTable, option: int) -> bool:
    """Whether an edge is recomputed in backward."""
    return table.again or (bool(table.ways) and table.ways[option] == "again")


def _maker(tables: Tables, value: str) -> str:
    """The op that makes a value, or the key of a parameter."""
    producer, parameter = tables.graph.producer.get(value), tables.graph.parameter_of(value)
    return producer.name if producer is not None else parameter.key if parameter is not None else value


def _sent(tables: Tables, states: tuple[int, ...], reshards: tuple[PricedReshard, ...]) -> tuple[PricedCollective, ...]:
    """All collectives of a step, added up by kind and axes."""
    sums: dict[tuple[str, str, tuple[str, ...], bool], list[float]] = {}
    of_values = ((*sent, False) for reshard in reshards for sent in reshard.sends())
    for when, collective, axes, time, overlapped in (
        *of_values,
        *_of_ops(tables, states),
        *_of_parameters(tables, states),
    ):
        sums.setdefault((when, collective, axes, overlapped), []).append(time)
    order = ("forward", "backward", "update")
    return tuple(
        PricedCollective(
            when=when, collective=collective, axes=axes, count=len(times), seconds=sum(times), overlapped=overlapped
        )
        for (when, collective, axes, overlapped), times in sorted(
            sums.items(), key=lambda item: (order.index(item[0][0]), item[0])
        )
    )


Sending = tuple[str, str, tuple[str, ...], float, bool]


def _of_ops(tables: Tables, states: tuple[int, ...]) -> Iterator[Sending]:
    """What ops send themselves; ops that are recomputed send it again in backward."""
    choices, skeleton = tables.choices(states), tables.skeleton
    for (table, entry, _), factor in zip(_entries(tables, states), tables.factors, strict=True):
        if not isinstance(table, OpTable):
            continue
        again = table.region[states[factor.variables[-1]]] >= 0 if table.region else table.again
        signature = skeleton.analysis.signatures[entry.name]
        for sent in algorithm_collectives(signature, choices.get(entry.name, {}), tables.mesh, tables.training):
            time = tables.training.accumulate * tables.moves.waited(sent.collective, sent.bytes, sent.axes)
            if sent.when == "forward" or tables.spaces.backward:
                yield sent.when, sent.collective, sent.axes, time, sent.overlapped
            if sent.when == "forward" and again:
                yield "backward", sent.collective, sent.axes, time, sent.overlapped


def _of_parameters(tables: Tables, states: tuple[int, ...]) -> Iterator[Sending]:
    whens = {Resource.BESIDE_FORWARD: "forward", Resource.BESIDE_BACKWARD: "backward", Resource.UPDATE: "update"}
    for parameter in tables.graph.parameters:
        if parameter.key not in tables.skeleton.storage_options:
            continue
        layout, storage = tables.home(parameter.key, states)
        for sent in tables.storing.sends(parameter, layout, storage, tables.skeleton.units[parameter.key]):
            overlapped = sent.resource != Resource.UPDATE
            times = tables.training.accumulate if overlapped else 1
            yield whens[sent.resource], sent.collective, sent.axes, times * sent.seconds, overlapped


def _short(value: float) -> float:
    return float(f"{value:.4g}")

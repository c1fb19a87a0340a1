"""Prices any plan with stages or microbatches: made by a plan string, read from a file, or found by the search.

Each stage is priced by the tables of the search, with all choices fixed, on its mesh with the axis in time; then its
schedule is simulated, and the memory of each pipeline rank (`memory.microbatch`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from ...cluster import Cluster, Span, collective_time
from ...cost import TrainingSetup, backend_traits, local_elements
from ...cost.reshard_prices import NEVER, slowest_device
from ...cost.reshard_tables import ReshardTables
from ...errors import PlanError
from ...layout import MB, Axis, Mesh
from ...lower import transform
from ...memory import MemoryPeak, StageMemory, rank_memory, simulate_stage_memory
from ...rules import Analysis
from ...schedule import Schedule, StageEdge, StageTimes, schedule_kind, simulate
from ..digest import axis_uses
from ..lowering import PlacedStages, place_stages
from ..op_kinds import OpKinds
from ..pipeline import microbatches_of, schedule_of, timed
from ..plan import Plan, PlanStage
from ..price import PlanPrice, made_for, price
from ..priced_parts import PricedTables
from ..problem_structure import FactorEntry, OpTable, ProblemStructure, StorageTable, Table
from ..search import solve
from ..spaces import ChoiceSpaces, FixedChoices
from ..stages import OpSequence, StagedGraph, split_graph
from ..tables import Tables
from ..throughput import throughput
from .candidates import LONG
from .microbatch_tables import PipelineStoragePricing
from .pareto_front import weights_of
from .pipeline_price import PipelinePrice, PricedStage
from .stage_costs import StageCost, stage_of


def price_plan(
    analysis: Analysis,
    cluster: Cluster,
    training: TrainingSetup,
    plan: Plan,
    *,
    replica_axes: tuple[str, ...] = (),
    limit: float | None = None,
) -> PlanPrice | PipelinePrice:
    """What a step of any plan costs."""
    priced = price_pipeline if plan.is_pipeline else price
    return priced(analysis, cluster, training, plan, replica_axes=replica_axes, limit=limit)


def price_pipeline(
    analysis: Analysis,
    cluster: Cluster,
    training: TrainingSetup,
    plan: Plan,
    *,
    replica_axes: tuple[str, ...] = (),
    limit: float | None = None,
    memory: Sequence[MemoryPeak] | None = None,
) -> PipelinePrice:
    """What a step of a plan with stages or microbatches costs. For the arguments see `price`.

    memory    of each pipeline rank, if it was simulated already
    """
    return _PipelinePricing(analysis, cluster, training, plan, replica_axes).priced(limit, memory)


class _PipelinePricing:
    """What is computed once for a plan."""

    def __init__(
        self, analysis: Analysis, cluster: Cluster, training: TrainingSetup, plan: Plan, replica_axes: tuple[str, ...]
    ) -> None:
        self.analysis, self.cluster, self.training, self.plan = analysis, cluster, training, plan
        self.replica_axes, self.entry = replica_axes, analysis.graph.entry
        if self.entry not in plan.entries:
            raise PlanError(f"the plan has no entry {self.entry!r}; it has {', '.join(plan.entries)}")
        self.planned: tuple[PlanStage, ...] = plan.entries[self.entry]
        self.microbatches = microbatches_of(plan, analysis.graph)
        self.in_time = 1 if plan.local else self.microbatches
        self._known: dict[tuple[object, ...], tuple[Tables, tuple[int, ...]]] = {}

    @cached_property
    def staged(self) -> StagedGraph:
        return split_graph(OpSequence(self.analysis), [tuple(stage.choices) for stage in self.planned])

    @cached_property
    def placed(self) -> PlacedStages:
        """The programs of the stages, as far as memory and messages need them."""
        meshes = [timed(replace(stage.mesh, devices=()), self.in_time) for stage in self.planned]
        return place_stages(self.analysis, self.staged, self.planned, meshes, self.plan.storage, self.cluster)

    @cached_property
    def pp_ranks(self) -> list[tuple[int, ...]]:
        return list(dict.fromkeys(stage.mesh.devices for stage in self.planned))

    def priced(self, limit: float | None, memory: Sequence[MemoryPeak] | None) -> PipelinePrice:
        stages = tuple(self._stage(number) for number in range(len(self.planned)))
        holders = tuple(self.pp_ranks.index(stage.mesh.devices) for stage in self.planned)
        crossing = self._crossing()
        links = {pair: self._edge(pair, *bytes) for pair, bytes in crossing.items()}
        run = self._run([stage.cost for stage in stages], list(links.values()))
        once = [0.0] * len(self.pp_ranks)
        for stage, pp_rank in zip(stages, holders, strict=True):
            once[pp_rank] += stage.cost.once
        after = max(once) + self._leaving()
        simulated = () if memory else self._simulated(stages)
        peaks = tuple(memory or self._memory(simulated))
        rooms = [min(self.cluster.device(rank).memory for rank in pp_rank) for pp_rank in self.pp_ranks]
        first = self.planned[0]
        batches = self.microbatches if self.plan.local else 1
        seconds = self.training.accumulate * run + after
        return PipelinePrice(
            made_for=made_for(self.analysis.graph, self.cluster, self.training, self.replica_axes),
            plan=self.plan,
            entry=self.entry,
            microbatches=self.microbatches,
            accumulate=self.training.accumulate,
            stages=stages,
            holders=holders,
            links=links,
            crossing_bytes=crossing,
            run=run,
            once=after,
            throughput=throughput(
                self.analysis, self.cluster, self.training, seconds, devices=self.plan.size, batches=batches
            ),
            axes=axis_uses(self.analysis, first.mesh, self.cluster, self.plan.choices(self.entry)),
            names=tuple(
                dict.fromkeys(link.name for pair in links for span in self._spans(pair) for link in span.links)
            ),
            memory=peaks,
            limits=tuple(self.training.room(room) if limit is None else limit for room in rooms),
            simulated=simulated,
        )

    # -- time

    def _stage(self, number: int) -> PricedStage:
        graph = self.staged.graphs[number]
        own, read = set(self.planned[number].choices), {op.name for op in graph.ops}
        keys = frozenset(parameter.key for parameter in graph.parameters)
        producer = self.analysis.graph.producer

        def counts(table: Table, entry: FactorEntry) -> bool:
            """A reshard for one reader is its reader's, one for several readers its producer's."""
            if isinstance(table, OpTable):
                return entry.name in read
            if isinstance(table, StorageTable):
                return entry.name in keys
            return (entry.reader or producer[entry.name].name) in own

        tables, states = self._solved(self.planned[number].mesh)
        times = self.microbatches * self.training.accumulate
        priced = PricedTables(tables=tables, states=states, times=times, counts=counts)
        used, weights = priced.used(), np.zeros(2)
        for table, _, chosen, _ in priced.entries():
            if isinstance(table, OpTable):
                weights += weights_of(tables, table.kind)[chosen[0]]
        cost = stage_of(np.concatenate([used, weights]), self.cluster.overlap)
        return PricedStage(cost=cost, priced=priced, used=used, keys=keys)

    def _solved(self, mesh: Mesh) -> tuple[Tables, tuple[int, ...]]:
        """The tables of the whole graph on a mesh of a stage, and the states of its plan."""
        spans = tuple(self.cluster.spans(mesh, (axis.name,)) for axis in mesh.axes)
        key = (mesh.axes, slowest_device(self.cluster, mesh.devices), spans)
        if key not in self._known:
            self._known[key] = self._solve(mesh)
        return self._known[key]

    def _solve(self, mesh: Mesh) -> tuple[Tables, tuple[int, ...]]:
        names = {*mesh.names, MB}
        choices = {
            op: {axis: picked for axis, picked in choice.items() if axis in names}
            for op, choice in self.plan.choices(self.entry).items()
        }
        chunked = {name: chunks for stage in self.planned for name, chunks in stage.chunked_loss.items()}
        kinds = OpKinds(self.analysis, self.training, {**choices, **self.plan.storage}, chunked)
        again = [path for stage in self.planned for path in stage.recompute]
        skeleton = ProblemStructure(kinds, {path: (frozenset([path]),) for path in dict.fromkeys(again)})
        over_time = timed(replace(mesh, devices=()), self.in_time)
        sizes = {MB: 1, **mesh.sizes}
        placed = Mesh(axes=tuple(Axis(name=n, size=sizes[n]) for n in over_time.names), devices=mesh.devices)
        spaces = ChoiceSpaces(kinds, ReshardTables(over_time, self.cluster, placed), fixed=FixedChoices(choices))
        storing = PipelineStoragePricing(spaces, self.microbatches, {}, {}, self.plan.storage)
        tables = Tables(skeleton, spaces, storing, (*([MB] if self.in_time > 1 else []), *self.replica_axes))
        solution = solve(tables.problem())
        if solution.states is None:
            raise PlanError("the plan can't be priced: a parameter is used in layouts that no storage serves")
        if solution.time >= NEVER:
            raise PlanError("the plan can't be priced: an op needs what other microbatches compute")
        return tables, solution.states

    def _spans(self, pair: tuple[int, int]) -> tuple[Span, ...]:
        """The ways between the devices of two stages, the first and the last of which stand for all."""
        sender, receiver = (self.planned[number].mesh.devices for number in pair)
        ends = ((sender[0], receiver[0]), (sender[-1], receiver[-1])) if sender != receiver else ()
        return tuple(dict.fromkeys(map(self.cluster.span, ends)))

    def _crossing(self) -> dict[tuple[int, int], tuple[float, float]]:
        """For each pair of stages the bytes that a device sends for a microbatch, forward and backward."""
        crossing: dict[tuple[int, int], tuple[float, float]] = {}
        for stage_value in self.staged.crossings:
            value, pair = self.analysis.graph.values[stage_value.value], (stage_value.sender, stage_value.receiver)
            mesh = timed(replace(self.planned[pair[0]].mesh, devices=()), self.in_time)
            elements = local_elements(value.shape, self.placed.sent[stage_value.value], mesh)
            bytes = elements * self.training.item(value)
            forward, backward = crossing.get(pair, (0.0, 0.0))
            crossing[pair] = (forward + bytes, backward + bytes * value.gradient)
        return crossing

    def _edge(self, pair: tuple[int, int], forward: float, backward: float) -> StageEdge:
        def seconds(size: float) -> float:
            spans, measured = self._spans(pair), self.cluster.measured
            return max((collective_time("send", size, span, measured) for span in spans), default=0.0)

        return StageEdge(*pair, seconds(forward), seconds(backward) if backward else None)

    def _schedule(self, microbatches: int) -> Schedule:
        """The schedule over pipeline ranks."""
        if self.plan.steps is not None or not self.plan.schedule:
            return schedule_of(self.plan, self.microbatches)
        return schedule_kind(self.plan.schedule).make(len(self.pp_ranks), microbatches)

    def _run(self, costs: Sequence[StageCost], edges: Sequence[StageEdge]) -> float:
        """Seconds of the schedule: a part of a long one is simulated, the rest takes what the slowest rank needs."""
        if not self.entry.startswith("train"):
            return self.microbatches * max(cost.forward for cost in costs) + sum(cost.forward for cost in costs)
        some = min(self.microbatches, max(LONG * len(costs), 32))
        schedule = self._schedule(some)
        some = max(some, schedule.microbatches)
        apart = schedule.splits_weights
        times = [StageTimes(cost.forward, cost.backward - cost.weight * apart, cost.weight * apart) for cost in costs]
        busy: dict[tuple[int, ...], float] = {}
        for cost, stage in zip(costs, self.planned, strict=True):
            busy[stage.mesh.devices] = busy.get(stage.mesh.devices, 0.0) + cost.forward + cost.backward
        return simulate(schedule, times, edges).total + (self.microbatches - some) * max(busy.values())

    def _leaving(self) -> float:
        """Seconds to send the outputs of the model to every rank, once a step; scalars are not counted."""
        if len(self.pp_ranks) == 1:
            return 0.0
        values = [self.analysis.graph.values[out.value] for out in self.analysis.graph.outputs if out.value is not None]
        bytes = sum(value.elements * self.training.item(value) for value in values if value.shape)
        span = self.cluster.span(range(self.plan.size))
        return collective_time("broadcast", bytes, span, self.cluster.measured)

    # -- memory

    def _simulated(self, stages: Sequence[PricedStage]) -> tuple[StageMemory, ...]:
        """One microbatch of each stage."""
        simulated = []
        for placer, planned, stage in zip(self.placed.placers, self.planned, stages, strict=True):
            traits = backend_traits(slowest_device(self.cluster, planned.mesh.devices).name, self.cluster.nodes)
            program = transform(placer)
            simulated.append(simulate_stage_memory(program, self.training, traits, queued=stage.cost.queued))
        return tuple(simulated)

    def _memory(self, simulated: Sequence[StageMemory]) -> tuple[MemoryPeak, ...]:
        """The peak of a device of each pipeline rank."""
        if self.plan.steps is not None or not self.plan.schedule:
            schedule, ranks = schedule_of(self.plan, self.microbatches), [devices[0] for devices in self.pp_ranks]
        else:
            ranks = list(range(len(self.pp_ranks)))
            schedule = schedule_kind(self.plan.schedule).steady(len(ranks), self.microbatches)
        return tuple(rank_memory(schedule, rank, simulated, self.training) for rank in ranks)

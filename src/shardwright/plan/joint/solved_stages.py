"""The stages of a pipeline solved by themselves, exactly, each within its own memory; the plan and its memory.

A stage of a trial is a mix of solutions. For the `Refiner` its ops, parameters and layers are variables again.
Everything outside is fixed to a solution of the whole graph, and so are the values that cross, so that both sides see
them alike. A `SolvedPipeline` becomes a plan, and a memory simulation says what each pipeline rank needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ...cluster import Cluster
from ...cost import TrainingSetup, backend_traits
from ...cost.resources import phases, row
from ...ir.paths import is_inside
from ...layout import MB, Axis, Mesh
from ...lower import LoweredProgram, transform
from ...lower.chunked_loss import joined_losses
from ...memory import MemoryPeak, StageMemory, rank_memory, simulate_stage_memory
from ...rules import Analysis, Choices
from ...storage import Replicated, Storage
from ..builder import PlanBuilder
from ..chunking import resolved_chunks
from ..lowering import place_stages
from ..meshes import axis_names
from ..pipeline import timed
from ..plan import Plan, PlanStage
from ..search import CostFactor, Problem, solve
from ..stages import OpSequence, StagedGraph, split_graph
from ..tables import Tables
from .candidates import PipelineTrial
from .pareto_front import StageFront, StageSolution
from .ranks import RankDevices
from .stage_costs import StageCost, stage_of
from .stage_cuts import BlockOfEntries

AIM = 0.01
"""The relative gap at which a stage is solved well enough."""


@dataclass(frozen=True, eq=False, kw_only=True)
class SolvedStage:
    """A solved stage: its cost, and the states of all variables (only those of its own blocks count)."""

    stage: StageCost
    solution: StageSolution
    begin: int
    end: int


class Refiner:
    """Solves runs of blocks. Identical runs are solved once."""

    def __init__(self, where: dict[bool, BlockOfEntries], stop: Callable[[], bool]) -> None:
        self.where, self.stop = where, stop
        self._anchors: dict[int, StageSolution | None] = {}
        self._known: dict[tuple[object, ...], tuple[int, ...] | None] = {}
        self._problems: dict[tuple[object, ...], Problem] = {}  # whatever the room

    def solve(self, front: StageFront, begin: int, end: int, flight: float, room: float) -> SolvedStage | None:
        """The fastest solution for a run of blocks within `room` bytes; None if none was found."""
        assert front.fastest is not None
        plain = front.fastest.between(begin, end)
        stage = stage_of(plain, front.overlap)
        if stage.memory(flight) <= room:
            return SolvedStage(stage=stage, solution=front.fastest, begin=begin, end=end)
        return self._within(front, front.recomputing or front.plain, begin, end, flight, room)

    def _within(
        self, front: StageFront, tables: Tables, begin: int, end: int, flight: float, room: float
    ) -> SolvedStage | None:
        if id(tables) not in self._anchors:
            self._anchors[id(tables)] = front._solve(tables, front.time)
        anchor = self._anchors[id(tables)]
        if anchor is None:
            return None
        where = self.where[bool(tables.skeleton.layers)]
        entries = where.entries(begin, end)
        fixed = where.outside(begin, end)
        padded = where.variables[entries]
        real = np.arange(padded.shape[1])[None, :] < where.counts[entries][:, None]
        variables = np.unique(padded[real])
        at_anchor = np.where(fixed[variables], anchor.states[variables], -1)
        relative = np.where(real, np.searchsorted(variables, padded), -1)
        alike = (where.tables[entries].tobytes(), relative.tobytes(), at_anchor.tobytes())
        same = (id(tables), alike, flight)
        key = (*same, round(room / 2**20))
        if key not in self._known:
            if same not in self._problems:
                problem = self._problem(front, tables, where, entries, variables, fixed, anchor, flight)
                self._problems[same] = problem
            within = self._problems[same].within(room)
            self._known[key] = solve(within, stop=self.stop, aim=AIM, exact=False).states
        solved = self._known[key]
        if solved is None:
            return None
        states = anchor.states.copy()
        free = ~fixed[variables]
        states[variables[free]] = np.array(solved)[free]
        solution = front._solution(tables, states)
        stage = stage_of(solution.between(begin, end), front.overlap)
        return SolvedStage(stage=stage, solution=solution, begin=begin, end=end)

    def _problem(
        self, front: StageFront, tables: Tables, where: BlockOfEntries, entries: np.ndarray, variables: np.ndarray,
        fixed: np.ndarray, anchor: StageSolution, flight: float,
    ) -> Problem:  # fmt: skip
        number = {int(variable): at for at, variable in enumerate(variables)}
        sliced: dict[tuple[int, tuple[int, ...]], np.ndarray] = {}

        def factor(entry: int) -> CostFactor:
            own = tuple(int(v) for v in where.variables[entry, : where.counts[entry]])
            at = tuple(int(anchor.states[v]) if fixed[v] else -1 for v in own)
            key = (int(where.tables[entry]), at)
            if key not in sliced:
                table = tables.arrays[key[0]]
                for dim, state in enumerate(at):
                    table = table if state < 0 else table.take([state], axis=dim)
                sliced[key] = table
            return CostFactor(tuple(number[v] for v in own), sliced[key])

        blocks = tables.blocks
        return Problem(
            sizes=tuple(1 if fixed[v] else tables.sizes[v] for v in variables),
            factors=tuple(factor(int(entry)) for entry in entries),
            blocks=tuple(blocks[v] for v in variables),
            phases=phases(front.overlap, front.microbatches),
            memory=row(stored=1.0, kept=flight),
        )


@dataclass(frozen=True, kw_only=True)
class SolvedPipeline:
    """A trial with its stages solved."""

    trial: PipelineTrial
    solved: tuple[SolvedStage, ...]
    line: OpSequence
    places: tuple[int, ...]  # bounds of blocks in the op sequence
    local: bool = False  # the graph is that of one microbatch

    @property
    def times(self) -> int:
        """Into how many microbatches the graph's batch is split."""
        return 1 if self.local else self.trial.microbatches

    @property
    def analysis(self) -> Analysis:
        return self.line.analysis

    @cached_property
    def parts(self) -> tuple[tuple[str, ...], ...]:
        """The ops of each stage."""
        return self.line.parts([self.places[bound] for bound in self.trial.bounds[1:-1]])

    @cached_property
    def staged(self) -> StagedGraph:
        return split_graph(self.line, self.parts)

    @cached_property
    def names(self) -> dict[str, str]:
        """What the axes of pipeline ranks are called in the plan."""
        data, inner = self.trial.pp_ranks[0].names
        every: dict[str, Mapping[str, str]] = {}
        for solved, part in zip(self.solved, self.parts, strict=True):
            choices = solved.solution.tables.choices(solved.solution.picked)
            every |= {name: choices[name] for name in part if name in choices}
        used = {
            data: any(s.data > 1 for s in self.trial.pp_ranks),
            inner: any(s.inner > 1 for s in self.trial.pp_ranks),
        }
        mesh = Mesh(axes=tuple(Axis(name=name, size=2) for name, present in used.items() if present))
        renamed = axis_names(self.analysis, mesh, every)
        return {data: data, inner: inner, **renamed}

    def choices(self, number: int) -> Choices:
        """The choice of each op of a stage on its axes, including the microbatch axis."""
        return self._choices[number]

    @cached_property
    def _choices(self) -> list[Choices]:
        return [self._chosen(number) for number in range(len(self.solved))]

    def _chosen(self, number: int) -> Choices:
        solved, pp_rank = self.solved[number], self.pp_rank(number)
        data, inner = pp_rank.names
        chosen: dict[str, dict[str, str]] = {name: {} for name in self.parts[number]}
        choices = solved.solution.tables.choices(solved.solution.picked)
        for name in chosen:
            choice = choices.get(name, {})
            if data in choice and self.times > 1:
                chosen[name][MB] = choice[data]
            if data in choice and pp_rank.data > 1:
                chosen[name][self.names[data]] = choice[data]
            if inner in choice and pp_rank.inner > 1:
                chosen[name][self.names[inner]] = choice[inner]
        return chosen

    def pp_rank(self, number: int) -> RankDevices:
        return self.trial.pp_ranks[self.trial.holders[number]]

    def mesh(self, number: int) -> Mesh:
        pp_rank = self.pp_rank(number)
        axes = tuple(Axis(name=self.names[axis.name], size=axis.size) for axis in pp_rank.mesh.axes)
        return Mesh(axes=axes, devices=pp_rank.devices)

    def recompute(self, number: int) -> tuple[str, ...]:
        solved, inside = self.solved[number], set(self.parts[number])
        paths = solved.solution.tables.recompute(solved.solution.picked)
        under = self.analysis.graph.under
        return tuple(path for path in paths if any(op.name in inside for op in under[path]))

    def chunked_loss(self, number: int) -> dict[str, int]:
        chunked = self.solved[number].solution.tables.skeleton.kinds.chunked
        own = {name: chunks for name, chunks in chunked.items() if name in self.parts[number]}
        return resolved_chunks(self.analysis, own, self.choices(number), timed(self.mesh(number), self.times))

    @cached_property
    def storage(self) -> dict[str, Storage]:
        """How parameters are stored; those of several stages as in the first."""
        storage: dict[str, Storage] = {}
        for number, solved in enumerate(self.solved):
            tables, states = solved.solution.tables, solved.solution.picked
            for parameter in self.staged.graphs[number].parameters:
                if parameter.key in tables.skeleton.storage_options and parameter.key not in storage:
                    storage[parameter.key] = tables.home(parameter.key, states)[1].renamed(self.names)
        return storage

    def plan(self, cluster: Cluster, notes: Sequence[str] = ()) -> Plan:
        """The plan, without its prediction."""
        graph, trial = self.analysis.graph, self.trial
        builder = PlanBuilder(graph, Mesh(axes=()), self.analysis)
        base = builder.finish("auto", str(cluster), settle=False)
        every = {parameter.key: self.storage.get(parameter.key, Replicated()) for parameter in graph.parameters}
        return replace(
            base,
            entries={graph.entry: self._planned_stages(cluster)},
            storage=every if any(stored.axes for stored in every.values()) else {},
            microbatches=trial.microbatches,
            schedule=trial.schedule.name,
            local=self.local,
            notes=tuple(dict.fromkeys((*base.notes, *notes))),
        )

    # -- memory ----------------------------------------------------------------------------

    def memory(self, cluster: Cluster, training: TrainingSetup) -> tuple[MemoryPeak, ...]:
        """The memory peak of a device of each pipeline rank."""
        trial = self.trial
        programs = enumerate(self._programs(cluster))
        simulated = [self._simulate(number, program, cluster, training) for number, program in programs]
        pp_ranks = len(trial.pp_ranks)
        schedule = trial.schedule.steady(pp_ranks, trial.microbatches)
        return tuple(rank_memory(schedule, pp_rank, simulated, training) for pp_rank in range(pp_ranks))

    @cached_property
    def stages(self) -> tuple[PlanStage, ...]:
        return tuple(
            PlanStage(
                mesh=self.mesh(number),
                choices=self.choices(number),
                recompute=self.recompute(number),
                chunked_loss=self.chunked_loss(number),
            )
            for number in range(len(self.solved))
        )

    def _programs(self, cluster: Cluster) -> list[LoweredProgram]:
        meshes = [timed(replace(stage.mesh, devices=()), self.times) for stage in self.stages]
        placed = place_stages(self.analysis, self.staged, self.stages, meshes, self.storage, cluster)
        return [transform(placer) for placer in placed.placers]

    def _planned_stages(self, cluster: Cluster) -> tuple[PlanStage, ...]:
        """The stages, without the chunks of losses whose logits are resharded before them."""
        if not any(stage.chunked_loss for stage in self.stages):
            return self.stages
        programs = self._programs(cluster)
        return tuple(
            replace(stage, chunked_loss=joined_losses(program))
            for stage, program in zip(self.stages, programs, strict=True)
        )

    def _simulate(self, number: int, program: LoweredProgram, cluster: Cluster, training: TrainingSetup) -> StageMemory:
        traits = backend_traits(cluster.device(self.pp_rank(number).devices[0]).name, cluster.nodes)
        return simulate_stage_memory(program, training, traits, queued=self.solved[number].stage.queued)


def layers_of_part(names: Sequence[str]) -> list[str]:
    """The modules of some ops, down to the items of lists: "blocks.3"."""
    layers: dict[str, None] = {}
    for name in names:
        path = name.partition(" / ")[0]
        parts = path.split(".")
        numbered = next((at for at, part in enumerate(parts) if part.split("@")[0].isdigit()), None)
        layers.setdefault(".".join(parts[: numbered + 1]) if numbered is not None else path)
    return [path for path in layers if not any(path != other and is_inside(path, other) for other in layers)]

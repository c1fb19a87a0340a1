"""The plan of a pipeline whose segments were solved, and the memory of each pipeline rank by simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ...cluster import Cluster
from ...cost import TrainingSetup, backend_traits
from ...ir.paths import is_inside
from ...layout import MB, Axis, Mesh
from ...lower import Placer, transform
from ...memory import MemoryPeak, StageMemory, rank_memory, simulate_stage_memory
from ...rules import Analysis, Choices
from ...storage import Replicated, Storage
from ..builder import PlanBuilder
from ..lowering import place_stages
from ..meshes import axis_names
from ..pipeline import timed
from ..plan import Plan, PlanStage
from ..stages import OpSequence, StagedGraph, split_graph
from .ranks import RankDevices
from .refine import SolvedStage
from .trial import PipelineTrial


@dataclass(frozen=True, kw_only=True)
class SolvedPipeline:
    """A trial with its segments solved."""

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
        """The ops of each segment."""
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
        """The choice of each op of a segment on its axes, including the microbatch axis."""
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

    @cached_property
    def storage(self) -> dict[str, Storage]:
        """How parameters are stored; those of several segments as in the first."""
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
            entries={graph.entry: self.stages},
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
        meshes = [timed(replace(stage.mesh, devices=()), self.times) for stage in self.stages]
        placers = place_stages(self.analysis, self.staged, self.stages, meshes, self.storage, cluster).placers
        walked = [self._simulate(number, placer, cluster, training) for number, placer in enumerate(placers)]
        pp_ranks = len(trial.pp_ranks)
        schedule = trial.schedule.steady(pp_ranks, trial.microbatches)
        return tuple(rank_memory(schedule, pp_rank, walked, training) for pp_rank in range(pp_ranks))

    @cached_property
    def stages(self) -> tuple[PlanStage, ...]:
        return tuple(
            PlanStage(mesh=self.mesh(number), choices=self.choices(number), recompute=self.recompute(number))
            for number in range(len(self.solved))
        )

    def _simulate(self, number: int, placer: Placer, cluster: Cluster, training: TrainingSetup) -> StageMemory:
        traits = backend_traits(cluster.device(self.pp_rank(number).devices[0]).name, cluster.nodes)
        return simulate_stage_memory(transform(placer), training, traits, queued=self.solved[number].stage.queued)


def layers_of_part(names: Sequence[str]) -> list[str]:
    """The modules of some ops, down to the items of lists: "blocks.3"."""
    layers: dict[str, None] = {}
    for name in names:
        path = name.partition(" / ")[0]
        parts = path.split(".")
        numbered = next((at for at, part in enumerate(parts) if part.split("@")[0].isdigit()), None)
        layers.setdefault(".".join(parts[: numbered + 1]) if numbered is not None else path)
    return [path for path in layers if not any(path != other and is_inside(path, other) for other in layers)]

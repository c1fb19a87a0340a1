"""The programs of a plan: one for each of its stages, and how values go between them and out.

A value that crosses has no pending sum on either side (it is sharded or replicated on each axis of their meshes), so
that it can be sent in shards, and its gradient back. If the meshes are equal, it is sent as it is received.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..cluster import Cluster
from ..cost.reshard_prices import prices_of
from ..errors import LoweringError
from ..ir import Graph
from ..ir.paths import word_of
from ..layout import MB, Block, Layout, Mesh, Partial, Shard, make_layout, replicated
from ..lower import LoweredProgram, PlacementTask, Placer, run
from ..lower.place import in_time
from ..rules import Analysis, analyse
from ..storage import Storage
from .pipeline import microbatches_of, schedule_of, timed
from .plan import Plan, PlanStage
from .stages import OpSequence, StagedGraph, StageValue, split_graph

ParameterLayouts = Mapping[str, Layout]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTransfer:
    """A value that goes from a stage to a later one, and its gradient back. Shapes are those of a microbatch."""

    value: str
    sender: int
    receiver: int
    shape: tuple[int, ...]
    dtype: str
    gradient: bool
    sent: Layout
    received: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOutput:
    """An output of the model, and how it is made of what the microbatches give."""

    value: str
    stage: int
    path: str
    how: Literal["sum", "cat", "same", "mean"]
    shape: tuple[int, ...]
    dtype: str
    gradient: bool
    dim: int = 0
    shard: Shard | None = None


@dataclass(frozen=True, kw_only=True)
class PipelinePrograms:
    """The programs of all stages of one entry."""

    plan: Plan
    graph: Graph
    microbatches: int
    programs: tuple[LoweredProgram, ...]
    passages: tuple[StageTransfer, ...]
    exits: tuple[ModelOutput, ...]

    @property
    def edges(self) -> frozenset[tuple[int, int]]:
        return frozenset((transfer.sender, transfer.receiver) for transfer in self.passages)


def lower(
    graph: Graph,
    plan: Plan,
    analysis: Analysis | None = None,
    *,
    storage_options: ParameterLayouts | None = None,
    mode: str = "global",
    show: Callable[[str, LoweredProgram], None] | None = None,
) -> LoweredProgram:
    """The program for a graph under a plan of one stage. `storage_options` fixes how parameters are stored (later
    entries)."""
    plan.check_against(graph)
    (stage,) = plan.entries[graph.entry]
    task = PlacementTask(
        graph=graph,
        analysis=analysis or analyse(graph),
        mesh=stage.mesh,
        choices=stage.choices,
        recompute=stage.recompute,
        chunked=stage.chunked_loss,
        storage=plan.storage,
        storage_options=storage_options or {},
        mode=mode,
        plan_name=plan.name,
        plan_policy=plan.policy,
        prices=prices_of(stage.mesh, plan.made_for),
    )
    return run(Placer(task), show)


def lower_pipeline(
    graph: Graph,
    plan: Plan,
    analysis: Analysis,
    *,
    storage_options: Sequence[ParameterLayouts] = (),
    mode: str = "global",
) -> PipelinePrograms:
    """The programs of a plan's stages. `storage_options` fixes the layouts of parameters (later entries)."""
    plan.check_against(graph)
    stages = plan.entries[graph.entry]
    staged = split_graph(OpSequence(analysis), [tuple(stage.choices) for stage in stages])
    count = microbatches_of(plan, graph)
    meshes = [timed(stage.mesh, 1 if plan.local else count, inside=mode == "per_replica") for stage in stages]
    placed = place_stages(
        analysis,
        staged,
        stages,
        meshes,
        plan.storage,
        plan.made_for,
        storage_options=storage_options,
        mode=mode,
        plan_name=plan.name,
        plan_policy=plan.policy,
        puts_off=graph.entry.startswith("train") and schedule_of(plan).splits_weights,
        header=(f"schedule   {plan.schedule}",),
    )
    programs = tuple(run(placer) for placer in placed.placers)
    passages = tuple(_passage(graph, crossing, placed, meshes) for crossing in staged.crossings)
    exits = tuple(_exits(graph, count if plan.local else 0, programs, staged.outputs))
    return PipelinePrograms(
        plan=plan, graph=graph, microbatches=count, programs=programs, passages=passages, exits=exits
    )


@dataclass(frozen=True, kw_only=True)
class PlacedStages:
    """A placer for each stage, and the layouts of values between them, as they are sent and as they are received."""

    placers: tuple[Placer, ...]
    sent: Mapping[str, Layout]
    received: Mapping[tuple[str, int], Layout]


def place_stages(
    analysis: Analysis,
    staged: StagedGraph,
    stages: Sequence[PlanStage],
    meshes: Sequence[Mesh],
    storage: Mapping[str, Storage],
    cluster: Cluster | None,
    *,
    storage_options: Sequence[ParameterLayouts] = (),
    header: tuple[str, ...] = (),
    **options: Any,
) -> PlacedStages:
    """The placers of all stages, the last one first: what a stage wants decides how the one before it gives.

    meshes    with the axis in time
    cluster   by whose prices reshards are chosen; None: by bytes
    options   of every `PlacementTask`
    """
    graph = analysis.graph
    received: dict[tuple[str, int], Layout] = {}
    settled: dict[Mesh, dict[str, Layout]] = {}  # parameters that several stages of a mesh read
    sent: dict[str, Layout] = {}
    placers: list[Placer] = []
    for number in reversed(range(len(stages))):
        task = PlacementTask(
            graph=staged.graphs[number],
            analysis=analysis,
            mesh=meshes[number],
            choices=_with_others(stages, number, staged.graphs[number]),
            recompute=stages[number].recompute,
            chunked=stages[number].chunked_loss,
            storage=storage,
            storage_options=storage_options[number] if storage_options else settled.get(stages[number].mesh, {}),
            entering={
                crossing.value: _time_of(analysis, stages, crossing, meshes)
                for crossing in staged.crossings
                if crossing.receiver == number
            },
            leaving=_wanted(graph, analysis, stages, meshes, number, staged.crossings, received),
            title=f"stage {number} of {len(stages)}" if len(stages) > 1 else "",
            header=(*header, *_header(number, staged.crossings)),
            stepped=True,
            prices=prices_of(meshes[number], cluster, stages[number].mesh),
            **options,
        )
        placer = Placer(task)
        placers.insert(0, placer)
        received |= {(value, number): placer.taken_as(value) for value in task.entering}
        sent |= {value: placer.given_as(value) for value in task.leaving}
        settled[stages[number].mesh] = settled.get(stages[number].mesh, {}) | placer.parameter_layouts()
    return PlacedStages(placers=tuple(placers), sent=sent, received=received)


def _header(number: int, crossings: Sequence[StageValue]) -> Iterator[str]:
    """Lines for the head of a file: the values received and sent."""
    for crossing in crossings:
        if crossing.receiver == number:
            yield f"receives   {word_of(crossing.value)} from stage {crossing.sender}"
    for crossing in crossings:
        if crossing.sender == number:
            yield f"sends      {word_of(crossing.value)} to stage {crossing.receiver}"


def _with_others(stages: Sequence[PlanStage], number: int, graph: Graph) -> dict[str, Mapping[str, str]]:
    """The choices of a stage's ops; those that it runs beside their own stage do as there, as far as axes go."""
    own, axes = stages[number].choices, {*stages[number].mesh.names, MB}
    others = {name: choice for stage in stages for name, choice in stage.choices.items()}
    return {
        op.name: own[op.name] if op.name in own else {a: r for a, r in others[op.name].items() if a in axes}
        for op in graph.ops
    }


def _produced(
    analysis: Analysis, stages: Sequence[PlanStage], value: str, number: int, meshes: Sequence[Mesh]
) -> Layout:
    maker = analysis.graph.producer[value]
    _, outputs = analysis.signatures[maker.name].layouts(stages[number].choices[maker.name], meshes[number])
    return outputs[maker.outputs.index(value)]


def _time_of(analysis: Analysis, stages: Sequence[PlanStage], crossing: StageValue, meshes: Sequence[Mesh]) -> Layout:
    """The layout of a value that crosses, over microbatches."""
    produced = _produced(analysis, stages, crossing.value, crossing.sender, meshes)
    shards = [tuple(shard for shard in shards if shard.axis == MB) for shards in produced.shards]
    return make_layout(shards, {name: placement for name, placement in produced.rest if name == MB})


def _wanted(
    graph: Graph,
    analysis: Analysis,
    stages: Sequence[PlanStage],
    meshes: Sequence[Mesh],
    number: int,
    crossings: Sequence[StageValue],
    received: Mapping[tuple[str, int], Layout],
) -> dict[str, Layout | None]:
    """How the values that leave a stage are to be given: as the first receiver has them, if its mesh is like this."""
    outputs = {output.value for output in graph.outputs}
    wanted: dict[str, Layout | None] = {}
    for crossing in crossings:
        if crossing.sender != number or crossing.value in wanted:
            continue
        if crossing.value in outputs:  # the model returns it replicated
            produced = _produced(analysis, stages, crossing.value, number, meshes)
            wanted[crossing.value] = in_time(replicated(len(produced.shards)), produced, meshes[number].sizes)
        else:
            alike = meshes[crossing.receiver].axes == meshes[number].axes
            wanted[crossing.value] = received[crossing.value, crossing.receiver] if alike else None
    return wanted


def _passage(
    graph: Graph,
    crossing: StageValue,
    placed: PlacedStages,
    meshes: Sequence[Mesh],
) -> StageTransfer:
    value = graph.values[crossing.value]
    sides = (
        (placed.sent[crossing.value], meshes[crossing.sender]),
        (placed.received[crossing.value, crossing.receiver], meshes[crossing.receiver]),
    )
    (shape, a), (_, b) = (_one_microbatch(layout, value.shape, mesh) for layout, mesh in sides)
    return StageTransfer(
        value=crossing.value,
        sender=crossing.sender,
        receiver=crossing.receiver,
        shape=shape,
        dtype=value.dtype,
        gradient=value.gradient,
        sent=a,
        received=b,
    )


def _one_microbatch(layout: Layout, shape: Sequence[int], mesh: Mesh) -> tuple[tuple[int, ...], Layout]:
    """The shape of a microbatch of a value, and its layout on the axes that are devices."""
    rest = {name: placement for name, placement in layout.rest if name != MB}
    split = layout.shard_of(MB)
    if split is None:
        return tuple(shape), make_layout(layout.shards, rest)
    dim, time = split
    parts = mesh.sizes[MB]
    small = tuple(size // parts if at == dim else size for at, size in enumerate(shape))
    shards = [[shard for shard in dim_shards if shard.axis != MB] for dim_shards in layout.shards]
    if layout.shards[dim][0] != time:  # microbatches of each group's samples
        shards[dim] = [_shrunk(shard, parts) for shard in shards[dim]]
    return small, make_layout(shards, rest)


def _shrunk(shard: Shard, parts: int) -> Shard:
    (block,) = shard.blocks
    if block.outer != 1 or block.inner % parts:
        raise LoweringError(f"microbatches of samples that {shard.axis} shards as {shard} can't be sent")
    return Shard(axis=shard.axis, blocks=(Block(1, block.size, block.inner // parts),))


def _exits(
    graph: Graph, apart: int, programs: Sequence[LoweredProgram], storage_options: Sequence[int]
) -> list[ModelOutput]:
    """How outputs leave. `apart`: the number of microbatches that are batches of their own, else 0."""
    exits = []
    for output, number in zip(graph.outputs, storage_options, strict=True):
        if output.value is None:
            continue
        program, value = programs[number], graph.values[output.value]
        at = next(i for i, candidate in enumerate(program.graph.outputs) if candidate.value == output.value)
        name = program.outputs[at]
        assert name is not None
        layout, shape = program.layouts[name], value.shape
        time, dim, shard = layout.shard_of(MB), 0, None
        how: Literal["sum", "cat", "same", "mean"] = "same"
        if apart:
            batched = bool(shape) and shape[0] == graph.batch
            how = "cat" if batched else "mean" if value.floating and not shape else "same"
            shape = (shape[0] * apart, *shape[1:]) if batched else shape
        elif time is not None:
            how, (dim, shard) = "cat", time
        elif isinstance(layout.placement(MB), Partial):
            how = "sum"
        exits.append(
            ModelOutput(
                value=output.value,
                stage=number,
                path=output.path,
                how=how,
                shape=shape,
                dtype=value.dtype,
                gradient=value.gradient,
                dim=dim,
                shard=shard,
            )
        )
    return exits

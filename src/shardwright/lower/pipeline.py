"""Lowering of a plan with a schedule: a program for each segment, and how values go between them and out.

A value that crosses has no pending sum on either side (it is sharded or replicated on each axis of their meshes), so
that it can be sent in shards, and its gradient back. If the meshes are equal, it is sent as it is received.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..cost.reshard_prices import prices_of
from ..errors import LoweringError
from ..ir import Graph
from ..layout import Block, Layout, Mesh, Partial, Shard, make_layout, replicated
from ..plan import Plan, PlanStage
from ..plan.pipeline import MB, microbatches_of, schedule_of, timed
from ..plan.stages import OpSequence, StageValue, split_graph
from ..rules import Analysis
from .passes import run
from .place import PlacementTask, Placer, in_time
from .program import LoweredProgram

ParameterLayouts = Mapping[str, Layout]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTransfer:
    """A value that goes from a segment to a later one, and its gradient back. Shapes are those of a microbatch."""

    value: str
    giver: int
    taker: int
    shape: tuple[int, ...]
    dtype: str
    gradient: bool
    sent: Layout
    received: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOutput:
    """An output of the model, and how it is made of what the microbatches give."""

    value: str
    segment: int
    path: str
    how: Literal["sum", "cat", "same", "mean"]
    shape: tuple[int, ...]
    dtype: str
    gradient: bool
    dim: int = 0
    shard: Shard | None = None


@dataclass(frozen=True, kw_only=True)
class PipelinePrograms:
    """The programs of all segments of one entry."""

    plan: Plan
    graph: Graph
    microbatches: int
    programs: tuple[LoweredProgram, ...]
    passages: tuple[StageTransfer, ...]
    exits: tuple[ModelOutput, ...]

    @property
    def edges(self) -> frozenset[tuple[int, int]]:
        return frozenset((transfer.giver, transfer.taker) for transfer in self.passages)


def lower_pipeline(
    graph: Graph,
    plan: Plan,
    analysis: Analysis,
    *,
    storage_options: Sequence[ParameterLayouts] = (),
    mode: str = "global",
) -> PipelinePrograms:
    """The programs of a plan's segments. `storage_options` fixes the layouts of parameters (later entries)."""
    plan.check_against(graph)
    segments = plan.entries[graph.entry]
    shard = split_graph(OpSequence(analysis), [tuple(segment.choices) for segment in segments])
    puts_off = graph.entry.startswith("train") and schedule_of(plan).splits_weights
    count = microbatches_of(plan, graph)
    meshes = [timed(segment.mesh, 1 if plan.local else count, inside=mode == "per_replica") for segment in segments]
    received: dict[tuple[str, int], Layout] = {}
    settled: dict[Mesh, dict[str, Layout]] = {}  # parameters that several segments of a mesh read
    programs: dict[int, LoweredProgram] = {}
    sent: dict[str, Layout] = {}
    for number in reversed(range(len(segments))):
        task = PlacementTask(
            graph=shard.graphs[number],
            analysis=analysis,
            mesh=meshes[number],
            choices=_with_others(segments, number, shard.graphs[number]),
            recompute=segments[number].recompute,
            storage=plan.storage,
            storage_options=storage_options[number] if storage_options else settled.get(segments[number].mesh, {}),
            mode=mode,
            entering={
                crossing.value: _time_of(analysis, segments, crossing, meshes)
                for crossing in shard.crossings
                if crossing.taker == number
            },
            leaving=_wanted(graph, analysis, segments, meshes, number, shard.crossings, received),
            plan_name=plan.name,
            plan_policy=plan.policy,
            title=f"segment {number} of {len(segments)}" if len(segments) > 1 else "",
            header=tuple(_header(plan, number, shard.crossings)),
            stepped=True,
            puts_off=puts_off,
            prices=prices_of(meshes[number], plan.made_for, segments[number].mesh),
        )
        placer = Placer(task)
        received |= {(value, number): placer.taken_as(value) for value in task.entering}
        sent |= {value: placer.given_as(value) for value in task.leaving}
        programs[number] = run(placer)
        layouts = {stored.name: stored.layout for stored in programs[number].parameters}
        settled[segments[number].mesh] = settled.get(segments[number].mesh, {}) | layouts
    passages = tuple(_passage(graph, crossing, sent, received, meshes) for crossing in shard.crossings)
    ordered = tuple(programs[number] for number in range(len(segments)))
    exits = tuple(_exits(graph, count if plan.local else 0, ordered, shard.outputs))
    return PipelinePrograms(
        plan=plan, graph=graph, microbatches=count, programs=ordered, passages=passages, exits=exits
    )


def _header(plan: Plan, number: int, crossings: Sequence[StageValue]) -> Iterator[str]:
    """Lines for the head of a file: the schedule, and the values received and sent."""
    yield f"schedule   {plan.schedule}"
    for crossing in crossings:
        if crossing.taker == number:
            yield f"takes      {crossing.value} from segment {crossing.giver}"
    for crossing in crossings:
        if crossing.giver == number:
            yield f"gives      {crossing.value} to segment {crossing.taker}"


def _with_others(segments: Sequence[PlanStage], number: int, graph: Graph) -> dict[str, Mapping[str, str]]:
    """The choices of a segment's ops; those that it runs beside their own segment do as there, as far as axes go."""
    own, axes = segments[number].choices, {*segments[number].mesh.names, MB}
    others = {name: choice for segment in segments for name, choice in segment.choices.items()}
    return {
        op.name: own[op.name] if op.name in own else {a: r for a, r in others[op.name].items() if a in axes}
        for op in graph.ops
    }


def _produced(
    analysis: Analysis, segments: Sequence[PlanStage], value: str, number: int, meshes: Sequence[Mesh]
) -> Layout:
    maker = analysis.graph.producer[value]
    _, outputs = analysis.signatures[maker.name].layouts(segments[number].choices[maker.name], meshes[number])
    return outputs[maker.outputs.index(value)]


def _time_of(analysis: Analysis, segments: Sequence[PlanStage], crossing: StageValue, meshes: Sequence[Mesh]) -> Layout:
    """The layout of a value that crosses, over microbatches."""
    produced = _produced(analysis, segments, crossing.value, crossing.giver, meshes)
    shards = [tuple(shard for shard in shards if shard.axis == MB) for shards in produced.shards]
    return make_layout(shards, {name: placement for name, placement in produced.rest if name == MB})


def _wanted(
    graph: Graph,
    analysis: Analysis,
    segments: Sequence[PlanStage],
    meshes: Sequence[Mesh],
    number: int,
    crossings: Sequence[StageValue],
    received: Mapping[tuple[str, int], Layout],
) -> dict[str, Layout | None]:
    """How the values that leave a segment are to be given: as the first taker has them, if its mesh is like this."""
    outputs = {output.value for output in graph.outputs}
    wanted: dict[str, Layout | None] = {}
    for crossing in crossings:
        if crossing.giver != number or crossing.value in wanted:
            continue
        if crossing.value in outputs:  # the model returns it replicated
            produced = _produced(analysis, segments, crossing.value, number, meshes)
            wanted[crossing.value] = in_time(replicated(len(produced.shards)), produced, meshes[number].sizes)
        else:
            alike = meshes[crossing.taker].axes == meshes[number].axes
            wanted[crossing.value] = received[crossing.value, crossing.taker] if alike else None
    return wanted


def _passage(
    graph: Graph,
    crossing: StageValue,
    sent: Mapping[str, Layout],
    received: Mapping[tuple[str, int], Layout],
    meshes: Sequence[Mesh],
) -> StageTransfer:
    value = graph.values[crossing.value]
    sides = (
        (sent[crossing.value], meshes[crossing.giver]),
        (received[crossing.value, crossing.taker], meshes[crossing.taker]),
    )
    (shape, a), (_, b) = (_one_microbatch(layout, value.shape, mesh) for layout, mesh in sides)
    return StageTransfer(
        value=crossing.value,
        giver=crossing.giver,
        taker=crossing.taker,
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
    if layout.shards[dim][0] != time:  # microbatches of each group's rows
        shards[dim] = [_shrunk(shard, parts) for shard in shards[dim]]
    return small, make_layout(shards, rest)


def _shrunk(shard: Shard, parts: int) -> Shard:
    (block,) = shard.blocks
    if block.outer != 1 or block.inner % parts:
        raise LoweringError(f"microbatches of rows that {shard.axis} cuts as {shard} can't be sent")
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
                segment=number,
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

"""Lowering of a plan with a schedule: a program for each segment, and how values go between them and out.

Where a value goes to another segment both sides have it settled (cut or whole on each axis of their mesh), so that it
can be sent in pieces, and its gradient back. If the meshes are alike, it is given as it is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

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

Homes = Mapping[str, Layout]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTransfer:
    """A value that goes from a segment to a later one, and its gradient back. Shapes are those of a microbatch."""

    value: str
    giver: int
    taker: int
    shape: tuple[int, ...]
    dtype: str
    gradient: bool
    given: Layout
    taken: Layout


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
        return frozenset((held.giver, held.taker) for held in self.passages)


def lower_pipeline(
    graph: Graph, plan: Plan, analysis: Analysis, *, storage_options: Sequence[Homes] = (), mode: str = "global"
) -> PipelinePrograms:
    """The programs of a plan's segments. `homes` fixes how each segment holds its parameters (later entries)."""
    plan.check_against(graph)
    segments = plan.entries[graph.entry]
    shard = split_graph(OpSequence(analysis), [tuple(segment.choices) for segment in segments])
    puts_off = graph.entry.startswith("train") and schedule_of(plan).splits_weights
    count = microbatches_of(plan, graph)
    meshes = [timed(segment.mesh, 1 if plan.local else count, inside=mode == "per_replica") for segment in segments]
    taken: dict[tuple[str, int], Layout] = {}
    settled: dict[Mesh, dict[str, Layout]] = {}  # parameters that several segments of a mesh read
    programs: dict[int, LoweredProgram] = {}
    given: dict[str, Layout] = {}
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
                held.value: _time_of(analysis, segments, held, meshes)
                for held in shard.crossings
                if held.taker == number
            },
            leaving=_wanted(graph, analysis, segments, meshes, number, shard.crossings, taken),
            plan_name=plan.name,
            plan_policy=plan.policy,
            title=f"segment {number} of {len(segments)}" if len(segments) > 1 else "",
            said=tuple(_said(plan, number, shard.crossings)),
            stepped=True,
            puts_off=puts_off,
        )
        placer = Placer(task)
        taken |= {(value, number): placer.taken_as(value) for value in task.entering}
        given |= {value: placer.given_as(value) for value in task.leaving}
        programs[number] = run(placer)
        homes_here = {held.key: held.layout for held in programs[number].parameters}
        settled[segments[number].mesh] = settled.get(segments[number].mesh, {}) | homes_here
    passages = tuple(_passage(graph, held, given, taken, meshes) for held in shard.crossings)
    ordered = tuple(programs[number] for number in range(len(segments)))
    exits = tuple(_exits(graph, count if plan.local else 0, ordered, shard.outputs))
    return PipelinePrograms(
        plan=plan, graph=graph, microbatches=count, programs=ordered, passages=passages, exits=exits
    )


def _said(plan: Plan, number: int, crossings: Sequence[StageValue]) -> Iterator[str]:
    """Lines for the head of a file: the schedule, and what comes and goes."""
    yield f"schedule   {plan.schedule}"
    for held in crossings:
        if held.taker == number:
            yield f"takes      {held.value} from segment {held.giver}"
    for held in crossings:
        if held.giver == number:
            yield f"gives      {held.value} to segment {held.taker}"


def _with_others(segments: Sequence[PlanStage], number: int, graph: Graph) -> dict[str, Mapping[str, str]]:
    """The choices of a segment's ops; those that it runs beside their own segment do as there, as far as axes go."""
    own, axes = segments[number].choices, {*segments[number].mesh.names, MB}
    others = {name: held for segment in segments for name, held in segment.choices.items()}
    return {
        op.name: own[op.name] if op.name in own else {a: r for a, r in others[op.name].items() if a in axes}
        for op in graph.ops
    }


def _made(analysis: Analysis, segments: Sequence[PlanStage], value: str, number: int, meshes: Sequence[Mesh]) -> Layout:
    maker = analysis.graph.producer[value]
    _, outputs = analysis.signatures[maker.name].layouts(segments[number].choices[maker.name], meshes[number])
    return outputs[maker.outputs.index(value)]


def _time_of(analysis: Analysis, segments: Sequence[PlanStage], held: StageValue, meshes: Sequence[Mesh]) -> Layout:
    """How a value that crosses lies in time."""
    made = _made(analysis, segments, held.value, held.giver, meshes)
    shards = [tuple(shard for shard in shards if shard.axis == MB) for shards in made.shards]
    return make_layout(shards, {name: placement for name, placement in made.rest if name == MB})


def _wanted(
    graph: Graph,
    analysis: Analysis,
    segments: Sequence[PlanStage],
    meshes: Sequence[Mesh],
    number: int,
    crossings: Sequence[StageValue],
    taken: Mapping[tuple[str, int], Layout],
) -> dict[str, Layout | None]:
    """How the values that leave a segment are to be given: as the first taker has them, if its mesh is like this."""
    outputs = {output.value for output in graph.outputs}
    found: dict[str, Layout | None] = {}
    for held in crossings:
        if held.giver != number or held.value in found:
            continue
        if held.value in outputs:  # the model gives it whole
            made = _made(analysis, segments, held.value, number, meshes)
            found[held.value] = in_time(replicated(len(made.shards)), made, meshes[number].sizes)
        else:
            alike = meshes[held.taker].axes == meshes[number].axes
            found[held.value] = taken[held.value, held.taker] if alike else None
    return found


def _passage(
    graph: Graph,
    held: StageValue,
    given: Mapping[str, Layout],
    taken: Mapping[tuple[str, int], Layout],
    meshes: Sequence[Mesh],
) -> StageTransfer:
    value = graph.values[held.value]
    sides = (given[held.value], meshes[held.giver]), (taken[held.value, held.taker], meshes[held.taker])
    (shape, a), (_, b) = (_one_microbatch(layout, value.shape, mesh) for layout, mesh in sides)
    return StageTransfer(
        value=held.value,
        giver=held.giver,
        taker=held.taker,
        shape=shape,
        dtype=value.dtype,
        gradient=value.gradient,
        given=a,
        taken=b,
    )


def _one_microbatch(layout: Layout, shape: Sequence[int], mesh: Mesh) -> tuple[tuple[int, ...], Layout]:
    """The shape of a microbatch of a value, and its layout on the axes that are devices."""
    rest = {name: placement for name, placement in layout.rest if name != MB}
    found = layout.shard_of(MB)
    if found is None:
        return tuple(shape), make_layout(layout.shards, rest)
    dim, time = found
    parts = mesh.sizes[MB]
    small = tuple(size // parts if at == dim else size for at, size in enumerate(shape))
    shards = [[shard for shard in held if shard.axis != MB] for held in layout.shards]
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
    found = []
    for output, number in zip(graph.outputs, storage_options, strict=True):
        if output.value is None:
            continue
        program, value = programs[number], graph.values[output.value]
        at = next(i for i, held in enumerate(program.graph.outputs) if held.value == output.value)
        name = program.outputs[at]
        assert name is not None
        layout, shape = program.layouts[name], value.shape
        time, dim, shard = layout.shard_of(MB), 0, None
        how: Literal["sum", "cat", "same", "mean"] = "same"
        if apart:
            rows = bool(shape) and shape[0] == graph.batch
            how = "cat" if rows else "mean" if value.floating and not shape else "same"
            shape = (shape[0] * apart, *shape[1:]) if rows else shape
        elif time is not None:
            how, (dim, shard) = "cat", time
        elif isinstance(layout.placement(MB), Partial):
            how = "sum"
        found.append(
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
    return found

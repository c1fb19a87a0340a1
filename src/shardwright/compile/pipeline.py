"""The programs of a pipeline as what runs: each stage in its place, what goes between them, and the schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from ..capture import CapturedGraph
from ..ir import Graph
from ..plan.lowering import ModelOutput, PipelinePrograms, StageTransfer
from ..plan.pipeline import schedule_of
from ..runtime.model.program import Program
from ..runtime.model.specialization import RankState
from ..runtime.pipeline import PipelineOutput, PipelineSpec, PlacedStage, StageCrossing
from ..runtime.world import Moment, World
from ..schedule import check, with_prologue
from .files import Generated

MakeStage = Callable[[Generated, Moment], Program]


def assemble(
    lowered: PipelinePrograms,
    generated: Sequence[Generated],
    captured: CapturedGraph,
    holding: RankState,
    world: World,
    make_stage: MakeStage,
) -> PipelineSpec:
    """What a rank runs of a pipeline. `make_stage` gives the stage of a stage that this rank is in."""
    plan = lowered.plan
    moment = Moment(lowered.microbatches)
    numbers = {value.value: number for number, value in enumerate(captured.graph.inputs)}
    placed = tuple(
        _placed(number, lowered, file, numbers, holding, world, lambda file=file: make_stage(file, moment))  # type: ignore[misc]
        for number, file in enumerate(generated)
    )
    early = [number for number, file in enumerate(generated) if file.program.early]
    schedules = [schedule_of(plan, lowered.microbatches, training=training) for training in (True, False)]
    training, forward = (with_prologue(schedule, early) for schedule in schedules)
    for schedule in (training, forward):
        check(schedule, lowered.edges)
    leaving = tuple(_leaving(output) for output in lowered.exits)
    behind = [_behind(captured.graph, out.value) for out in leaving]
    return PipelineSpec(
        placed=placed,
        crossings=tuple(_crossing(transfer, behind) for transfer in lowered.passages),
        leaving=leaving,
        schedule=training,
        forward=forward,
        moment=moment,
        buffers=holding.buffers,
        local=plan.local,
        rows=_batched(captured) if plan.local and lowered.microbatches > 1 else (),
    )


def _batched(captured: CapturedGraph) -> tuple[bool, ...]:
    """Which inputs have samples in dim 0."""
    graph = captured.graph
    return tuple(graph.is_batched(value) for value in graph.inputs)


def _placed(
    number: int,
    lowered: PipelinePrograms,
    file: Generated,
    numbers: Mapping[str, int],
    holding: RankState,
    world: World,
    make: Callable[[], Program],
) -> PlacedStage:
    program, mesh = file.program, lowered.plan.entries[lowered.graph.entry][number].mesh
    here = world.rank in mesh.devices
    names = {parameter.value: parameter.keys for parameter in program.parameters}
    # What nobody reads in this call may lie on another device: the first call decided that.
    own = [keys for keys in names.values() if here and keys[0] in holding.parameters]
    parameters = {key: holding.parameters[keys[0]] for keys in own for key in keys}
    return PlacedStage(
        number=number,
        mesh=mesh,
        takes=tuple(numbers.get(value.value, value.value) for value in program.graph.inputs),
        gives=tuple(value.value for value in program.graph.outputs if value.value is not None),
        asks=tuple(numbers[value.value] for value in program.prologue_inputs),
        updates=tuple(key for key, _ in program.updates),
        stage=make() if here else None,
        parameters=parameters,
    )


def _behind(graph: Graph, value: str) -> set[str]:
    """The values on which one depends by what has a gradient."""
    reached: set[str] = set()
    todo = [value]
    while todo:
        name = todo.pop()
        if name not in reached and graph.values[name].gradient:
            reached.add(name)
            maker = graph.producer.get(name)
            todo += () if maker is None else maker.inputs
    return reached


def _crossing(transfer: StageTransfer, behind: Sequence[set[str]]) -> StageCrossing:
    return StageCrossing(
        value=transfer.value,
        sender=transfer.sender,
        receiver=transfer.receiver,
        shape=transfer.shape,
        dtype=getattr(torch, transfer.dtype),
        gradient=transfer.gradient,
        source_layout=transfer.sent,
        target_layout=transfer.received,
        outputs=frozenset(at for at, names in enumerate(behind) if transfer.value in names),
    )


def _leaving(output: ModelOutput) -> PipelineOutput:
    return PipelineOutput(
        value=output.value,
        stage=output.stage,
        how=output.how,
        shape=output.shape,
        dtype=getattr(torch, output.dtype),
        gradient=output.gradient,
        path=output.path,
        dim=output.dim,
        sharding=output.shard,
    )

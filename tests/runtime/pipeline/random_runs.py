"""Random pipelines of tiny stages under random schedules, each with the answer of one device.

A stage computes tanh(w * (x + what crosses to it)) on the rows of a microbatch. It lies on one to three ranks,
sharded or replicated. A value that no later stage reads leaves as a sum. Some values have no gradient.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch

from shardwright.layout import Axis, Mesh, contiguous_shard, make_layout, replicated
from shardwright.runtime.algorithms.random import Randomness
from shardwright.runtime.model.program import Program
from shardwright.runtime.pipeline import PipelineOutput, PipelineSpec, PlacedStage, StageCrossing
from shardwright.runtime.pipeline.executor import PipelineExecutor, ScheduleRun
from shardwright.runtime.pipeline.script import WHOLE_STEP, write
from shardwright.runtime.world import Moment
from shardwright.schedule import Schedule, StageEdge, Step

ROWS, WIDTH = 3, 2  # of a microbatch


@dataclass(frozen=True)
class Case:
    """A pipeline and a schedule of it."""

    schedule: Schedule
    sources: tuple[tuple[int, ...], ...]  # for each stage those that it reads
    sharding: tuple[bool, ...]  # whether a stage's ranks have different rows
    smooth: tuple[bool, ...]  # whether a stage's value has a gradient

    @property
    def edges(self):
        return [
            StageEdge(source, target, 0.0, 0.0 if self.smooth[source] else None)
            for target, result in enumerate(self.sources)
            for source in result
        ]

    @property
    def sinks(self):
        read = {source for result in self.sources for source in result}
        return [stage for stage in range(len(self.sources)) if stage not in read]


def random_case(seed: int) -> Case:
    chance = random.Random(seed)
    stages, microbatches, ranks = chance.randint(1, 5), chance.randint(1, 5), chance.randint(1, 4)
    sources = tuple(
        tuple(sorted(chance.sample(range(target), min(target, chance.randint(1, 2))))) for target in range(stages)
    )
    holders = tuple(
        tuple(sorted(chance.sample(range(ranks), min(ranks, chance.choice([1, 1, 2, 3]))))) for _ in sources
    )
    case = Case(
        schedule=Schedule(devices=((),) * ranks, holders=holders, microbatches=microbatches, name=f"seed {seed}"),
        sources=sources,
        sharding=tuple(chance.random() < 0.5 for _ in sources),
        smooth=tuple(chance.random() < 0.8 for _ in sources),
    )
    return replace(case, schedule=replace(case.schedule, devices=random_steps(case, chance)))


def random_steps(case: Case, chance: random.Random) -> tuple[tuple[Step, ...], ...]:
    """Some order in which every step comes after what it needs."""
    microbatches = range(case.schedule.microbatches)
    apart = {stage for stage in range(len(case.sources)) if chance.random() < 0.4}
    needs: dict[Step, set[Step]] = {}
    for stage, result in enumerate(case.sources):
        for at in microbatches:
            needs[Step("F", stage, at)] = {Step("F", source, at) for source in result}
            needs[Step("B", stage, at)] = {Step("F", stage, at)} | {
                Step("B", target, at)
                for target, read in enumerate(case.sources)
                if stage in read and case.smooth[stage]
            }
            if stage in apart:
                needs[Step("W", stage, at)] = {Step("B", stage, at)}
    rows: list[list[Step]] = [[] for _ in case.schedule.devices]
    eager = chance.choice([None, "F", "B"])
    while needs:
        free = sorted(step for step, wanted in needs.items() if not wanted)
        liked = [step for step in free if step.kind == eager] or free
        step = chance.choice(liked)
        del needs[step]
        for wanted in needs.values():
            wanted.discard(step)
        for device in case.schedule.holders[step.stage]:
            rows[device].append(step)
    return tuple(map(tuple, rows))


def mutated(case: Case, seed: int) -> Case:
    """The same with a few neighbours swapped: it may or may not run."""
    chance = random.Random(seed)
    rows = [list(row) for row in case.schedule.devices]
    for _ in range(chance.randint(1, 4)):
        row = chance.choice(rows)
        if len(row) > 1:
            at = chance.randrange(len(row) - 1)
            step, other = row[at], row[at + 1]
            together = [row for row in rows if step in row and other in row]
            for value in together if chance.random() < 0.7 else [row]:
                i, j = value.index(step), value.index(other)
                value[i], value[j] = value[j], value[i]
    return replace(case, schedule=replace(case.schedule, devices=tuple(map(tuple, rows))))


class Tiny(Program):
    def __init__(self, number, sources, sink, sharding, place, ranks, weight, moment):
        super().__init__(None, (), torch.device("cpu"), Randomness(), moment)
        self.number, self.sources, self.sink, self.weight = number, sources, sink, weight
        axis = Axis(name="d", size=ranks)
        self.rows = contiguous_shard(axis, ROWS).spans(ranks, place) if sharding else [(0, ROWS)]

    def local(self, x):
        start, length = self.rows[0] if self.rows else (0, 0)
        return x[self.mb.index * ROWS + start :][:length]

    def forward(self, x, *crossed):
        total = self.local(x)
        for value in crossed:
            total = total + value
        value = torch.tanh(self.weights.linear(total, self.weight))
        return (value, value.sum()) if self.sink else (value,)


def weights(case):
    return [torch.full((WIDTH, WIDTH), 0.1 * (number + 1), dtype=torch.float64) for number in range(len(case.sources))]


def batch(case):
    rows = ROWS * case.schedule.microbatches
    return torch.linspace(-1, 1, rows * WIDTH, dtype=torch.float64).view(rows, WIDTH)


def layout_of(case, stage, mesh):
    if not case.sharding[stage] or mesh.size == 1:
        return replicated(2)
    return make_layout([[contiguous_shard(mesh.axes[0], ROWS)], []])


def pipeline_of(case: Case, rank: int) -> tuple[PipelineSpec, dict[int, torch.Tensor]]:
    moment = Moment(case.schedule.microbatches)
    meshes = [Mesh(axes=(Axis(name="d", size=len(holder)),), devices=holder) for holder in case.schedule.holders]
    placed, leaves = [], {}
    for number, (mesh, meshe) in enumerate(zip(meshes, case.sources, strict=True)):
        stage = None
        sink = number in case.sinks
        if rank in mesh.devices:
            leaves[number] = weights(case)[number].requires_grad_()
            place = mesh.devices.index(rank)
            stage = Tiny(number, meshe, sink, case.sharding[number], place, mesh.size, leaves[number], moment)
        placed.append(
            PlacedStage(
                number=number,
                mesh=mesh,
                takes=(0, *(f"v{source}" for source in meshe)),
                gives=(f"v{number}", f"sum{number}") if sink else (f"v{number}",),
                stage=stage,
            )
        )
    crossings = tuple(
        StageCrossing(
            value=f"v{source}",
            sender=source,
            receiver=target,
            shape=(ROWS, WIDTH),
            dtype=torch.float64,
            gradient=case.smooth[source],
            source_layout=layout_of(case, source, meshes[source]),
            target_layout=layout_of(case, target, meshes[target]),
        )
        for target, result in enumerate(case.sources)
        for source in result
    )
    leaving = tuple(
        PipelineOutput(value=f"sum{sink}", stage=sink, how="sum", shape=(), dtype=torch.float64, gradient=True)
        for sink in case.sinks
    )
    pipeline = PipelineSpec(
        placed=tuple(placed),
        crossings=crossings,
        leaving=leaving,
        schedule=case.schedule,
        forward=case.schedule,
        moment=moment,
    )
    return pipeline, leaves


def run_rank(case: Case, rank: int, transport, apart=False) -> tuple[dict, dict]:
    """The sums and the weights' gradients that a rank has, by stage; `apart`: all forwards, then all backwards."""
    pipeline, leaves = pipeline_of(case, rank)
    executor = PipelineExecutor(pipeline, rank, transport, torch.device("cpu"))
    run = ScheduleRun((batch(case),), frozenset(range(len(case.sinks))))
    run.seed = lambda out, microbatch: torch.ones((), dtype=torch.float64)
    for kinds in ("PF", "BW") if apart else (WHOLE_STEP,):
        executor.run(write(pipeline, case.schedule, rank, kinds), run)
    assert not run.flights
    assert not run.parcels
    sums = {}
    for (value, _), tensor in run.outputs.items():
        number = int(value.removeprefix("sum"))
        sums[number] = sums.get(number, 0.0) + tensor.item()
    return sums, {number: leaf.grad for number, leaf in leaves.items()}


def on_one_device(case: Case) -> tuple[dict, dict]:
    leaves = [weight.requires_grad_() for weight in weights(case)]
    x, values = batch(case), []
    for weight, result in zip(leaves, case.sources, strict=True):
        crossed = [values[source] if case.smooth[source] else values[source].detach() for source in result]
        values.append(torch.tanh((x + sum(crossed)) @ weight.t()))
    sums = {sink: values[sink].sum() for sink in case.sinks}
    sum(sums.values()).backward()
    return {sink: total.item() for sink, total in sums.items()}, {at: leaf.grad for at, leaf in enumerate(leaves)}


def compare(case: Case, results: list[tuple[dict, dict]]) -> None:
    """Results of sharding stages add up, those of whole ones are the same everywhere."""
    sums, gradients = on_one_device(case)
    for number, holder in enumerate(case.schedule.holders):
        collected = [results[rank] for rank in holder]
        if number in sums:
            mine = [value[0][number] for value in collected]
            total = sum(mine) if case.sharding[number] else mine[0]
            assert abs(total - sums[number]) < 1e-10, (case, number)
        none = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)  # what crosses and leads nowhere has a gradient of zeros
        grads = [none if value[1][number] is None else value[1][number] for value in collected]
        total = sum(grads) if case.sharding[number] else grads[0]
        wanted = none if gradients[number] is None else gradients[number]
        torch.testing.assert_close(total, wanted, rtol=0, atol=1e-10)

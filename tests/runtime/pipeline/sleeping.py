"""Stages that only sleep, so that a schedule's time is known and no core is needed for it."""

import time

import torch
from torch.autograd.function import once_differentiable

from shardwright.layout import Mesh, replicated
from shardwright.runtime.algorithms.random import Randomness
from shardwright.runtime.model.program import Program
from shardwright.runtime.pipeline import (
    PipelineLoop,
    PipelineOutput,
    PipelineSpec,
    PlacedStage,
    RunningPipeline,
    StageCrossing,
)
from shardwright.runtime.world import Groups, Moment, here
from shardwright.schedule import forward_only


class Sleep(torch.autograd.Function):
    """Takes its time forward and backward; the weights' part later, if the schedule has a step for it."""

    @staticmethod
    def forward(ctx, x, stage):
        ctx.stage = stage
        time.sleep(stage.times.forward)
        return x + 1.0

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        times, weights = ctx.stage.times, ctx.stage.weights
        time.sleep(times.backward)
        if weights.collects:
            weights.put(lambda: time.sleep(times.weight))
        else:
            time.sleep(times.weight)
        return gradient, None


class Sleeper(Program):
    """One stage of a chain. The last gives a loss."""

    def __init__(self, times, last, *rest):
        super().__init__(*rest)
        self.times, self.is_last = times, last

    def forward(self, x):
        y = Sleep.apply(x, self)
        return (y.sum(),) if self.is_last else (y,)


def running(schedule, times):
    """This rank's part of a chain of sleeping stages."""
    rank, moment = here().rank, Moment(schedule.microbatches)
    count = schedule.stages
    groups = {holder: Groups(Mesh(axes=(), devices=holder)) for holder in sorted(set(schedule.holders))}
    placed = tuple(
        PlacedStage(
            number=number,
            mesh=Mesh(axes=(), devices=holder),
            takes=(0,) if number == 0 else (f"x{number - 1}",),
            gives=("loss",) if number == count - 1 else (f"x{number}",),
            stage=Sleeper(
                times[number], number == count - 1, groups[holder], (), torch.device("cpu"), Randomness(), moment
            )
            if rank in holder
            else None,
        )
        for number, holder in enumerate(schedule.holders)
    )
    crossings = tuple(
        StageCrossing(
            value=f"x{number}", sender=number, receiver=number + 1, shape=(4,), dtype=torch.float32, gradient=True,
            source_layout=replicated(1), target_layout=replicated(1),
        )
        for number in range(count - 1)
    )  # fmt: skip
    leaving = PipelineOutput(value="loss", stage=count - 1, how="sum", shape=(), dtype=torch.float32, gradient=True)
    pipeline = PipelineSpec(
        placed=placed, crossings=crossings, leaving=(leaving,), schedule=schedule,
        forward=forward_only(schedule.holders, schedule.microbatches), moment=moment,
    )  # fmt: skip
    return RunningPipeline(pipeline, PipelineLoop(None, "inside"))

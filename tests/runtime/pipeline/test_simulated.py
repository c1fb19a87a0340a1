"""The simulation of a schedule against the executor, with stages that sleep for a known time."""

import time

import pytest
import torch
import torch.distributed as dist

from shardwright.runtime.pipeline.executor import ScheduleRun
from shardwright.schedule import StageTimes, interleaved, schedule_kind, simulate
from tests.runtime.ranks import run_processes

from .sleeping import running

UNIT = 0.04  # seconds
RANKS, MICROBATCHES = 4, 4
TRIES = 20  # at the most: other processes only add to a time
CLOSE = 1.05
KINDS = ("gpipe", "1f1b", "eager", "interleaved", "zb", "zbv")


def times_of(schedule):
    """Stages that are not alike: every third takes half as long again."""
    return [StageTimes(UNIT * (1.5 if at % 3 == 1 else 1.0), UNIT, UNIT) for at in range(schedule.stages)]


def schedules():
    by_key = {kind: schedule_kind(kind).make(RANKS, MICROBATCHES) for kind in KINDS}
    return {**by_key, "few": interleaved(RANKS, 3), "fewest": schedule_kind("1f1b").make(RANKS, 2)}


def simulated(schedule, times):
    return simulate(schedule, times, [(at, at + 1) for at in range(schedule.stages - 1)])


def measure(rank=0):
    """For each schedule, when the ranks were done: the first try that others left alone, or the quickest."""
    by_name = {}
    for name, schedule in schedules().items():
        times = times_of(schedule)
        model, predicted = running(schedule, times), simulated(schedule, times).total
        ends = []
        x = torch.zeros(4, requires_grad=True)
        for _ in range(TRIES):
            dist.barrier()
            begun = time.perf_counter()
            call = ScheduleRun([x], frozenset([0]))
            call.seed = lambda out, microbatch: torch.ones(())
            model.run(call, "PFBW", call.seeded)
            mine = torch.tensor(time.perf_counter() - begun)
            every = [torch.zeros(()) for _ in range(RANKS)]
            dist.all_gather(every, mine)
            ends.append([float(end) for end in every])
            if max(ends[-1]) < CLOSE * predicted:
                break
        by_name[name] = min(ends, key=max)
    return by_name


@pytest.fixture(scope="module")
def measured():
    return run_processes(RANKS, measure, timeout=600.0)[0]


@pytest.mark.parametrize("name", schedules())
def test_a_schedule_takes_as_long_as_the_simulation_says(measured, name):
    schedule = schedules()[name]
    times = times_of(schedule)
    run = simulated(schedule, times)
    ends = measured[name]
    assert max(ends) == pytest.approx(run.total, rel=0.1)
    bubble = 1.0 - sum(run.busy) / (RANKS * max(ends))
    assert bubble == pytest.approx(run.bubble, abs=0.1)
    message = [max(row) for row in run.ends]
    for a in range(RANKS):
        for b in range(RANKS):
            if message[a] + UNIT / 2 < message[b]:
                assert ends[a] < ends[b], f"rank {a} should be done before rank {b}"

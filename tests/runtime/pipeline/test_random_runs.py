"""What the checker of schedules passes runs: thousands between threads, dozens on gloo."""

import threading

import pytest
import torch

from shardwright.errors import ScheduleError
from shardwright.runtime.pipeline.script import pairs_of
from shardwright.runtime.pipeline.transport import QueueTransport, TorchTransport
from shardwright.schedule import check
from tests.runtime.ranks import run_processes

from .random_runs import compare, mutated, pipeline_of, random_case, run_rank


def run_threads(case, apart=False, timeout=10.0):
    transports = QueueTransport.between(len(case.schedule.devices), timeout)
    results, errors = [None] * len(transports), []

    def run(rank):
        try:
            results[rank] = run_rank(case, rank, transports[rank], apart)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(1, len(transports))]
    for thread in threads:
        thread.start()
    run(0)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def passes(case):
    try:
        check(case.schedule, case.edges)
    except ScheduleError:
        return False
    return True


@pytest.mark.parametrize("block", range(2))
def test_random_schedules_run(block):
    torch.manual_seed(0)
    for seed in range(block * 500, block * 500 + 500):
        case = random_case(seed)
        assert passes(case), case
        compare(case, run_threads(case, apart=seed % 4 == 0))


@pytest.mark.parametrize("block", range(2))
def test_what_the_checker_passes_of_mutated_ones_runs(block):
    good = 0
    for seed in range(block * 500, block * 500 + 500):
        case = mutated(random_case(seed), seed)
        if passes(case):
            compare(case, run_threads(case))
            good += 1
    assert 50 < good < 450  # some of both, else this shows nothing


def on_gloo(rank, seeds):
    collected = []
    transport = TorchTransport()
    for seed in seeds:
        case = random_case(seed)
        transport.connect(pairs_of(pipeline_of(case, rank)[0]))
        mine = rank < len(case.schedule.devices)
        collected.append(run_rank(case, rank, transport) if mine else None)
    return collected


def test_dozens_run_on_gloo():
    seeds = range(5000, 5060)
    for seed, results in zip(seeds, zip(*run_processes(4, on_gloo, seeds, timeout=120), strict=True), strict=True):
        compare(random_case(seed), results)

from random import Random

import pytest

from shardwright.errors import ScheduleError
from shardwright.schedule import (
    UNIT,
    MicrobatchMemory,
    StageTimes,
    check,
    greedy,
    in_flight,
    lower_bound,
    one_f_one_b,
    simulate,
    zero_bubble,
)

from .drawn import chain, graph
from .machine import runs


def pp_ranks(count):
    return tuple((pp_rank,) for pp_rank in range(count))


@pytest.mark.parametrize("seed", range(3))
def test_it_makes_schedules_that_run_for_any_graph_on_any_devices(seed):
    for case in range(200):
        random = Random(seed * 1000 + case)
        edges = graph(random, stages := random.randint(1, 6))
        devices = random.randint(1, 4)
        holders = [tuple(sorted(random.sample(range(devices), random.randint(1, devices)))) for _ in range(stages)]
        times = [StageTimes(*(random.random() for _ in range(3))) for _ in range(stages)]
        kinds = random.choice(["F", "FB", "FBW"])

        schedule = greedy(holders, random.randint(1, 5), times, edges, kinds=kinds)

        check(schedule, edges)
        assert runs(schedule, edges) == "done"
        assert schedule.splits_weights == ("W" in kinds) and schedule.inference == (kinds == "F")


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 16)])
def test_it_is_as_fast_as_1f1b_in_the_same_memory(p, m):
    schedule = greedy(pp_ranks(p), m, [UNIT] * p, chain(p), limit=p, kinds="FB")

    assert simulate(schedule, [UNIT] * p, chain(p)).total == simulate(one_f_one_b(p, m), [UNIT] * p, chain(p)).total
    assert max(in_flight(schedule)) == p


def test_with_more_memory_unequal_stages_wait_for_the_slowest_only():
    times = [StageTimes(each, each, each) for each in (1.6, 1.4, 1.2, 1.0)]
    schedule = greedy(pp_ranks(4), 12, times, chain(4), limit=7)

    total = simulate(schedule, times, chain(4)).total

    assert total == pytest.approx(lower_bound(pp_ranks(4), 12, times, chain(4), splits_weights=True))
    assert total < simulate(zero_bubble(4, 12), times, chain(4)).total
    assert max(in_flight(schedule)) == 7


def test_a_limit_in_bytes_is_kept():
    sizes = [MicrobatchMemory(3000, 1000), MicrobatchMemory(2000, 500)]
    schedule = greedy(pp_ranks(2), 8, [UNIT] * 2, chain(2), limit=7000, sizes=sizes)

    check(schedule, chain(2), limit=7000, sizes=sizes)
    assert in_flight(schedule, sizes)[0] > 6000


def test_a_limit_that_is_too_low_is_refused():
    with pytest.raises(ScheduleError, match="the limit of 1 is too low: the devices 0"):
        greedy([(0,), (0,)], 2, [UNIT] * 2, chain(2), limit=1)


def test_times_of_all_stages_are_needed():
    with pytest.raises(ScheduleError, match="there are 2 stages, but times of 1"):
        greedy(pp_ranks(2), 2, [UNIT], chain(2))

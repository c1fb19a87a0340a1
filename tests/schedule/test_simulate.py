import gc
import time
from random import Random

import pytest

from shardwright.errors import ScheduleError
from shardwright.schedule import (
    KINDS,
    UNIT,
    MicrobatchMemory,
    Schedule,
    StageEdge,
    StageTimes,
    Step,
    forward_only,
    gpipe,
    lower_bound,
    one_f_one_b,
    schedule_kind,
    simulate,
    spread,
    with_prologue,
    zero_bubble,
)

from .drawn import chain


def test_steps_begin_when_their_device_is_free_and_their_message_is_there():
    run = simulate(gpipe(2, 2), [StageTimes(1, 2), StageTimes(3, 4)], [StageEdge(0, 1, 0.5, 0.25)])

    #  0   1   2                          14.25
    #  | 0 | 1 |                      [ 0 ]...[ 1 ]
    #       | 0  | 1  |  [ 0 ][ 1 ]
    assert run.starts == ((0, 1, 11.75, 15.75), (1.5, 4.5, 7.5, 11.5))
    assert run.ends == ((1, 2, 13.75, 17.75), (4.5, 7.5, 11.5, 15.5))
    assert run.total == 17.75
    assert run.busy == (6, 14)
    assert run.bubbles == pytest.approx((1 - 6 / 17.75, 1 - 14 / 17.75))
    assert run.bubble == pytest.approx(1 - 20 / (2 * 17.75))


def test_messages_over_one_link_go_one_after_the_other_beside_the_computing():
    run = simulate(forward_only(2, 3), [StageTimes(1, 0), StageTimes(1, 0)], [StageEdge(0, 1, 4)])

    assert run.ends[0] == (1, 2, 3)
    assert run.starts[1] == (5, 9, 13)


def test_messages_to_and_fro_and_to_other_devices_do_not_wait_for_each_other():
    schedule = forward_only(3, 1)

    run = simulate(schedule, [StageTimes(1, 0)] * 3, [StageEdge(0, 1, 4), StageEdge(0, 2, 4)])

    assert run.starts == ((0,), (5,), (5,))


def test_two_values_between_the_same_stages_take_the_sum_of_their_times():
    run = simulate(forward_only(2, 1), [UNIT, UNIT], [StageEdge(0, 1, 2), StageEdge(0, 1, 3)])

    assert run.starts[1] == (6,)


def test_a_value_that_stays_on_its_devices_takes_no_time():
    run = simulate(KINDS["zbv"].make(1, 1), [UNIT, UNIT], [StageEdge(0, 1, 100, 100)])

    assert run.total == 6


def test_b_is_all_of_the_backward_where_there_is_no_w():
    steps = tuple(Step.parse(word) for word in "F0.0 F0.1 B0.0 B0.1 W0.1".split())
    schedule = Schedule(devices=(steps,), holders=((0,),), microbatches=2, name="own")

    run = simulate(schedule, [StageTimes(1, 10, 100)])

    assert run.ends[0] == (1, 2, 112, 122, 222)


def test_a_prologue_takes_its_time_once():
    run = simulate(with_prologue(gpipe(2, 2), [1]), [UNIT._replace(prologue=5)] * 2, [(0, 1)])

    assert run.starts[1][:2] == (0, 5)
    assert run.busy == (6, 11)


def test_a_stage_begins_when_all_its_devices_are_free():
    schedule = Schedule(
        devices=((Step("F", 0, 0), Step("F", 1, 0)), (Step("F", 1, 0),)),
        holders=((0,), (0, 1)),
        microbatches=1,
        name="own",
    )
    run = simulate(schedule, [StageTimes(3, 0), StageTimes(1, 0)], [StageEdge(0, 1, 0.5)])

    assert run.starts == ((0, 3.5), (3.5,))


def test_devices_of_a_pipeline_rank_do_the_same():
    thin, wide = one_f_one_b(3, 5), spread(one_f_one_b(3, 5), [(0, 1), (2,), (3, 4, 5)])
    times, edges = [StageTimes(1, 2), StageTimes(2, 3), StageTimes(1, 1)], chain(3, 0.5, 0.75)

    first, many = simulate(thin, times, edges), simulate(wide, times, edges)

    assert many.total == first.total
    assert many.ends == tuple(first.ends[pp_rank] for pp_rank in (0, 0, 1, 2, 2, 2))
    assert many.bubble == pytest.approx(sum(first.bubbles[pp_rank] for pp_rank in (0, 0, 1, 2, 2, 2)) / 6)


def test_peaks_are_in_bytes_if_sizes_are_known():
    edges = chain(3)

    assert simulate(one_f_one_b(3, 5), [UNIT] * 3, edges).peaks == (3, 2, 1)
    assert simulate(one_f_one_b(3, 5), [UNIT] * 3, edges, [MicrobatchMemory(10, 0)] * 3).peaks == (30, 20, 10)
    assert simulate(zero_bubble(3, 5), [UNIT] * 3, edges, [MicrobatchMemory(10, 1)] * 3).peaks == (30, 21, 12)


def test_a_schedule_that_hangs_is_not_given_a_time():
    rows = ["F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1"]
    devices = tuple(tuple(map(Step.parse, row.split())) for row in rows)
    schedule = Schedule(devices=devices, holders=((0,), (1,)), microbatches=2, name="own")
    with pytest.raises(ScheduleError, match=r"can't be simulated: deadlock: device 0 stands at B0\.0"):
        simulate(schedule, [UNIT] * 2, [(0, 1)])


def test_times_of_all_stages_are_needed():
    with pytest.raises(ScheduleError, match="has 3 stages, but there are times of 2"):
        simulate(gpipe(3, 1), [UNIT] * 2)


@pytest.mark.parametrize("name", [*KINDS, "interleaved=3"])
def test_no_schedule_is_faster_than_the_lower_bound(name):
    random = Random(0)
    for _ in range(60):
        stages, microbatches = random.randint(1, 6), random.randint(1, 12)
        schedule = schedule_kind(name).make(stages, microbatches)
        times = [StageTimes(*(random.random() for _ in range(3))) for _ in range(schedule.stages)]
        edges = chain(schedule.stages, random.random() / 4, random.random() / 4)
        total = simulate(schedule, times, edges).total
        bound = lower_bound(schedule.holders, microbatches, times, edges, splits_weights=schedule.splits_weights)
        assert bound <= total * (1 + 1e-12)


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (2, 5), (4, 4), (6, 3), (8, 32)])
def test_the_lower_bound_is_exact_for_equal_stages(make, stages, microbatches):
    schedule, times = make(stages, microbatches), [StageTimes(1, 2, 0.5)] * stages

    assert lower_bound(schedule.holders, microbatches, times, chain(stages)) == pytest.approx(
        simulate(schedule, times, chain(stages)).total
    )


def test_65536_steps_are_simulated_in_less_than_a_second():
    schedule, edges = one_f_one_b(64, 512), chain(64, 0.1, 0.1)
    times = [UNIT] * 64
    gc.collect()
    begin = time.process_time()  # of this process only, whatever else the machine does

    simulate(schedule, times, edges)

    assert time.process_time() - begin < 1

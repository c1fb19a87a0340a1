"""A broken schedule of every kind, refused with device, step and reason."""

import re

import pytest

from shardwright.errors import ScheduleError
from shardwright.schedule import (
    MicrobatchMemory,
    Schedule,
    StageEdge,
    Step,
    check,
    gpipe,
    one_f_one_b,
    spread,
    zero_bubble,
)

CHAIN = [(0, 1)]


def own(*rows, holders=((0,), (1,)), microbatches=1):
    devices = tuple(tuple(Step.parse(word) for word in row.split()) for row in rows)
    return Schedule(devices=devices, holders=holders, microbatches=microbatches, name="own")


@pytest.mark.parametrize(
    ("schedule", "reason"),
    [
        (own("F0.0", "F1.0 B1.0"), "device 0: B0.0 is missing, it has stage 0"),
        (own("F0.0 B0.0", "F1.0 B1.0", microbatches=2), "device 1: F1.1 is missing"),
        (own("F0.0 B0.0 F0.0", "F1.0 B1.0"), "device 0: F0.0 runs 2 times, every step runs once"),
        (own("F0.0 B0.0 F1.0", "B1.0"), "device 0: F1.0 is of stage 1, which it does not have (lies on device 1)"),
        (own("F0.0 B0.0 F7.0", "F1.0 B1.0"), "device 0: F7.0 is of stage 7, which it does not have (there is none)"),
        (own("F0.0 B0.0 F0.1", "F1.0 B1.0"), "device 0: F0.1 is too much, there is no such microbatch"),
        (own("P0.1 F0.0 B0.0", "F1.0 B1.0"), "device 0: P0.1 is too much, a prologue has microbatch 0"),
        (own("B0.0 F0.0", "F1.0 B1.0"), "device 0: B0.0 comes before F0.0, which it needs"),
        (own("F0.0 W0.0 B0.0", "F1.0 B1.0"), "device 0: W0.0 comes before B0.0, which it needs"),
        (own("F0.0 P0.0 B0.0", "F1.0 B1.0"), "device 0: F0.0 comes before P0.0, which it needs"),
        (own("F0.0 W0.0", "F1.0"), "W0.0 has no B0.0, and W is a part of a backward"),
        (own("F1.0 F0.0", holders=((0,), (0,))), "device 0: F1.0 comes before F0.0, which it needs"),
        (own("F0.0 F1.0 B0.0 B1.0", holders=((0,), (0,))), "device 0: B0.0 comes before B1.0, which it needs"),
    ],
)
def test_a_step_in_the_wrong_place_is_named(schedule, reason):
    with pytest.raises(ScheduleError, match=re.escape(reason)):
        check(schedule, CHAIN)


def test_all_of_them_are_named_at_once():
    with pytest.raises(ScheduleError) as error:
        check(own("B0.0 F0.0 F0.0", "F1.0 F0.0"), CHAIN)

    for reason in ("F0.0 runs 2 times", "B0.0 comes before F0.0", "B1.0 is missing", "does not have"):
        assert reason in str(error.value)


def test_a_long_list_of_faults_is_shortened():
    with pytest.raises(ScheduleError, match="and 28 more"):
        check(own("", "", microbatches=20), CHAIN)


def test_devices_of_one_stage_run_it_in_the_same_order():
    schedule = own("F0.0 F0.1", "F0.1 F0.0", holders=((0, 1),), microbatches=2)
    with pytest.raises(ScheduleError, match=r"device 0 runs F0\.0 where device 1 runs F0\.1: .* same order"):
        check(schedule, [])


def test_a_part_of_a_backward_is_apart_on_all_devices_or_on_none():
    schedule = own("F0.0 B0.0 W0.0", "F0.0 B0.0", holders=((0, 1),))
    with pytest.raises(ScheduleError, match=r"device 1: W0\.0 is missing"):
        check(schedule, [])


def test_a_deadlock_is_reported_as_a_cycle():
    schedule = own("F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1", microbatches=2)
    with pytest.raises(ScheduleError) as error:
        check(schedule, CHAIN)

    assert str(error.value).splitlines()[1] == (
        "  - deadlock: device 0 stands at B0.0 until device 1 runs B1.0; "
        "device 1 stands at F1.1 until device 0 runs F0.1"
    )


def test_a_deadlock_of_devices_that_meet_in_a_stage_is_found():
    schedule = own("F0.0 F1.0 F2.0", "F2.0 F0.0", "F1.0", holders=((0, 1), (0, 2), (0, 1)))
    with pytest.raises(ScheduleError, match="same order"):
        check(schedule, [])
    three = own("F0.0 F2.0", "F1.0 F0.0", "F2.0 F1.0", holders=((0, 1), (1, 2), (0, 2)))
    with pytest.raises(
        ScheduleError, match=r"device 0 stands at F0\.0 until device 1 runs F0\.0; device 1 stands at F1"
    ):
        check(three, [])


def test_a_long_cycle_is_shortened():
    rows = [f"F{at}.0 F{(at - 1) % 10}.0" for at in range(10)]
    schedule = own(*rows, holders=tuple(tuple(sorted((at, (at + 1) % 10))) for at in range(10)))
    with pytest.raises(
        ScheduleError, match=r"deadlock: device 0 stands at F0\.0 .*; \(5 more\); device 8 .*; device 9"
    ):
        check(schedule, [])


def test_values_may_skip_stages():
    schedule = own("F0.0 F2.0 B2.0 B0.0", "F1.0 B1.0", holders=((0,), (1,), (0,)))

    check(schedule, [(0, 1), (0, 2), (1, 2)])


def test_a_value_without_gradient_holds_no_backward_up():
    schedule = own("F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1", microbatches=2)

    check(schedule, [StageEdge(0, 1, 0.0, None)])


@pytest.mark.parametrize(
    ("edge", "reason"), [((0, 2), "there are only 0 to 1"), ((1, 0), "to later stages only"), ((0, 0), "later")]
)
def test_odd_edges_are_refused(edge, reason):
    with pytest.raises(ScheduleError, match=reason):
        check(gpipe(2, 2), [edge])


def test_a_device_that_saves_too_much_is_named():
    sizes = [MicrobatchMemory(1000, 0)] * 4
    edges = [(at, at + 1) for at in range(3)]

    check(one_f_one_b(4, 8), edges, limit=4000, sizes=sizes)
    check(one_f_one_b(4, 8), edges, limit=[4000, 3000, 2000, 1000], sizes=sizes)
    with pytest.raises(
        ScheduleError, match=r"device 0: saves 4,000 bytes for backward after F0\.3, the limit is 3,999"
    ):
        check(one_f_one_b(4, 8), edges, limit=3999, sizes=sizes)
    with pytest.raises(ScheduleError, match=r"devices 2-3: saves 8,000 .* the limit is 4,000"):
        check(spread(gpipe(2, 8), [(0, 1), (2, 3)]), CHAIN, limit=[9000, 9000, 9000, 4000], sizes=sizes[:2])


def test_what_w_still_needs_counts_until_w():
    edges = [(at, at + 1) for at in range(3)]

    check(zero_bubble(4, 8), edges, limit=4000, sizes=[MicrobatchMemory(1000, 1000)] * 4)
    with pytest.raises(ScheduleError, match=r"device 2: saves 7,000 (.|\n)*device 3: saves 8,000"):
        check(zero_bubble(4, 8), edges, limit=6999, sizes=[MicrobatchMemory(1000, 2000)] * 4)


def test_a_limit_needs_sizes():
    with pytest.raises(ScheduleError, match="needs the sizes of 2 stages; 0 are given"):
        check(gpipe(2, 2), CHAIN, limit=1)

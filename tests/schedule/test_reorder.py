"""Schedules with some steps in another order."""

import pytest

from shardwright.errors import ScheduleError
from shardwright.schedule import Step, check, one_f_one_b, reordered
from tests.schedule.drawn import chain


def ordered(*pairs, microbatches=3):
    steps = [(Step.parse(first), Step.parse(second)) for first, second in pairs]
    return reordered(one_f_one_b(2, microbatches), steps, chain(2), "custom")


def row(schedule, device):
    return " ".join(map(str, schedule.devices[device]))


def test_without_pairs_nothing_moves():
    assert ordered().devices == one_f_one_b(2, 3).devices


def test_a_step_moves_ahead_and_the_rest_stays_in_its_order():
    schedule = ordered(("F0.2", "B0.0"))
    assert row(schedule, 0) == "F0.0 F0.1 F0.2 B0.0 B0.1 B0.2"
    assert row(schedule, 1) == row(one_f_one_b(2, 3), 1)
    check(schedule, chain(2))


def test_what_the_wanted_order_needs_elsewhere_follows():
    schedule = ordered(("B0.1", "B0.0"))
    check(schedule, chain(2))
    first, second = (row(schedule, device).split() for device in (0, 1))
    assert first.index("B0.1") < first.index("B0.0") and second.index("B1.0") < second.index("B1.2")


@pytest.mark.parametrize(
    ("pair", "why"),
    [
        (("B0.0", "F0.0"), "contradicts itself, or what steps need of each other"),
        (("F0.0", "F1.0"), "run on different devices"),
        (("F0.0", "F0.7"), "there is no step F0.7"),
        (("F0.0", "F0.0"), "can't run before itself"),
    ],
)
def test_what_cannot_be_is_refused(pair, why):
    with pytest.raises(ScheduleError, match=why):
        ordered(pair)


def test_two_pairs_that_contradict_each_other_are_refused():
    with pytest.raises(ScheduleError, match=r"F0\.0 F0\.1 .*wait in a circle"):
        ordered(("F0.1", "F0.0"), ("F0.0", "F0.1"))

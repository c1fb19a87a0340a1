import json

import pytest

from shardwright.errors import ScheduleError
from shardwright.schedule import Schedule, Step, gpipe, spread, zero_bubble


def test_a_step_is_written_kind_stage_microbatch():
    assert str(Step("F", 0, 3)) == "F0.3"
    assert Step.parse("W12.0") == Step("W", 12, 0)


@pytest.mark.parametrize("text", ["", "F0", "X0.1", "F0.1 ", "F-1.0", "f0.1"])
def test_what_is_no_step_is_refused(text):
    with pytest.raises(ScheduleError, match=r"is no step; write kind, stage and microbatch as in F0\.3"):
        Step.parse(text)


def test_a_schedule_in_json_has_a_line_for_devices_that_do_the_same():
    schedule = spread(gpipe(2, 2), [(0, 1, 2), (3,)])

    assert json.loads(json.dumps(schedule.to_json())) == {
        "name": "gpipe",
        "microbatches": 2,
        "holders": ["0-2", "3"],
        "steps": ["0-2: F0.0 F0.1 B0.0 B0.1", "3: F1.0 F1.1 B1.0 B1.1"],
    }


def test_devices_with_nothing_to_do_stay_in_json():
    schedule = Schedule(devices=((), (Step("F", 0, 0),), ()), holders=((1,),), microbatches=1, name="own")

    assert Schedule.from_json(schedule.to_json()) == schedule


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"steps": ["0: F0.0", "0: B0.0"]}, "two lists of steps for device 0"),
        ({"steps": ["0: F0.0", "2: B0.0"]}, r"no list of steps for the devices \[1\]"),
        ({"steps": ["zero: F0.0"]}, "'zero' names no devices"),
        ({"steps": ["0: F0"]}, "'F0' is no step"),
        ({"holders": ["0", "1"]}, r"stage 1 lies on the devices \[1\]; there are only 0 to 0"),
        ({"holders": []}, "0 stages"),
        ({"microbatches": 0}, "0 microbatches"),
    ],
)
def test_odd_json_is_refused_with_the_reason(change, reason):
    message = {**gpipe(1, 1).to_json(), **change}
    with pytest.raises(ScheduleError, match=reason):
        Schedule.from_json(message)


def test_json_with_parts_missing_is_refused():
    with pytest.raises(ScheduleError, match="is missing holders, steps"):
        Schedule.from_json({"name": "own", "microbatches": 2})


def test_all_faults_of_a_schedule_are_reported_at_once():
    with pytest.raises(ScheduleError) as error:
        Schedule(devices=((Step("X", 0, 0),),), holders=((), (0, 0)), microbatches=0, name="own")  # type: ignore[arg-type]

    for reason in ("kind 'X'", "stage 0 lies on no device", "name each once", "0 microbatches"):
        assert reason in str(error.value)


def test_what_a_schedule_is():
    assert zero_bubble(2, 2).splits_weights and not zero_bubble(2, 2).inference
    assert not gpipe(2, 2).splits_weights and gpipe(3, 2).stages == 3
    assert spread(gpipe(2, 2), [(0, 1), (2,)]).groups() == ((0, 1), (2,))

"""Plan strings, and the errors for those that make no sense."""

from __future__ import annotations

import pytest

from shardwright.errors import PlanError
from shardwright.plan import parse_plan_string
from shardwright.schedule import KINDS


@pytest.mark.parametrize(
    ("text", "mesh"),
    [
        ("dp=2", "dp=2"),
        ("tp=2,dp=4", "dp=4 x tp=2"),
        (" sp = 2 ", "tp=2"),
        ("zero3=2,tp=2", "dp=2 x tp=2"),
        ("dp=2,zero1=4", "dp=2 x zero1=4"),
        ("single", "one device"),
        ("", "one device"),
    ],
)
def test_replicas_stand_outside_and_tensor_parallelism_between_neighbours(text, mesh):
    assert str(parse_plan_string(text).mesh) == mesh


def test_a_request_prints_as_it_can_be_read():
    request = parse_plan_string("tp=2,zero3=4")

    assert parse_plan_string(str(request)) == request


@pytest.mark.parametrize(
    ("text", "why", "remedy"),
    [
        ("pq=2", "asks for 'pq'", "as in 'dp=2,tp=2'"),
        ("dp", "does not say how many devices dp has", "write dp=2"),
        ("dp=two", "does not say how many devices dp has", "write dp=2"),
        ("dp=-2", "does not say how many devices dp has", "write dp=2"),
        ("dp=1", "gives dp 1 device", "leave an axis out"),
        ("tp=0", "gives tp 0 device", "leave an axis out"),
        ("dp=2,dp=2", "names dp twice", ""),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused_with_its_text_and_a_remedy(text, why, remedy):
    with pytest.raises(PlanError) as error:
        parse_plan_string(text)

    assert repr(text) in str(error.value)
    assert why in str(error.value)
    assert remedy in str(error.value)


def test_a_plan_for_another_number_of_processes_names_both_and_says_how_to_start_them():
    with pytest.raises(PlanError, match=r"for 4 devices, but there are 3 processes; start 4 .*--nproc-per-node=4"):
        parse_plan_string("dp=2,tp=2").check_size(3)


# Pipelines.


@pytest.mark.parametrize(
    ("text", "stages", "mesh"),
    [
        ("pp=2", (1, 1), "one device"),
        ("pp=4,zb", (1, 1, 1, 1), "one device"),
        ("dp=2,pp=2", (2, 2), "dp=2"),
        ("pp=2,tp=2,dp=2", (4, 4), "dp=2 x tp=2"),
        ("pp=1+3,dp", (1, 3), "one device"),
        ("pp=3+1,dp", (3, 1), "dp=3"),
        ("pp=2+2,dp=2", (2, 2), "dp=2"),
        ("pp = 2, interleaved = 3", (1, 1), "one device"),
    ],
)
def test_stages_have_the_devices_that_the_other_axes_say_or_those_that_are_counted_out(text, stages, mesh):
    request = parse_plan_string(text)

    assert request.stages == stages
    assert request.size == sum(stages)
    assert str(request.mesh) == mesh


def test_the_policy_without_a_number_takes_what_a_stage_has():
    request = parse_plan_string("pp=1+2+3,zero1")

    parts = [[(policy, axis.name, axis.size) for policy, axis in request.parts_of(size)] for size in request.stages]
    assert parts == [[], [("zero1", "dp", 2)], [("zero1", "dp", 3)]]


@pytest.mark.parametrize("word", KINDS)
def test_every_schedule_is_known_by_its_word(word):
    request = parse_plan_string(f"pp=2,{word}")

    assert request.schedule is KINDS[word]
    assert request.schedule.name == word


@pytest.mark.parametrize(
    "text", ["pp=2", "pp=1+3,dp", "pp=2,dp=2,zb", "pp=2,interleaved=3", "pp=1+3,zero1,gpipe,recompute", "pp=4,tp=2,zbv"]
)
def test_a_pipeline_prints_as_it_can_be_read(text):
    request = parse_plan_string(text)

    assert str(request) == text
    assert parse_plan_string(str(request)) == request


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pp", "does not say what stages pp has; write pp=2, or pp=1+3"),
        ("pp=1", "does not say what stages pp has"),
        ("pp=0", "does not say what stages pp has"),
        ("pp=2+", "does not say what stages pp has"),
        ("pp=0+2,dp", "does not say what stages pp has"),
        ("pp=two", "does not say what stages pp has"),
        ("pp=2,pp=3", "names pp twice"),
        ("pp=2,gpipe,zb", "names the schedules gpipe, zb; a pipeline has one"),
        ("gpipe", "names the schedule gpipe, but no pipeline; add pp=2"),
        ("dp=2,zb", "names the schedule zb, but no pipeline; add pp=2"),
        ("pp=2,zb=2", "zb takes no number; interleaved does"),
        ("pp=2,interleaved=0", "gives interleaved '0'; it takes the number of virtual stages per pipeline rank"),
        ("pp=2,interleaved=x", "gives interleaved 'x'; it takes the number of virtual stages per pipeline rank"),
        ("pp=2,interleaved:3", "write interleaved=3 for interleaved:3"),
        ("pp=2,dp", "does not say how many devices dp has; write dp=2"),
        ("pp=1+3", "has stages of 1, 3 devices; say how each uses them with one policy without a number"),
        ("pp=1+3,dp=3", "has stages of 1, 3 devices; say how each uses them with one policy without a number"),
        ("pp=1+3,dp,tp=2", "has unequal stages; give them one policy without a number, as in pp=1+3,dp"),
        ("pp=1+3,dp,tp", "gives unequal stages dp and tp; they take one policy"),
        ("pp=2,zbx", "asks for 'zbx'; did you mean 'zb'; known are dp, tp"),
    ],
)
def test_a_pipeline_that_makes_no_sense_is_refused(text, message):
    with pytest.raises(PlanError) as error:
        parse_plan_string(text)

    assert repr(text) in str(error.value)
    assert message in str(error.value)


def test_stages_count_for_the_number_of_processes():
    with pytest.raises(PlanError, match=r"for 4 devices, but there are 2 processes; start 4 .*--nproc-per-node=4"):
        parse_plan_string("pp=1+3,dp").check_size(2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ddp=4", "that is 'dp' here: 'dp=4'"),
        ("fsdp=8", "that is 'zero3' here: 'zero3=8'"),
        ("FSDP2=8", "that is 'zero3' here: 'zero3=8'"),
        ("DP=2", "that is 'dp' here: 'dp=2'"),
        ("zero=3", "the stage is a part of the word, and the number that of ranks: 'zero3=8'"),
        ("hsdp=8", "two axes here: 'dp=2,zero3=4'"),
        ("dp=2,checkpointing", "that is 'recompute' here: 'recompute'"),
        ("tp2", "did you mean 'tp=2'"),
        ("zero3x8", "did you mean 'zero3=8'"),
        ("zeor3=8", "did you mean 'zero3'"),
        ("auto,recompute", "auto decides everything and stands alone"),
    ],
)
def test_a_word_of_another_library_is_answered_with_ours(text, message):
    with pytest.raises(PlanError) as error:
        parse_plan_string(text)

    assert message in str(error.value)

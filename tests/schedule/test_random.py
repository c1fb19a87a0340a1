"""The check against devices that really run the steps: what it passes runs to its end, what it refuses does not."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import ScheduleError
from shardwright.schedule import KINDS, Schedule, StageTimes, Step, check, forward_only, simulate, spread, with_prologue

from .drawn import chain, good, graph, mutated, reordered
from .machine import runs, timed


def verdict(schedule, edges):
    try:
        check(schedule, edges)
    except ScheduleError as error:
        return str(error)
    return ""


def agree(schedule, edges):
    """Compare the check with the machine; True if the schedule can run."""
    refused, happened = verdict(schedule, edges), runs(schedule, edges)
    assert (happened == "done") == (not refused), (happened, refused, schedule.to_json(), edges)
    if "deadlock" in refused:
        assert happened == "stuck", (happened, refused, schedule.to_json(), edges)
    return not refused


@pytest.mark.parametrize("seed", range(4))
def test_a_good_schedule_is_never_refused(seed):
    for case in range(1000):
        random = Random(seed * 1000 + case)
        edges = graph(random, stages := random.randint(1, 6))
        assert agree(good(random, edges, stages), edges)


@pytest.mark.parametrize("seed", range(4))
def test_a_mutated_schedule_is_refused_exactly_if_it_is_broken(seed):
    seen = set()
    for case in range(1000):
        random = Random(seed * 1000 + case)
        edges = graph(random, stages := random.randint(1, 6))
        schedule = good(random, edges, stages)
        for _ in range(random.randint(1, 3)):
            if any(schedule.devices):
                schedule = mutated(random, schedule)
        seen.add(agree(schedule, edges))
    assert seen == {True, False}


@pytest.mark.parametrize("seed", range(4))
def test_orders_that_know_nothing_of_each_other_are_refused_exactly_if_they_hang(seed):
    words = {"deadlock": 0, "": 0}
    for case in range(1000):
        random = Random(seed * 1000 + case)
        edges = graph(random, stages := random.randint(1, 6))
        schedule = reordered(random, good(random, edges, stages))
        agree(schedule, edges)
        refused = verdict(schedule, edges)
        words["deadlock" if "deadlock" in refused else "" if not refused else "order"] = 1
    assert words == {"deadlock": 1, "": 1, "order": 1}


@st.composite
def known(draw):
    stages, microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    kind = draw(st.sampled_from([*KINDS, "forward"]))
    schedule = forward_only(stages, microbatches) if kind == "forward" else KINDS[kind].make(stages, microbatches)
    if draw(st.booleans()):
        schedule = with_prologue(schedule, draw(st.sets(st.integers(0, schedule.stages - 1))))
    if draw(st.booleans()):
        sizes = draw(st.lists(st.integers(1, 3), min_size=stages, max_size=stages))
        first = [sum(sizes[:at]) for at in range(stages)]
        schedule = spread(schedule, [tuple(range(at, at + size)) for at, size in zip(first, sizes, strict=True)])
    return schedule


@given(known(), st.integers(0, 2**32), st.integers(0, 3))
@settings(max_examples=400, deadline=None)
def test_the_known_kinds_run_and_their_mutants_only_if_they_can(schedule, seed, changes):
    random, edges = Random(seed), chain(schedule.stages)
    assert agree(schedule, edges)
    for _ in range(changes):
        if any(schedule.devices):
            schedule = mutated(random, schedule)
    agree(schedule, edges)


@pytest.mark.parametrize("seed", range(3))
def test_the_simulation_agrees_with_a_clock_that_goes_from_event_to_event(seed):
    for case in range(100):
        random = Random(seed * 1000 + case)
        edges = graph(random, stages := random.randint(1, 6))
        schedule = good(random, edges, stages)
        times = [StageTimes(*(random.random() for _ in range(4))) for _ in range(stages)]

        run = simulate(schedule, times, edges)

        wanted = timed(schedule, times, edges)
        for steps, ends in zip(schedule.devices, run.ends, strict=True):
            assert list(ends) == pytest.approx([wanted[step] for step in steps]), (seed, case)
        assert run.total == pytest.approx(max(wanted.values()))


@given(known())
def test_json_gives_the_same_schedule_back(schedule):
    assert Schedule.from_json(schedule.to_json()) == schedule


@given(st.sampled_from("PFBW"), st.integers(0, 10**6), st.integers(0, 10**6))
def test_text_gives_the_same_step_back(kind, stage, microbatch):
    step = Step(kind, stage, microbatch)
    assert Step.parse(str(step)) == step

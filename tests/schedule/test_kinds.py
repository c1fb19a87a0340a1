"""What the literature says of the known schedules, with F=B=W=1 (a backward that is not split takes 2)."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.errors import ScheduleError
from shardwright.plan import strings
from shardwright.schedule import (
    KINDS,
    UNIT,
    Step,
    check,
    eager,
    forward_only,
    gpipe,
    in_flight,
    interleaved,
    one_f_one_b,
    register_schedule,
    schedule_kind,
    schedule_names,
    searched_kinds,
    simulate,
    spread,
    with_prologue,
    zbv,
    zero_bubble,
)
from shardwright.schedule import kind as kind_module

from ..house.source import SRC, files
from .drawn import chain

ROOT = Path(__file__).parents[2]

SIZES = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 3, 5, 8, 16, 21)]
LONG = [(p, m) for p, m in SIZES if m >= 2 * p - 1]


def run(schedule):
    return simulate(schedule, [UNIT] * schedule.stages, chain(schedule.stages))


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("name", [*KINDS, "interleaved=1", "interleaved=3"])
def test_every_kind_passes_the_check(name, p, m):
    kind = schedule_kind(name)
    schedule = kind.make(p, m)

    check(schedule, chain(schedule.stages))

    assert schedule.holders == kind.holders(p) and schedule.stages == kind.stages_per_rank * p
    assert schedule.name == kind.name == name


@pytest.mark.parametrize("name", [*KINDS, "interleaved=3", "interleaved=4"])
def test_a_kind_knows_what_is_in_flight(name):
    kind = schedule_kind(name)
    for p, m in SIZES:
        counted, steady = in_flight(kind.make(p, m)), in_flight(kind.steady(p, m))
        assert kind.in_flight(p, m) == counted == steady, f"in_flight of {name} for p={p}, m={m}; the steps: {counted}"


@pytest.mark.parametrize(
    ("name", "fill"),
    [("gpipe", 1), ("1f1b", 1), ("eager", 1), ("zb", 1 / 3), ("interleaved", 1 / 2), ("interleaved=4", 1 / 4),
     ("zbv", 1 / 6)],
)  # fmt: skip
def test_a_kind_knows_how_long_it_takes_to_fill(name, fill):
    assert schedule_kind(name).fill == fill


def test_a_kind_knows_whether_it_splits_backward():
    known = "gpipe 1f1b eager zb interleaved zbv".split()
    assert [name for name in known if KINDS[name].splits_backward] == ["zb", "zbv"]


def test_a_schedule_is_known_everywhere_by_one_definition(monkeypatch):
    monkeypatch.setattr(kind_module, "KINDS", dict(KINDS))
    monkeypatch.setattr(strings, "KINDS", kind_module.KINDS)

    @register_schedule("mine", searched=True)
    def mine(stages, microbatches):
        return replace(one_f_one_b(stages, microbatches), name="mine")

    kind = strings.parse_plan_string("pp=4,mine").schedule
    assert kind.stages_per_rank == 1 and kind.fill == 1 and not kind.splits_backward
    assert kind in searched_kinds() and "mine" in schedule_names()
    assert kind.in_flight(4, 8) == KINDS["1f1b"].in_flight(4, 8)


def test_nothing_outside_of_this_package_looks_at_a_schedules_name():
    names = {
        str(path.relative_to(SRC)): node.value
        for path in files(SRC)
        if path.parent.name != "schedule"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.partition("=")[0] in KINDS
    }
    assert names == {}


def test_the_docs_list_every_schedule():
    page = (ROOT / "docs/pipelines.md").read_text()
    for kind in KINDS.values():
        name, each = (f"{kind.name}=v", "v") if kind.numbers else (kind.name, kind.stages_per_rank)
        assert f"\n| `{name}` | {each} | {'yes' if kind.splits_backward else 'no'} |" in page


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("make", [gpipe, one_f_one_b, eager])
def test_gpipe_and_1f1b_wait_for_p_minus_1_of_m_plus_p_minus_1(make, p, m):
    assert run(make(p, m)).bubble == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_gpipe_has_all_microbatches_in_flight_and_1f1b_one_per_later_pipeline_rank(p, m):
    assert in_flight(gpipe(p, m)) == (m,) * p
    assert in_flight(one_f_one_b(p, m)) == tuple(min(m, p - pp_rank) for pp_rank in range(p))


def test_eager_hides_messages_with_up_to_twice_as_much_in_flight():
    times, edges = [UNIT] * 4, chain(4, 0.5, 0.5)
    slow, fast = simulate(one_f_one_b(4, 16), times, edges), simulate(eager(4, 16), times, edges)

    assert fast.peaks == (7, 5, 3, 1) and slow.peaks == (4, 3, 2, 1)
    assert fast.total == 3 * 16 + 3 * 3 + 6 * 0.5  # the way there and back once
    assert slow.total > fast.total + 5


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
@pytest.mark.parametrize(("p", "m"), [(p, m) for p in (2, 3, 4, 8) for m in range(p, 3 * p + 2)])
def test_interleaved_waits_chunks_times_less_for_any_number_of_microbatches(p, m, chunks):
    schedule = interleaved(p, m, chunks)

    assert run(schedule).total == 3 * m * chunks + 3 * (p - 1)  # of a chunk's time, which is 1/chunks of a seat's
    check(schedule, chain(schedule.stages))


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if m % p == 0 and m > p])
@pytest.mark.parametrize("chunks", [2, 3])
def test_interleaved_has_p_minus_1_chunks_more_in_flight_than_1f1b(p, m, chunks):
    assert max(in_flight(interleaved(p, m, chunks))) == p * chunks + p - 1


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if m >= p])
def test_zero_bubble_has_a_third_of_the_bubble_of_1f1b_with_the_same_in_flight(p, m):
    schedule = zero_bubble(p, m)

    assert run(schedule).total == 3 * m + p - 1
    assert run(one_f_one_b(p, m)).total == 3 * (m + p - 1)
    assert max(in_flight(schedule)) == max(in_flight(one_f_one_b(p, m)))


@pytest.mark.parametrize(("p", "m"), LONG)
def test_zbv_has_half_of_the_bubble_of_zb_with_the_same_in_flight(p, m):
    schedule = zbv(p, m)

    assert run(schedule).total == 6 * m + p - 1  # of half a seat's time
    assert in_flight(schedule) == (2 * p,) * p  # of half a seat's size


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_zbv_is_no_worse_than_zero_bubble_when_microbatches_are_few(p, m):
    assert run(zbv(p, m)).total / 2 <= run(zero_bubble(p, m)).total
    assert max(in_flight(zbv(p, m))) <= 2 * p


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_forward_only_is_one_wave(p, m):
    schedule = forward_only(p, m)

    assert schedule.inference and run(schedule).total == m + p - 1
    assert in_flight(schedule) == (0,) * p


def test_forward_only_takes_stages_on_any_devices():
    schedule = forward_only([(0,), (0, 1, 2), (1,), (2,)], 4)

    check(schedule, chain(4))

    assert schedule.devices[1][:2] == (Step("F", 1, 0), Step("F", 2, 0))
    assert run(schedule).total == 4 * 2 + 2


@pytest.mark.parametrize(("p", "m", "chunks"), [(2, 4, 2), (4, 8, 2), (4, 8, 3)])
def test_forward_only_with_virtual_stages_is_still_one_wave(p, m, chunks):
    schedule = forward_only(schedule_kind(f"interleaved={chunks}").holders(p), m)

    assert run(schedule).total == m * chunks + p - 1


def test_prologues_come_first_on_all_devices_of_their_stage():
    schedule = with_prologue(spread(one_f_one_b(2, 2), [(0,), (1, 2)]), [1])

    assert schedule.devices[0][0] == Step("F", 0, 0)
    assert schedule.devices[1][:2] == schedule.devices[2][:2] == (Step("P", 1, 0), Step("F", 1, 0))
    check(schedule, chain(2))


def test_a_prologue_of_a_stage_that_is_not_there_is_refused():
    with pytest.raises(ScheduleError, match=r"no prologue for the stages \[2\]: gpipe .* has 0 to 1"):
        with_prologue(gpipe(2, 2), [0, 2])


def test_pipeline_ranks_may_differ_in_size_and_lie_anywhere():
    schedule = spread(zbv(2, 3), [(1,), (0, 2, 3)])

    assert schedule.holders == ((1,), (0, 2, 3), (0, 2, 3), (1,))
    assert schedule.devices[0] == schedule.devices[3] == zbv(2, 3).devices[1]
    check(schedule, chain(4))


@pytest.mark.parametrize("pp_ranks", [[(0,)], [(0, 1), (1,)], [(0,), (2,)], [(0,), ()]])
def test_pipeline_ranks_that_do_not_partition_the_devices_are_refused(pp_ranks):
    with pytest.raises(ScheduleError, match=r"pipeline ranks"):
        spread(gpipe(2, 2), pp_ranks)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: gpipe(0, 1), "stages is 0"),
        (lambda: zbv(2, 0), "microbatches is 0"),
        (lambda: interleaved(0, 0, 0), "stages is 0, microbatches is 0, chunks is 0"),
        (
            lambda: schedule_kind("gpip"),
            "no schedule 'gpip'; the known ones are gpipe, 1f1b, eager, zb, interleaved, interleaved=3, zbv",
        ),
        (lambda: schedule_kind("interleaved=0"), "gives interleaved '0'"),
        (lambda: schedule_kind("interleaved:3"), "write interleaved=3"),
        (lambda: schedule_kind("zb=3"), "zb takes no number; interleaved does"),
        (lambda: register_schedule("a b"), "can't be the name of a schedule"),
    ],
)
def test_what_can_not_be_made_is_refused(make, reason):
    with pytest.raises(ScheduleError, match=reason):
        make()

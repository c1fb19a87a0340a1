"""The known schedules, each one definition: a function that returns one, and the name it is known by.

They are written over pipeline ranks: rank 0 is device 0. `spread` gives a pipeline rank several devices. A custom
schedule is a function of the same shape (`register_schedule`), or a list of steps; `check` checks whether it can run.

                     stages per   bubble with F=B=W=1            in flight on the fullest rank, in microbatches of it
                     rank
    gpipe            1            3(p-1) of 3(m+p-1)             m
    1f1b             1            3(p-1) of 3(m+p-1)             p
    eager            1            the same; hides messages       2p - 1
    zb (ZB-H1)       1            p-1 of 3m + p-1                p
    interleaved      chunks v     3(p-1)/v of 3m + 3(p-1)/v      about p + (p-1)/v
    zbv (ZB-V)       2            (p-1)/2 of 3m + (p-1)/2        p
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import cast

from ..errors import ScheduleError
from .greedy import greedy
from .kind import KINDS, register_schedule
from .simulate import UNIT
from .step import Devices, Schedule, Step, StepKind


@register_schedule("gpipe", in_flight=lambda p, m: [m] * p)
def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards."""
    _need(stages=stages, microbatches=microbatches)
    return _straight("gpipe", stages, microbatches, lambda pp_rank: microbatches)


@register_schedule("1f1b", searched=True, in_flight=lambda p, m: [min(m, p - pp_rank) for pp_rank in range(p)])
def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """A backward as soon as there can be one, so that pipeline rank k has at most stages - k microbatches in flight."""
    _need(stages=stages, microbatches=microbatches)
    return _straight("1f1b", stages, microbatches, lambda pp_rank: stages - pp_rank - 1)


@register_schedule("eager")
def eager(stages: int, microbatches: int) -> Schedule:
    """1F1B with twice the forwards ahead: while a message is on its way, there is still something to do."""
    _need(stages=stages, microbatches=microbatches)
    return _straight("eager", stages, microbatches, lambda pp_rank: 2 * (stages - pp_rank - 1))


def _straight(name: str, stages: int, microbatches: int, ahead: Callable[[int], int]) -> Schedule:
    rows = [
        _weave(_each("F", pp_rank, microbatches), _each("B", pp_rank, microbatches), ahead(pp_rank))
        for pp_rank in range(stages)
    ]
    return _schedule(name, rows, _round_robin(stages, 1), microbatches)


@register_schedule("zb", searched=True, in_flight=lambda p, m: [min(m, p)] * p)
def zero_bubble(stages: int, microbatches: int) -> Schedule:
    """ZB-H1: 1F1B with W delayed by as many microbatches as the rank has fewer in flight than rank 0.

    So every pipeline rank has `stages` microbatches in flight, and the W left at the end fill what would be bubble.
    """
    _need(stages=stages, microbatches=microbatches)
    rows = []
    for pp_rank in range(stages):
        row: list[Step] = []
        for step in _weave(_each("F", pp_rank, microbatches), _each("B", pp_rank, microbatches), stages - pp_rank - 1):
            row.append(step)
            if step.kind == "B" and step.microbatch >= pp_rank:
                row.append(Step("W", pp_rank, step.microbatch - pp_rank))
        row += _each("W", pp_rank, microbatches)[max(microbatches - pp_rank, 0) :]
        rows.append(row)
    return _schedule("zb", rows, _round_robin(stages, 1), microbatches)


def _interleaved_in_flight(stages: int, microbatches: int, chunks: int = 2) -> list[int]:
    before = (chunks - 1) * _rounds(stages, microbatches)[1] + 1
    return [min(chunks * microbatches, 2 * (stages - pp_rank - 1) + before) for pp_rank in range(stages)]


def _rounds(stages: int, microbatches: int) -> list[int]:
    """Where rounds of microbatches begin, and the end; the longest is the first."""
    rounds = max(1, microbatches // stages)
    return [-(-microbatches * at // rounds) for at in range(rounds + 1)]


@register_schedule("interleaved", searched=True, in_flight=_interleaved_in_flight, numbers=(2, 3, 4))
def interleaved(stages: int, microbatches: int, chunks: int = 2) -> Schedule:
    """1F1B with several stages per rank, stage k on pipeline rank k % stages: the bubble is `chunks` times smaller.

    Microbatches go in rounds of at least one per rank, each round through all stages of a rank. Rounds are about
    equal: a short last one would leave pipeline ranks waiting, while longer ones only need a little more memory.
    """
    _need(stages=stages, microbatches=microbatches, chunks=chunks)
    bounds = _rounds(stages, microbatches)
    order = [(chunk, at) for first, end in pairwise(bounds) for chunk in range(chunks) for at in range(first, end)]
    rows = []
    for pp_rank in range(stages):
        forwards = [Step("F", chunk * stages + pp_rank, at) for chunk, at in order]
        backwards = [Step("B", (chunks - 1 - chunk) * stages + pp_rank, at) for chunk, at in order]
        rows.append(_weave(forwards, backwards, 2 * (stages - pp_rank - 1) + (chunks - 1) * bounds[1]))
    return _schedule(
        "interleaved" if chunks == 2 else f"interleaved={chunks}", rows, _round_robin(stages, chunks), microbatches
    )


@register_schedule(
    "zbv", searched=True, in_flight=lambda p, m: [min(2 * m, 2 * p, m + 1 + pp_rank) for pp_rank in range(p)]
)
def zbv(stages: int, microbatches: int) -> Schedule:
    """ZB-V: stages k and 2 * stages - 1 - k on rank k, so that the last forward and first backward are on rank 0.

    Rank k starts when the first microbatch comes down, and (for F=B=W) is busy until its end:

        F down     2 * (stages - k) - 1 times
        F up, down k times
        F B W up   stages - k times
        F B W down, F B W up   until all backwards but `stages` are done, without the F when there is none left
        B down, B up           k times, their W left for the end
        B W down               stages - k times
        W up, W down           what was left
    """
    _need(stages=stages, microbatches=microbatches)
    full = max(microbatches, 2 * stages - 1)  # fewer run as these would, with what is missing left out
    rows = []
    for pp_rank in range(stages):
        down, up = _Lane(pp_rank), _Lane(2 * stages - 1 - pp_rank)
        row = down.next("F" * (2 * (stages - pp_rank) - 1))
        for _ in range(pp_rank):
            row += up.next("F") + down.next("F")
        for _ in range(stages - pp_rank):
            row += up.next("FBW")
        while up.done["B"] < full - pp_rank:
            row += down.next("FBW" if down.done["F"] < full else "BW")
            row += up.next("FBW" if up.done["F"] < full else "BW")
        for _ in range(pp_rank):
            row += down.next("B") + up.next("B")
        for _ in range(stages - pp_rank):
            row += down.next("BW")
        row += up.next("W" * (full - up.done["W"])) + down.next("W" * (full - down.done["W"]))
        rows.append(_first(microbatches, row))
    return _schedule("zbv", rows, _vee(stages), microbatches)


class _Lane:
    """The steps of one stage, each kind counted on its own."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.done: dict[StepKind, int] = {"F": 0, "B": 0, "W": 0}

    def next(self, kinds: str) -> list[Step]:
        steps = []
        for kind in cast(Iterable[StepKind], kinds):
            steps.append(Step(kind, self.stage, self.done[kind]))
            self.done[kind] += 1
        return steps


USUAL = KINDS["1f1b"]
"""The schedule of a pipeline for which nobody names one."""


def forward_only(stages: int | Sequence[Devices], microbatches: int) -> Schedule:
    """For inference. Takes the number of stages, or for each stage the devices that run it.

    Made as if every stage took the same time and read from the one before: right for all values that cross forward.
    """
    holders = _round_robin(stages) if isinstance(stages, int) else tuple(tuple(devices) for devices in stages)
    _need(stages=len(holders), microbatches=microbatches)
    return greedy(
        holders, microbatches, [UNIT] * len(holders), pairwise(range(len(holders))), kinds="F", name="forward"
    )


def with_prologue(schedule: Schedule, stages: Iterable[int]) -> Schedule:
    """The schedule with the prologues of these stages first, on all devices that run them."""
    chosen = sorted(set(stages))
    if unknown := [stage for stage in chosen if not 0 <= stage < schedule.stages]:
        raise ScheduleError(f"no prologue for the stages {unknown}: {schedule} has 0 to {schedule.stages - 1}")
    rows: dict[tuple[int, tuple[Step, ...]], tuple[Step, ...]] = {}  # devices that shared a row still do
    devices = []
    for device, steps in enumerate(schedule.devices):
        opening = tuple(Step("P", stage, 0) for stage in chosen if device in schedule.holders[stage])
        devices.append(rows.setdefault((id(steps), opening), opening + steps))
    return replace(schedule, devices=tuple(devices))


def fewer(schedule: Schedule, microbatches: int) -> Schedule:
    """The schedule for fewer microbatches: the last ones left out, for which no other waits."""
    if microbatches > schedule.microbatches:
        raise ScheduleError(f"{schedule} is for {schedule.microbatches} microbatches, not {microbatches}")
    devices = tuple(tuple(_first(microbatches, list(steps))) for steps in schedule.devices)
    return replace(schedule, devices=devices, microbatches=microbatches)


def spread(schedule: Schedule, pp_ranks: Sequence[Devices]) -> Schedule:
    """The schedule with several devices for each rank, which do the same: pp_ranks[0] are the devices of device 0.

    Ranks may differ in size. Every device from 0 on is in exactly one.
    """
    if len(pp_ranks) != len(schedule.devices):
        raise ScheduleError(
            f"{schedule} has {len(schedule.devices)} pipeline ranks, but devices are named for {len(pp_ranks)}"
        )
    rank_of = {device: pp_rank for pp_rank, devices in enumerate(pp_ranks) for device in devices}
    if sorted(device for devices in pp_ranks for device in devices) != list(range(len(rank_of))) or not all(pp_ranks):
        raise ScheduleError(
            f"the pipeline ranks {list(pp_ranks)} must have every device from 0 on exactly once, and none may be empty"
        )
    return replace(
        schedule,
        devices=tuple(schedule.devices[rank_of[device]] for device in range(len(rank_of))),
        holders=tuple(
            tuple(sorted(device for pp_rank in holders for device in pp_ranks[pp_rank])) for holders in schedule.holders
        ),
    )


def _round_robin(stages: int, chunks: int = 1) -> tuple[Devices, ...]:
    return tuple((stage % stages,) for stage in range(stages * chunks))


def _vee(stages: int) -> tuple[Devices, ...]:
    return tuple((pp_rank,) for pp_rank in (*range(stages), *reversed(range(stages))))


def _schedule(name: str, rows: Iterable[Iterable[Step]], holders: tuple[Devices, ...], microbatches: int) -> Schedule:
    return Schedule(devices=tuple(map(tuple, rows)), holders=holders, microbatches=microbatches, name=name)


def _each(kind: StepKind, stage: int, microbatches: int) -> list[Step]:
    return [Step(kind, stage, at) for at in range(microbatches)]


def _weave(forwards: list[Step], backwards: list[Step], ahead: int) -> list[Step]:
    """So many forwards first, then a forward and a backward in turn, then the backwards that are left."""
    row = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        row += (forward, backward)
    return row + backwards[max(len(forwards) - ahead, 0) :]


def _first(microbatches: int, row: list[Step]) -> list[Step]:
    """Without the microbatches from there on: what is left waits for none of them, and can run if all of it could."""
    return [step for step in row if step.microbatch < microbatches]


def _need(**counts: int) -> None:
    if wrong := [f"{name} is {count}" for name, count in counts.items() if count < 1]:
        raise ScheduleError(f"{', '.join(wrong)}; a schedule needs at least 1")

"""A schedule by its name, and what it knows about itself: what the planner, the memory model and drawings need.

    @register_schedule("mine")
    def mine(stages: int, microbatches: int) -> Schedule: ...

is all that a custom schedule needs. From then on plan strings ("pp=4,mine"), constraints, `shardwright simulate` and
plan="auto" (with `searched=True`) know it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial

from ..errors import ScheduleError
from .memory import in_flight
from .simulate import UNIT, simulate
from .step import Devices, Schedule

MakeSchedule = Callable[..., Schedule]
InFlight = Callable[..., Sequence[int]]

TYPICAL = (4, 16)
"""Pipeline ranks and microbatches of the schedule that `fill` is measured on."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ScheduleKind:
    """A schedule for any number of pipeline ranks and microbatches.

    name       as plan strings, constraints and the command line write it
    make       from the number of pipeline ranks and of microbatches to the schedule
    searched   whether plan="auto" tries it
    counted    microbatches of stages in flight on each rank, in closed form; without it they are counted step by step
    numbers    where it takes a number of virtual stages per rank (`interleaved=3`): those that plan="auto" tries, the
               first of which it has if none is given
    """

    name: str
    make: MakeSchedule
    searched: bool = False
    counted: InFlight | None = None
    numbers: tuple[int, ...] = ()

    @cached_property
    def stages_per_rank(self) -> int:
        """Stages of a pipeline rank; several are virtual stages."""
        return len(self.holders(1))

    @cached_property
    def splits_backward(self) -> bool:
        """Whether gradients of parameters are a step of their own, W."""
        return self.make(1, 1).splits_weights

    @cached_property
    def fill(self) -> float:
        """The fraction of the other stages' time that a microbatch waits for while the pipeline fills and drains."""
        pp_ranks, microbatches = TYPICAL
        schedule = self.make(pp_ranks, microbatches)
        edges = [(stage, stage + 1) for stage in range(schedule.stages - 1)]
        busy = sum(UNIT[:3]) * self.stages_per_rank
        idle = simulate(schedule, [UNIT] * schedule.stages, edges).total - microbatches * busy
        return idle / ((pp_ranks - 1) * busy)

    @lru_cache(maxsize=1024)  # noqa: B019 - kinds live as long as the process
    def holders(self, pp_ranks: int) -> tuple[Devices, ...]:
        """The pipeline rank of each stage."""
        return self.make(pp_ranks, 1).holders

    @lru_cache(maxsize=4096)  # noqa: B019
    def in_flight(self, pp_ranks: int, microbatches: int) -> tuple[float, ...]:
        """For each pipeline rank the most microbatches of its stages that are in flight at once."""
        if self.counted is None:
            return in_flight(self.make(pp_ranks, microbatches))
        return tuple(map(float, self.counted(pp_ranks, microbatches)))

    def steady(self, pp_ranks: int, microbatches: int) -> Schedule:
        """The schedule with as few microbatches as keep what is in flight the same."""
        few = min(microbatches, 3 * pp_ranks * self.stages_per_rank)
        alike = self.in_flight(pp_ranks, few) == self.in_flight(pp_ranks, microbatches)
        return self.make(pp_ranks, few if alike else microbatches)

    @lru_cache(maxsize=64)  # noqa: B019
    def with_number(self, number: int) -> ScheduleKind:
        """The same with so many virtual stages per rank."""
        if not self.numbers:
            raise ScheduleError(f"the schedule {self.name} takes no number; {_numbered()} does")
        if number == self.numbers[0]:
            return self
        counted = self.counted and partial(self.counted, chunks=number)
        name, make = f"{self.name}={number}", partial(self.make, chunks=number)
        return replace(self, name=name, make=make, counted=counted, numbers=())


KINDS: dict[str, ScheduleKind] = {}
"""The known schedules, by name."""


def register_schedule(
    name: str, *, searched: bool = False, in_flight: InFlight | None = None, numbers: tuple[int, ...] = ()
) -> Callable[[MakeSchedule], MakeSchedule]:
    """Make a function of the number of pipeline ranks and microbatches a schedule with a name; see `ScheduleKind`.

    A schedule with `numbers` takes a third argument, `chunks`.
    """
    if not re.fullmatch(r"[a-z0-9_]+", name):
        raise ScheduleError(f"{name!r} can't be the name of a schedule; use small letters, digits and underscores")

    def decorate(make: MakeSchedule) -> MakeSchedule:
        KINDS[name] = ScheduleKind(name=name, make=make, searched=searched, counted=in_flight, numbers=numbers)
        return make

    return decorate


def schedule_kind(name: str) -> ScheduleKind:
    """A known schedule by its name, with its number of virtual stages per rank if it takes one: "interleaved=3"."""
    word, equals, number = name.partition("=")
    if (colon := re.fullmatch(r"(\w+):(\w+)", name)) and colon[1] in KINDS:
        raise ScheduleError(f"write {colon[1]}={colon[2]} for {name}")
    if word not in KINDS:
        raise ScheduleError(f"there is no schedule {name!r}; the known ones are {schedule_names()}")
    if not equals:
        return KINDS[word]
    if not number.isdigit() or int(number) < 1:
        raise ScheduleError(f"{name} gives {word} {number!r}; it takes the number of virtual stages per pipeline rank")
    return KINDS[word].with_number(int(number))


def searched_kinds() -> list[ScheduleKind]:
    """The schedules that plan="auto" tries."""
    kinds = [kind for kind in KINDS.values() if kind.searched]
    return [each for kind in kinds for each in ([*map(kind.with_number, kind.numbers)] if kind.numbers else [kind])]


def schedule_names() -> str:
    """All that may be written, for messages: "gpipe, 1f1b, ..., interleaved, interleaved=3"."""
    return ", ".join(
        name for kind in KINDS.values() for name in (kind.name, *([f"{kind.name}=3"] if kind.numbers else []))
    )


def _numbered() -> str:
    return ", ".join(kind.name for kind in KINDS.values() if kind.numbers)

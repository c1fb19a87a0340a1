"""A plan for a graph, flat or as a pipeline, whichever is faster.

A flat plan is looked for first (`plan.auto`); pipelines have to be faster than it, or it does not fit. The best of
them are solved stage by stage (`refine`), and a walk through them says whether they fit; what it finds beyond the
sums is reserved, and they are solved again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...cluster import Cluster
from ...cost import Memory, Training
from ...rules import Analysis
from ..auto import Found, NothingFits, Progress, Wishes
from ..auto import search as search_flat
from ..frame import Frame
from ..limits import bind
from ..plan import Plan
from .asked import asked_of, axes_of, check_asked, needs_pipeline, nothing_found
from .made import Made
from .refine import Refiner, Solved
from .search import Piped, Search
from .seats import Seat
from .setup import Setup
from .trial import Trial, flights

ATTEMPTS = 4
"""How often a pipeline is solved until it fits: what comes and goes is known only when there is one."""

LEFT_OUT = (
    "the search: in a pipeline the outer axis of a stage splits the batch and nothing else, and the inner one lies "
    "inside of a node",
    "the search: pipelines are left out by estimates of their step, so that none of them is proved to be slower",
)

MOST_SOLVED = 4
"""Trials that are solved, the most promising first."""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A pipeline that was solved and walked through."""

    made: Made
    memory: tuple[Memory, ...]  # of each seat
    piped: Piped
    rooms: tuple[float, ...]  # bytes that a device of each seat may use

    def room(self, seat: int) -> float:
        return self.rooms[seat]

    @property
    def trial(self) -> Trial:
        return self.made.trial


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The plan, and what both searches found."""

    plan: Plan
    flat: Found | None
    pipeline: Pipeline | None
    piped: Piped | None


class Planner:
    """Solves the trials of a search over pipelines."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.search = setup, Search(setup)
        self.refiner = Refiner(self.search.fronts.where, setup.stop)

    def run(self) -> Pipeline | None:
        piped = self.search.run()
        self.piped = piped
        trials = [] if piped.best is None else [piped.best, *piped.others]
        best: Pipeline | None = None
        for number, trial in enumerate(trials):
            upper = min(self.setup.upper, math.inf if best is None else best.trial.seconds)
            if (number >= MOST_SOLVED and best is not None) or trial.seconds >= upper * (1.0 - self.setup.slack):
                break
            if best is not None and self.setup.stop():
                break
            found = self.solved(trial, piped)
            if found is not None and found.trial.seconds < upper:
                best = found
            self.setup.progress(f"solved {trial}", math.inf if best is None else best.trial.seconds)
        return best

    def solved(self, trial: Trial, piped: Piped) -> Pipeline | None:
        """A trial solved so that a walk through it fits; None if that was not found."""
        refiner = self.refiner
        over = [self.search.reserve] * len(trial.seats)
        for _ in range(ATTEMPTS):
            stages = self._stages(trial, refiner, over)
            if stages is None:
                return None
            again = self.search.timed_trial(
                trial.seats, trial.microbatches, trial.schedule, [held.stage for held in stages], trial.mixes,
                trial.bounds,
            )  # fmt: skip
            made = Made(
                trial=again,
                solved=tuple(stages),
                line=self.search.line,
                places=self.search.blocks.places,
                local=self.setup.local,
            )
            memory = made.memory(self.setup.cluster, self.setup.training)
            more = [held.peak - self.setup.room(seat) for held, seat in zip(memory, trial.seats, strict=True)]
            if max(more) <= 0:
                rooms = tuple(self.setup.room(seat) for seat in trial.seats)
                return Pipeline(made=made, memory=memory, piped=piped, rooms=rooms)
            over = [
                max(old, held.peak - again.memory(seat)) * 1.01 if more[seat] > 0 else old
                for seat, (old, held) in enumerate(zip(over, memory, strict=True))
            ]
        return None

    def _stages(self, trial: Trial, refiner: Refiner, over: Sequence[float]) -> list[Solved] | None:
        found = []
        flight = flights(trial.schedule, len(trial.seats), trial.microbatches)
        for part, seat in enumerate(trial.holders):
            own = trial.of_seat(seat)
            share = round(trial.parts[part].memory(flight[seat] / len(own)) / max(trial.memory(seat), 1.0), 2)
            room = (self.setup.room(trial.seats[seat]) - over[seat]) * (share if len(own) > 1 else 1.0)
            front = self.search.fronts.of(trial.seats[seat], trial.microbatches)
            assert front is not None
            begin, end = trial.bounds[part], trial.bounds[part + 1]
            solved = refiner.solve(front, begin, end, flight[seat] / len(own), room)
            if solved is None:
                return None
            found.append(solved)
        return found


def find(
    facts: Analysis,
    cluster: Cluster,
    training: Training,
    wishes: Wishes,
    *,
    size: int | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """The best plan for a graph on a cluster, flat or as a pipeline."""
    began, told = time.monotonic(), progress or (lambda what, best: None)
    limits = bind(wishes.constraints, facts)
    asked = asked_of(limits, wishes)
    only = needs_pipeline(asked, limits)
    frame = Frame(facts, cluster, training, limits, recompute=wishes.recompute)
    flat: Found | None = None
    fault: NothingFits | None = None
    try:
        flat = None if only else search_flat(facts, cluster, training, wishes, size=size, progress=progress, like=frame)
    except NothingFits as error:
        fault = error
    trained = facts.graph.entry.startswith("train")
    flat_only = asked.stages == 1 or wishes.data_only or not wishes.pipelines or not facts.live
    if not trained or (flat_only and not only):
        return _flat(flat, None, fault, None)

    def late() -> bool:
        said = wishes.stop is not None and wishes.stop()
        return said or time.monotonic() - began > wishes.seconds

    upper = math.inf if flat is None else flat.best.time
    setup = Setup(
        facts=facts,
        cluster=cluster,
        training=training,
        limits=limits,
        size=size or cluster.size,
        room=_room(cluster, training, wishes, limits.memory),
        recompute=wishes.recompute,
        local=wishes.local,
        names=axes_of(limits),
        asked=asked,
        frame=frame,
        slack=wishes.slack,
        upper=upper,
        stop=late,
        progress=lambda what, best: told(what, min(best, upper)),
    )
    planner = Planner(setup)
    check_asked(planner.search)
    found = planner.run()
    if found is None:
        return _flat(flat, planner.piped, fault, planner.search)
    notes = [f"keeps to {item.said}" for item in wishes.constraints.items]
    plan = found.made.plan(cluster, [*notes, *LEFT_OUT])
    return Outcome(plan=plan, flat=flat, pipeline=found, piped=planner.piped)


def _flat(flat: Found | None, piped: Piped | None, fault: NothingFits | None, search: Search | None) -> Outcome:
    """The flat plan, as there is no pipeline; or why there is none either."""
    if flat is not None:
        return Outcome(plan=flat.plan, flat=flat, pipeline=None, piped=piped)
    if fault is not None:
        raise fault
    assert search is not None
    raise nothing_found(search)


def _room(cluster: Cluster, training: Training, wishes: Wishes, memory: float) -> Callable[[Seat], float]:
    def room(seat: Seat) -> float:
        device = min(cluster.device(rank).memory for rank in (seat.devices[0], seat.devices[-1]))
        return min(memory, training.room(device) if wishes.memory is None else wishes.memory)

    return room


__all__ = ["Outcome", "Pipeline", "find"]

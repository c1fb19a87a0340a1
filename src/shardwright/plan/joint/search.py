"""The search over pipelines: stages, the devices and the mesh of each, microbatches, the schedule, cuts, recomputation.

    for every row of seats, number of microbatches and schedule    bound a step from below (`Search.bounded`)
    the most promising first                                       cut the line (`cuts`), each stage with the ways that
                                                                   fit its memory (`front`, `stage`), and simulate it
    until no bound is lower                                        than the best that was found

One stage with several microbatches is a pipeline too: gradients are added up within a step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ...cluster import Cluster, collective_time
from ...cost import Training, strides_of
from ...rules import Analysis
from ...schedule import kind_named
from ..limits import Limits
from ..segments import Line
from .blocks import Blocks, Where
from .cuts import cut_line
from .front import Front, Way
from .seats import Seat, rows_of_seats, seated
from .solver import Solver
from .stage import Choice, Stage, Sums, sums_of
from .timed import NEVER, Timed, fault_of_time
from .trial import Mix, Trial, flights, run_of

SCHEDULES = {"1f1b": 1.0, "zb": 1 / 3, "interleaved": 1 / 2, "interleaved:3": 1 / 3, "interleaved:4": 1 / 4, "zbv": 1 / 6}
"""The schedules that are looked at, and the part of a microbatch's time in all stages but one that is bubble, at best."""

MOST_COUNTS = 8
"""Numbers of microbatches that are looked at on some seats."""

KEPT_TRIALS = 40
"""Trials of which the next best are told."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is asked of a pipeline; None and () leave it open."""

    stages: int | None = None
    microbatches: int | None = None
    schedule: str | None = None


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a search for a pipeline stands on."""

    facts: Analysis
    cluster: Cluster
    training: Training
    limits: Limits
    size: int
    room: Callable[[Seat], float]  # bytes that a device of a seat may use
    recompute: bool = True
    local: bool = False  # the graph is that of one microbatch
    names: tuple[str, str] = ("x", "y")
    asked: Asked = field(default_factory=Asked)
    slack: float = 0.005
    upper: float = math.inf  # seconds that a pipeline has to stay below
    stop: Callable[[], bool] = lambda: False
    progress: Callable[[str, float], None] = lambda what, best: None


@dataclass(frozen=True, kw_only=True)
class Piped:
    """The best pipeline, the others that were tried (the fastest first), and what was looked at."""

    best: Trial | None
    others: tuple[Trial, ...]
    blocks: Blocks
    timed: Timed
    bound: float
    looked: int
    left: int  # candidates that were bounded away
    stopped: bool
    seconds: float


@dataclass(frozen=True, eq=False, slots=True)
class _Candidate:
    bound: float
    seats: tuple[Seat, ...]
    microbatches: int
    schedule: str


class Search:
    def __init__(self, setup: Setup) -> None:
        self.setup, self.facts, self.cluster = setup, setup.facts, setup.cluster
        self.line = Line(setup.facts)
        limits = setup.limits
        self.blocks = Blocks(self.line, setup.training, pivots=limits.pivots, uncut=limits.uncut.values())
        self.timed = Timed(
            setup.facts, setup.cluster, setup.training, limits, setup.names,
            recompute=setup.recompute, local=setup.local,
        )  # fmt: skip
        self.batch = setup.facts.graph.batch or 1
        self.fault = fault_of_time(setup.facts)
        self.began = time.monotonic()
        self.flights = flights
        self.best: Trial | None = None
        self.trials: list[Trial] = []
        self.reserve = standing_bytes(setup.facts)
        self.solver = Solver()
        self._fronts: dict[tuple[object, ...], Front | None] = {}
        self._quick: dict[tuple[object, ...], float] = {}
        self._kinds: dict[Seat, tuple[object, ...]] = {}
        self.where: dict[bool, Where] = {}
        self._entering: dict[tuple[object, ...], np.ndarray] = {}
        self._sums: dict[tuple[int, int], Sums] = {}

    @property
    def upper(self) -> float:
        best = math.inf if self.best is None else self.best.seconds
        return min(best, self.setup.upper) * (1.0 - self.setup.slack)

    def run(self) -> Piped:
        candidates = sorted(self.bounded(), key=lambda held: held.bound)
        looked, stopped, bound = 0, False, math.inf
        for candidate in candidates:
            if candidate.bound >= self.upper:
                bound = candidate.bound
                break
            if self.setup.stop():
                stopped = True
                break
            looked += 1
            trial = self.tried(candidate)
            if trial is not None:
                self.trials.append(trial)
                if trial.seconds < (self.best.seconds if self.best is not None else math.inf):
                    self.best = trial
                self.setup.progress(f"tried {trial}", self.best.seconds if self.best is not None else math.inf)
        others = sorted((held for held in self.trials if held is not self.best), key=lambda held: held.seconds)
        return Piped(
            best=self.best,
            others=tuple(others[:KEPT_TRIALS]),
            blocks=self.blocks,
            timed=self.timed,
            bound=min(bound, self.best.seconds if self.best is not None else math.inf),
            looked=looked,
            left=len(candidates) - looked,
            stopped=stopped,
            seconds=time.monotonic() - self.began,
        )

    def any_seat(self) -> Seat:
        """A seat of one device."""
        return Seat(devices=(0,), data=1, inner=1, names=self.setup.names)

    # -- candidates ------------------------------------------------------------------------

    def bounded(self) -> Iterator[_Candidate]:
        """Every candidate, with a step that it can't stay below."""
        asked = self.setup.asked
        for runs in rows_of_seats(self.cluster, self.setup.size):
            stages = sum(count for count, _, _ in runs)
            if stages > self.blocks.count or asked.stages not in (None, stages):
                continue
            for seats in seated(runs, self.cluster, self.setup.names):
                if not all(self.has_axes(seat) for seat in seats):
                    continue
                for microbatches in self.counts(seats):
                    quick = self.quick(seats, microbatches)
                    equal = len({len(seat.devices) for seat in seats}) == 1 and len(self.cluster.devices) == 1
                    for schedule in self.schedules(stages, microbatches):
                        fill = SCHEDULES.get(schedule, 1.0) if equal else 0.0
                        yield _Candidate(quick * (microbatches + fill * (stages - 1)), seats, microbatches, schedule)
            if self.setup.stop():
                return

    def has_axes(self, seat: Seat) -> bool:
        """Whether a seat has the axes that people name, in their sizes."""
        sizes = dict(zip(seat.names, (seat.data, seat.inner), strict=True))
        return all(
            sizes.get(name, 1) > 1 and all(one.size in (None, sizes[name]) for one in asked)
            for name, asked in self.setup.limits.axes.items()
        )

    def schedules(self, stages: int, microbatches: int) -> Iterator[str]:
        asked = self.setup.asked.schedule
        if stages == 1:
            yield asked or "1f1b"
            return
        for name in (asked,) if asked is not None else SCHEDULES:
            segments = {"zbv": 2, "interleaved": 2}.get(name, int(name.partition(":")[2] or 1))
            if stages * segments <= self.blocks.count and (segments == 1 or microbatches >= stages):
                yield name

    def counts(self, seats: Sequence[Seat]) -> list[int]:
        """Numbers of microbatches: the batch divides by them on all seats."""
        if any(self.batch % seat.data for seat in seats):
            return []
        rows = math.gcd(*(self.batch // seat.data for seat in seats))
        fitting = [count for count in range(1, rows + 1) if rows % count == 0]
        asked = self.setup.asked.microbatches
        if self.setup.local:
            return [asked or 1]
        if self.fault is not None:
            fitting = [1]
        if asked is not None:
            return [count for count in fitting if count == asked]
        if len(seats) == 1:
            fitting = fitting[1:]  # a flat plan is looked at elsewhere
        if len(fitting) <= MOST_COUNTS:
            return fitting
        wanted = [len(seats) * 2**power for power in range(-1, MOST_COUNTS - 2)]
        near = {min(fitting, key=lambda count: abs(math.log(count / wish))) for wish in wanted}
        return sorted({*near, fitting[-1]})

    def kind(self, seat: Seat) -> tuple[object, ...]:
        if seat not in self._kinds:
            self._kinds[seat] = seat.kind(self.cluster)
        return self._kinds[seat]

    def quick(self, seats: Sequence[Seat], microbatches: int) -> float:
        """Seconds of a microbatch on a seat, if all were equally fast: what is done once a step is left out."""
        speed = 0.0
        for seat in seats:
            device = self.cluster.device(seat.devices[0])
            key = (device, seat.data * (1 if self.setup.local else microbatches), seat.inner)
            if key not in self._quick:
                front = self.front(seat, microbatches)
                self._quick[key] = math.inf if front is None else front.least
            speed += 1.0 / self._quick[key]
        return 1.0 / speed if speed else math.inf

    # -- one candidate ---------------------------------------------------------------------

    def front(self, seat: Seat, microbatches: int) -> Front | None:
        key = (self.kind(seat), microbatches)
        if key not in self._fronts:
            plain = self.timed.tables(seat, microbatches)
            if plain is None:
                self._fronts[key] = None
            else:
                frame = self.timed.frame
                for skeleton in (frame.plain, frame.recomputing):
                    if bool(skeleton.layers) not in self.where:
                        self.where[bool(skeleton.layers)] = Where(skeleton, self.blocks)
                self._fronts[key] = Front(
                    plain, lambda: self.timed.tables(seat, microbatches, again=True), self.where, self.solver, microbatches
                )
        return self._fronts[key]

    def tried(self, candidate: _Candidate) -> Trial | None:
        """The best cuts of a candidate, simulated; None if nothing fits, or if it can't be the best."""
        seats, microbatches, schedule = candidate.seats, candidate.microbatches, candidate.schedule
        kind = kind_named(schedule)
        holders = [seat for (seat,) in kind.holders(len(seats))]
        flight = flights(schedule, len(seats), microbatches)
        if self.tight(candidate, flight, kind.segments) >= self.upper:
            return None
        width = self.width(len(holders))
        choices: list[Choice] = []
        known: dict[tuple[object, ...], Choice] = {}
        for seat in holders:
            key = (self.kind(seats[seat]), flight[seat])
            if key not in known:
                made = self.choice(seats[seat], microbatches, flight[seat], kind.segments, width)
                if made is None:
                    return None
                known[key] = made
            choices.append(known[key])
        pairs = [(seats[a], seats[b]) for a, b in zip([holders[0], *holders], holders, strict=False)]
        entering = [self.entering(giver, taker, microbatches) for giver, taker in pairs]
        stages = self.stages(choices, entering)
        both = [2.0 * more for more in entering]
        fill = SCHEDULES.get(schedule, 1.0)
        found = cut_line(stages, both, (microbatches - 1) * kind.segments, fill)
        if found is None or found.seconds >= self.upper:
            return None
        return self.simulated(candidate, choices, found.bounds)

    def tight(self, candidate: _Candidate, flight: Sequence[float], segments: int) -> float:
        """About what a step takes at least, if all seats share one memory."""
        seats, microbatches = candidate.seats, candidate.microbatches
        front = self.front(seats[0], microbatches)
        if len({self.kind(seat) for seat in seats}) > 1 or front is None:
            return candidate.bound
        room = sum(self.setup.room(seat) - self.reserve for seat in seats)
        least = front.least_within(2.0 ** math.floor(math.log2(max(1.0, min(flight) / segments))), room)
        fill = SCHEDULES.get(candidate.schedule, 1.0)
        return least * (microbatches / len(seats) + fill * (1 - 1 / len(seats)))

    def stages(self, choices: Sequence[Choice], entering: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Seconds of each stage: what it computes, or what its link is busy. Without the runs that are not allowed."""
        known: dict[tuple[int, int], np.ndarray] = {}
        found = []
        for choice, more in zip(choices, entering, strict=True):
            key = (id(choice), id(more))
            if key not in known:
                seconds = np.maximum(choice.seconds, more[: len(choice.seconds), None])
                for bound in self.blocks.pivots:
                    first = np.arange(seconds.shape[0])[:, None]
                    last = first + 1 + np.arange(seconds.shape[1])[None, :]
                    seconds = np.where((first < bound) & (bound < last), np.inf, seconds)
                known[key] = seconds
            found.append(known[key])
        return found

    def width(self, segments: int) -> int:
        """How many blocks a segment may have: all that are within some times its share of the work."""
        count = self.blocks.count
        if count <= 64 or segments <= 2:
            return count
        load = np.concatenate([[0.0], np.cumsum(np.add.reduceat(self.blocks.weights, self.blocks.places[:-1]))])
        most = 2.5 * load[-1] / segments
        ends = np.searchsorted(load, load[:-1] + most, side="right")
        return int(np.max(ends - np.arange(count)))

    def choice(self, seat: Seat, microbatches: int, flight: float, segments: int, width: int) -> Choice | None:
        front = self.front(seat, microbatches)
        if front is None or front.fastest is None:
            return None
        room = (self.setup.room(seat) - self.reserve) / segments
        each = flight / segments
        fastest = self.sums(front, front.fastest, width)
        ways: list[Way] = [front.fastest]
        if float((fastest.stored + each * fastest.kept).max()) > room:
            ways = front.ways(2.0 ** math.ceil(math.log2(max(1.0, each))))
        return Choice(front, ways, [self.sums(front, way, width) for way in ways], each, room)

    def sums(self, front: Front, way: Way, width: int) -> Sums:
        key = (id(way), width)
        if key not in self._sums:
            self._sums[key] = sums_of(front, way, width)
        return self._sums[key]

    def entering(self, giver: Seat, taker: Seat, microbatches: int) -> np.ndarray:
        """Seconds that the values of a microbatch take from one seat to another, for each bound."""
        ends = ((giver.devices[0], taker.devices[0]), (giver.devices[-1], taker.devices[-1]))
        spans = tuple(self.cluster.span(pair) for pair in ends) if giver.devices != taker.devices else ()
        key = (spans, microbatches, min(giver.data, taker.data))
        if key not in self._entering:
            rows, rest = self.blocks.crossing
            parts = 1 if self.setup.local else microbatches
            bytes = rows / parts / min(giver.data, taker.data) + rest
            measured = self.cluster.measured
            self._entering[key] = np.array([
                max((collective_time("send", held, span, measured) for span in spans), default=0.0)
                for held in bytes.tolist()
            ])  # fmt: skip
        return self._entering[key]

    def simulated(self, candidate: _Candidate, choices: Sequence[Choice], bounds: tuple[int, ...]) -> Trial:
        picked = [choice.pick(begin, end) for choice, begin, end in zip(choices, bounds[:-1], bounds[1:], strict=True)]
        stages, mixes = [stage for stage, _ in picked], tuple(mix for _, mix in picked)
        return self.timed_trial(candidate.seats, candidate.microbatches, candidate.schedule, stages, mixes, bounds)

    def timed_trial(
        self, seats: tuple[Seat, ...], microbatches: int, schedule: str, stages: Sequence[Stage],
        mixes: tuple[Mix, ...], bounds: tuple[int, ...],
    ) -> Trial:  # fmt: skip
        """A pipeline of these stages, with the time that it takes."""
        holders = [seat for (seat,) in kind_named(schedule).holders(len(seats))]
        links = tuple(
            float(self.entering(seats[giver], seats[taker], microbatches)[bound])
            for giver, taker, bound in zip(holders, holders[1:], bounds[1:], strict=False)
        )
        _, total = run_of(schedule, len(seats), microbatches, stages, links)
        once = max(
            sum(part.once for part, held in zip(stages, holders, strict=True) if held == seat)
            for seat in range(len(seats))
        )
        busy = sum(part.forward + part.backward for part in stages) * microbatches / len(seats)
        return Trial(
            seats=seats,
            microbatches=microbatches,
            schedule=schedule,
            parts=tuple(stages),
            mixes=mixes,
            bounds=bounds,
            links=links,
            seconds=self.setup.training.accumulate * total + once,
            once=once,
            bubble=1.0 - busy / total if total else 0.0,
        )


def standing_bytes(facts: Analysis) -> float:
    """Bytes of the batch as it is passed, of buffers and of constants, which every rank has whole."""
    graph, views = facts.graph, strides_of(facts.graph).views
    given = sum(graph.values[held.value].bytes for held in (*graph.inputs, *graph.buffers))
    made = [op for op in graph.ops if facts.is_constant(op) and op.name not in views]
    read = [name for op in made for name in op.outputs if any(not facts.is_constant(user) for user, _ in graph.users[name])]
    return float(given + sum(graph.values[name].bytes for name in read))


def search_pipelines(setup: Setup) -> Piped:
    """The best pipeline for a graph on a cluster."""
    return Search(setup).run()


__all__ = ["Asked", "NEVER", "Piped", "Setup", "replace", "search_pipelines"]

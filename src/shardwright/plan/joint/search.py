"""The search over pipelines: stages, the devices and the mesh of each, microbatches, the schedule, cuts, recomputation.

    for all pipeline ranks, numbers of microbatches, schedules     bound a step from below (`candidates`)
    the most promising first                                       cut the graph (`stage_cuts`), each stage by solutions
                                                                   that fit its memory (`stage_costs`); simulate it
    until no bound is lower                                        than the best that was found

One stage with several microbatches is gradient accumulation within a step, and is searched here too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

import numpy as np

from ...cluster import collective_time
from ...cost import strides_of
from ...rules import Analysis
from ...schedule import ScheduleKind
from ..stages import OpSequence
from .bounds import LeastCosts, idle_seconds, least_seconds, load_of
from .candidates import Mix, PipelineCandidate, PipelineCandidates, PipelineTrial, for_each, run_of
from .microbatch_tables import fault_of_time
from .pareto_front import StageSolution
from .ranks import PipelineSetup, RankDevices
from .stage_costs import StageChoice, StageCost, StageFronts
from .stage_cuts import Blocks, cut_into_stages

Prices = Callable[[RankDevices, float, float, float], LeastCosts | None]
"""For a pipeline rank, times of a microbatch, microbatches in flight and a memory limit: the least costs at some
prices."""

DIVES = 2
"""Candidates tried as soon as their bound is sure, so that there is soon a time to prune by."""

KEPT_TRIALS = 40
"""Trials from which the runners-up are reported."""


@dataclass(frozen=True, kw_only=True)
class PipelineSearchResult:
    """The best pipeline, the others that were tried (the fastest first), and how many were tried.

    bound     no candidate takes less: neither one that was pruned, nor one that was tried, whatever its cuts
    """

    best: PipelineTrial | None
    others: tuple[PipelineTrial, ...]
    blocks: Blocks
    bound: float
    tried: int
    pruned: int  # candidates pruned by their bound
    stopped: bool


class PipelineSearch:
    """One search. `fault` says why the batch can't be split into microbatches, if it can't."""

    def __init__(self, setup: PipelineSetup) -> None:
        self.setup, self.analysis, self.cluster = setup, setup.analysis, setup.cluster
        self.line, limits = OpSequence(setup.analysis), setup.limits
        self.blocks = Blocks(self.line, setup.training, pivots=limits.pivots, uncut=limits.uncut.values())
        self.fronts = StageFronts(setup, self.blocks)
        self.fault = fault_of_time(setup.analysis)
        self.candidates = PipelineCandidates(setup, self.blocks, self.fronts, can_split_batch=self.fault is None)
        self.reserve = standing_bytes(setup.analysis)
        self.leaving = self._leaving()
        self.best: PipelineTrial | None = None
        self.trials: list[PipelineTrial] = []
        self._entering: dict[tuple[object, ...], np.ndarray] = {}

    def _leaving(self) -> float:
        """Seconds to send the model's outputs to every rank, once a step; scalars are not counted."""
        values = [
            self.analysis.graph.values[output.value]
            for output in self.analysis.graph.outputs
            if output.value is not None
        ]
        bytes = sum(value.elements * self.setup.training.item(value) for value in values if value.shape)
        span = self.cluster.span(range(self.setup.size))
        return collective_time("broadcast", bytes, span, self.cluster.measured)

    @property
    def upper(self) -> float:
        best = math.inf if self.best is None else self.best.seconds
        return min(best, self.setup.upper) * (1.0 - self.setup.slack)

    def run(self) -> PipelineSearchResult:
        waiting = [(candidate.bound, number, candidate) for number, candidate in enumerate(self.candidates)]
        heapify(waiting)
        count, tried, stopped, bound, least = len(waiting), 0, False, math.inf, math.inf
        while waiting:
            lowest, number, candidate = heappop(waiting)
            if lowest >= self.upper:
                bound = lowest
                break
            if self.setup.stop():
                stopped, bound = True, lowest
                break
            if not candidate.sure:
                candidate = self.closer(candidate)
                if not candidate.sure or tried >= DIVES or candidate.bound >= self.upper:
                    heappush(waiting, (candidate.bound, number, candidate))
                    continue
            tried, least = tried + 1, min(least, candidate.bound)
            trial = self.tried(candidate)
            if trial is not None:
                self.trials.append(trial)
                if trial.seconds < (self.best.seconds if self.best is not None else math.inf):
                    self.best = trial
                self.setup.progress(f"tried {trial}", self.best.seconds if self.best is not None else math.inf)
        others = sorted((trial for trial in self.trials if trial is not self.best), key=lambda trial: trial.seconds)
        return PipelineSearchResult(
            best=self.best,
            others=tuple(others[:KEPT_TRIALS]),
            blocks=self.blocks,
            bound=min(bound, least, self.best.seconds if self.best is not None else math.inf),
            tried=tried,
            pruned=count - tried,
            stopped=stopped,
        )

    def single_device(self) -> RankDevices:
        """A pipeline rank of one device."""
        return RankDevices(devices=(0,), data=1, inner=1, names=self.setup.names)

    def tried(self, candidate: PipelineCandidate) -> PipelineTrial | None:
        """The best cuts of a candidate, simulated; None if nothing fits, or if it can't be the best."""
        pp_ranks, microbatches, schedule = candidate.pp_ranks, candidate.microbatches, candidate.schedule
        holders = [pp_rank for (pp_rank,) in schedule.holders(len(pp_ranks))]
        flight = schedule.in_flight(len(pp_ranks), microbatches)
        if self.tight(candidate) >= self.upper:
            return None
        width = self.width(len(holders))
        choices: list[StageChoice] = []
        known: dict[tuple[object, ...], StageChoice] = {}
        for pp_rank in holders:
            key = (self.fronts.kind(pp_ranks[pp_rank]), flight[pp_rank])
            if key not in known:
                choice = self.choice(pp_ranks[pp_rank], microbatches, flight[pp_rank], schedule.stages_per_rank, width)
                if choice is None:
                    return None
                known[key] = choice
            choices.append(known[key])
        pairs = [(pp_ranks[a], pp_ranks[b]) for a, b in zip([holders[0], *holders], holders, strict=False)]
        entering = [self.entering(sender, receiver, microbatches) for sender, receiver in pairs]
        stages = self.stages(choices, entering)
        both = [2.0 * more for more in entering]
        cuts = cut_into_stages(stages, both, (microbatches - 1) * schedule.stages_per_rank, schedule.fill)
        if cuts is None or cuts.seconds >= self.upper:
            return None
        return self.simulated(candidate, choices, cuts.bounds)

    def closer(self, candidate: PipelineCandidate) -> PipelineCandidate:
        """The same with the next better bound, the cheapest first."""
        if not candidate.within:
            return self.within(candidate)
        bounded = self.candidates.by_now(candidate)
        return bounded if bounded.bound > candidate.bound * (1 + 1e-9) else self.candidates.sure(candidate)

    def within(self, candidate: PipelineCandidate) -> PipelineCandidate:
        """The same with a bound that takes memory into account."""
        microbatches, bounded = candidate.microbatches, replace(candidate, within=True)

        def priced(pp_rank: RankDevices, times: float, flight: float, room: float) -> LeastCosts | None:
            return self.fronts.floor(pp_rank, microbatches, times, flight)

        if self.roomy(candidate):
            return bounded
        alone = for_each(candidate.pp_ranks, candidate.alike, self.fronts.rough, microbatches)
        return replace(bounded, bound=max(candidate.bound, self.bounded(candidate, alone, priced)))

    def roomy(self, candidate: PipelineCandidate) -> bool:
        """Whether the memory of all pipeline ranks together is ample, so that bounds can ignore it."""
        pp_ranks, microbatches = candidate.pp_ranks, candidate.microbatches
        flight = candidate.schedule.in_flight(len(pp_ranks), microbatches)
        each = candidate.schedule.stages_per_rank
        rooms = sum(len(alike) * (self.setup.room(pp_ranks[alike[0]]) - self.reserve) for alike in candidate.alike)
        return all(
            self.fronts.fits(pp_ranks[alike[0]], microbatches, min(flight[number] for number in alike) / each, rooms)
            for alike in candidate.alike
        )

    def tight(self, candidate: PipelineCandidate) -> float:
        """Roughly the least step time, from the fronts of its ranks, if all ranks of a kind shared one memory."""
        microbatches = candidate.microbatches

        def priced(pp_rank: RankDevices, times: float, flight: float, room: float) -> LeastCosts | None:
            front = self.fronts.of(pp_rank, microbatches)
            if front is None or front.fastest is None:
                return LeastCosts(np.zeros(1), np.array([math.inf]))
            return front.tight(times, 2.0 ** math.floor(math.log2(max(1.0, flight))), room)

        alone = for_each(candidate.pp_ranks, candidate.alike, self.fronts.quick, microbatches)
        return self.bounded(candidate, alone, priced)

    def bounded(self, candidate: PipelineCandidate, alone: Sequence[float], priced: Prices) -> float:
        """The least step time, from the least costs of all blocks on each kind of rank at some prices of memory.

        `alone`: seconds of a microbatch if each rank ran all blocks, ignoring memory.
        """
        pp_ranks, microbatches, fill = candidate.pp_ranks, candidate.microbatches, candidate.schedule.fill
        flight = candidate.schedule.in_flight(len(pp_ranks), microbatches)
        each = candidate.schedule.stages_per_rank
        same = len(candidate.alike) == 1
        times = microbatches + fill * (len(pp_ranks) - 1) if same else float(microbatches)
        loads = []
        for alike in candidate.alike:
            pp_rank, in_flight = pp_ranks[alike[0]], min(flight[number] for number in alike) / each
            room = self.setup.room(pp_rank) - self.reserve
            costs = priced(pp_rank, times, in_flight, room * len(alike) if same else room)
            if costs is None:
                return candidate.bound
            loads.append(load_of(len(alike), costs, room))
        return least_seconds(loads) + self.leaving + (0.0 if same else idle_seconds(alone, fill))

    def stages(self, choices: Sequence[StageChoice], entering: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Seconds of each stage: its compute, or its link if that is slower. Runs across a pivot are infinite."""
        known: dict[tuple[int, int], np.ndarray] = {}
        stages = []
        for choice, more in zip(choices, entering, strict=True):
            key = (id(choice), id(more))
            if key not in known:
                seconds = np.maximum(choice.seconds, more[: len(choice.seconds), None])
                for bound in self.blocks.pivots:
                    first = np.arange(seconds.shape[0])[:, None]
                    last = first + 1 + np.arange(seconds.shape[1])[None, :]
                    seconds = np.where((first < bound) & (bound < last), np.inf, seconds)
                known[key] = seconds
            stages.append(known[key])
        return stages

    def width(self, stages: int) -> int:
        """The most blocks a stage may have: those within 2.5 times its share of the work."""
        count = self.blocks.count
        if count <= 64 or stages <= 2:
            return count
        load = np.concatenate([[0.0], np.cumsum(np.add.reduceat(self.blocks.weights, self.blocks.places[:-1]))])
        most = 2.5 * load[-1] / stages
        ends = np.searchsorted(load, load[:-1] + most, side="right")
        return int(np.max(ends - np.arange(count)))

    def choice(
        self, pp_rank: RankDevices, microbatches: int, flight: float, stages: int, width: int
    ) -> StageChoice | None:
        front = self.fronts.of(pp_rank, microbatches)
        if front is None or front.fastest is None:
            return None
        room = (self.setup.room(pp_rank) - self.reserve) / stages
        each = flight / stages
        fastest = self.fronts.sums(front, front.fastest, width)
        solutions: list[StageSolution] = [front.fastest]
        if float((fastest.stored + each * fastest.saved).max()) > room:
            solutions = front.solutions(2.0 ** math.ceil(math.log2(max(1.0, each))))
        return StageChoice(
            front, solutions, [self.fronts.sums(front, solution, width) for solution in solutions], each, room
        )

    def entering(self, sender: RankDevices, receiver: RankDevices, microbatches: int) -> np.ndarray:
        """Seconds to send the values of a microbatch from one pipeline rank to another, for each bound."""
        ends = ((sender.devices[0], receiver.devices[0]), (sender.devices[-1], receiver.devices[-1]))
        spans = tuple(self.cluster.span(pair) for pair in ends) if sender.devices != receiver.devices else ()
        key = (spans, microbatches, min(sender.data, receiver.data))
        if key not in self._entering:
            batched, unbatched = self.blocks.crossing
            bytes = batched / self.setup.parts(microbatches) / min(sender.data, receiver.data) + unbatched
            measured = self.cluster.measured
            self._entering[key] = np.array([
                max((collective_time("send", size, span, measured) for span in spans), default=0.0)
                for size in bytes.tolist()
            ])  # fmt: skip
        return self._entering[key]

    def simulated(
        self, candidate: PipelineCandidate, choices: Sequence[StageChoice], bounds: tuple[int, ...]
    ) -> PipelineTrial:
        picked = [choice.pick(begin, end) for choice, begin, end in zip(choices, bounds[:-1], bounds[1:], strict=True)]
        stages, mixes = [stage for stage, _ in picked], tuple(mix for _, mix in picked)
        return self.timed_trial(candidate.pp_ranks, candidate.microbatches, candidate.schedule, stages, mixes, bounds)

    def timed_trial(
        self, pp_ranks: tuple[RankDevices, ...], microbatches: int, schedule: ScheduleKind, stages: Sequence[StageCost],
        mixes: tuple[Mix, ...], bounds: tuple[int, ...],
    ) -> PipelineTrial:  # fmt: skip
        """A pipeline of these stages, with its simulated time."""
        holders = [pp_rank for (pp_rank,) in schedule.holders(len(pp_ranks))]
        links = tuple(
            float(self.entering(pp_ranks[sender], pp_ranks[receiver], microbatches)[bound])
            for sender, receiver, bound in zip(holders, holders[1:], bounds[1:], strict=False)
        )
        _, total = run_of(schedule, len(pp_ranks), microbatches, stages, links)
        once = self.leaving + max(
            sum(part.once for part, holder in zip(stages, holders, strict=True) if holder == pp_rank)
            for pp_rank in range(len(pp_ranks))
        )
        busy = sum(part.forward + part.backward for part in stages) * microbatches / len(pp_ranks)
        return PipelineTrial(
            pp_ranks=pp_ranks,
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


def standing_bytes(analysis: Analysis) -> float:
    """Bytes of the batch as passed, of buffers and of constants, which are replicated on every rank."""
    graph, views = analysis.graph, strides_of(analysis.graph).views
    names = {item.value for item in graph.inputs} | {item.value for item in graph.buffers}
    for op in graph.ops:
        if analysis.is_constant(op) and op.name not in views:
            users = [user for name in op.outputs for user, _ in graph.users[name]]
            names |= set() if all(analysis.is_constant(user) for user in users) else set(op.outputs)
    return float(sum(graph.values[name].bytes for name in names))

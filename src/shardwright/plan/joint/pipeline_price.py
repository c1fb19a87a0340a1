"""What a plan with stages or microbatches costs, as numbers that add up, and as a plan file has them.

Devices of different stages do different work. Parts of a step are of a **mean device**: what all pipeline ranks take,
divided by their number, so that they add up to the step. `price_stages.py` makes these numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ...cost.resources import Resource
from ...memory import MemoryPeak, StageMemory
from ...schedule import StageEdge, show_devices
from ..digest import AxisUse, fold_parts, stored_bytes
from ..plan import Plan
from ..price import memory_as_json, short
from ..priced_parts import PricedCollective, PricedPart, PricedTables, SentMessage, most_expensive_first, totals
from .solved_stages import layers_of_part
from .stage_costs import StageCost


@dataclass(frozen=True, eq=False, kw_only=True)
class PricedStage:
    """One stage: its cost, the entries of the tables that are its own, and what a microbatch uses."""

    cost: StageCost
    priced: PricedTables
    used: np.ndarray
    keys: frozenset[str]  # of its parameters


@dataclass(frozen=True, eq=False, kw_only=True)
class PipelinePrice:
    """A step of a plan with stages or microbatches. Times are of a mean device, except for `once`."""

    made_for: Mapping[str, Any]
    plan: Plan
    entry: str
    microbatches: int
    accumulate: int
    stages: tuple[PricedStage, ...]
    holders: tuple[int, ...]  # the pipeline rank of each stage
    links: Mapping[tuple[int, int], StageEdge]  # from a stage to a later one
    crossing_bytes: Mapping[tuple[int, int], tuple[float, float]]  # of a microbatch there, forward and backward
    run: float  # seconds of the schedule
    once: float  # gradient sync and update of the slowest pipeline rank, and what sends outputs to all ranks
    throughput: Mapping[str, Any]
    axes: tuple[AxisUse, ...]
    names: tuple[str, ...]  # links between stages
    memory: tuple[MemoryPeak, ...]  # of each pipeline rank
    limits: tuple[float, ...]
    simulated: tuple[StageMemory, ...] = ()  # of each stage, unless the memory was known before

    @property
    def seconds(self) -> float:
        return self.accumulate * self.run + self.once

    @property
    def peak_memory(self) -> float:
        """Bytes of the device that needs most, at its worst moment."""
        return max(peak.peak for peak in self.memory)

    @property
    def pp_ranks(self) -> int:
        return len(self.memory)

    @property
    def times(self) -> int:
        """How often each stage runs in a step."""
        return self.microbatches * self.accumulate

    def _mean(self, *resources: Resource) -> float:
        return float(sum(stage.used[at] for stage in self.stages for at in resources)) * self.times / self.pp_ranks

    @property
    def compute(self) -> float:
        return self._mean(Resource.COMPUTE_FORWARD, Resource.COMPUTE_BACKWARD)

    @property
    def waited(self) -> float:
        """Blocking communication inside of stages."""
        return self._mean(Resource.SEND_FORWARD, Resource.SEND_BACKWARD)

    @property
    def overlapped(self) -> float:
        return self._mean(Resource.BESIDE_FORWARD, Resource.BESIDE_BACKWARD)

    @property
    def busy(self) -> float:
        return sum(stage.cost.forward + stage.cost.backward for stage in self.stages) * self.times / self.pp_ranks

    @property
    def exposed(self) -> float:
        """The overlapped communication inside of stages that kernels do not hide."""
        shown = self.busy - self.compute - self.waited
        return shown if shown > 1e-9 * self.seconds else 0.0

    @property
    def bubble(self) -> float:
        """Seconds in which a device waits for other stages, and for messages."""
        shown = self.accumulate * self.run - self.busy
        return shown if shown > 1e-9 * self.seconds else 0.0

    @property
    def balance(self) -> float:
        """How much longer the slowest pipeline rank computes than the mean."""
        busy = [0.0] * self.pp_ranks
        for stage, pp_rank in zip(self.stages, self.holders, strict=True):
            busy[pp_rank] += stage.cost.forward + stage.cost.backward
        return max(busy) * len(busy) / sum(busy) if sum(busy) else 1.0

    @cached_property
    def sent(self) -> tuple[PricedCollective, ...]:
        """The collectives of a mean device, and its messages to other stages, which the bubble has waited for."""
        share = 1.0 / self.pp_ranks
        every = totals([*(sent for stage in self.stages for sent in stage.priced.messages()), *self._messages()])
        return tuple(
            replace(sent, seconds=share * sent.seconds, bytes=share * sent.bytes, hidden=share * sent.hidden)
            for sent in every
        )

    def _messages(self) -> Iterator[SentMessage]:
        for pair, edge in self.links.items():
            directions = zip(
                ("forward", "backward"), (edge.forward, edge.backward), self.crossing_bytes[pair], strict=True
            )
            for when, seconds, bytes in directions:
                if seconds is not None:
                    taken = self.times * seconds
                    yield SentMessage(when, "send", ("pp",), taken, self.times * bytes, True, taken)

    def _parts(self, parts: Iterator[PricedPart]) -> tuple[PricedPart, ...]:
        share = 1.0 / self.pp_ranks
        return most_expensive_first(replace(part, seconds=share * part.seconds) for part in parts)

    def as_json(self) -> dict[str, Any]:
        """For a plan file."""
        worst = max(range(self.pp_ranks), key=lambda pp_rank: self.memory[pp_rank].peak / self.limits[pp_rank])
        ops = self._parts(part for stage in self.stages for part in stage.priced.ops())
        edges = self._parts(part for stage in self.stages for part in stage.priced.edges())
        homes = [(stage.priced.tables, stage.priced.states, stage.keys) for stage in self.stages]
        return {
            "for": dict(self.made_for),
            "seconds": short(self.seconds),
            "compute": short(self.compute),
            "blocking": short(self.waited),
            "overlapped": short(self.overlapped),
            "exposed": short(self.exposed),
            "bubble": short(self.bubble),
            "update": short(self.once),
            "throughput": dict(self.throughput),
            "axes": [use.as_json() for use in self.axes],
            "stored": {how: int(size) for how, size in stored_bytes(homes).items()},
            "sent": [sent.as_json() for sent in self.sent],
            "ops": fold_parts(ops),
            "edges": fold_parts(edges),
            "pipeline": {
                "bubble": short(self.bubble / (self.accumulate * self.run)) if self.run else 0.0,
                "balance": short(self.balance),
                "links": list(self.names),
                "stages": [self._stage(number) for number in range(len(self.stages))],
            },
            **memory_as_json(self.memory[worst], self.limits[worst]),
        }

    def _stage(self, number: int) -> dict[str, Any]:
        planned, cost = self.plan.entries[self.entry][number], self.stages[number].cost
        devices = planned.mesh.devices
        enters = [edge.forward for (_, receiver), edge in self.links.items() if receiver == number]
        return {
            "devices": show_devices(devices),
            "mesh": str(planned.mesh),
            "layers": layers_of_part(tuple(planned.choices)),
            "recompute": len(planned.recompute),
            "forward": short(cost.forward),
            "backward": short(cost.backward),
            "weight": short(cost.weight),
            "blocking": short(cost.waited),
            "once": short(cost.once),
            "enters": short(max(enters, default=0.0)),
            "memory": int(self.memory[self.holders[number]].peak),
        }

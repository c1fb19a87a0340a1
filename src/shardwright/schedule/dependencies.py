"""What waits for what, as numbers: the one graph that both the check and the simulation traverse.

A message is sent when a step ends and awaited when the step that reads it begins. So a step waits for the step before
it on each of its devices, and for its messages. Nothing else can hold it up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from .step import STEP_KINDS, Devices, Schedule, Step, StepKind


class StageEdge(NamedTuple):
    """A value that crosses from one stage to a later one.

    forward    seconds that it takes for one microbatch
    backward   seconds that its gradient takes; None for a value without gradient
    """

    source: int
    target: int
    forward: float = 0.0
    backward: float | None = 0.0


Edges = Iterable[StageEdge | tuple[int, int]]


class StepMessage(NamedTuple):
    """What a step sends when it ends: to the step `offset` further on, over these links."""

    offset: int
    links: tuple[int, ...]
    seconds: float


@dataclass(slots=True, kw_only=True)
class Dependencies:
    """The steps of a schedule as numbers 0 to n, those of one kind and stage next to each other.

    groups    devices that run the same steps, at the same time
    rows      for each group its steps
    after     for each step those that follow it on its groups
    sends     for each kind and stage, found at step // microbatches, the messages
    waits     for each step, how many things it waits for
    links     how many there are: one for each ordered pair of groups that communicate
    """

    stages: int
    microbatches: int
    groups: tuple[Devices, ...]
    rows: list[list[int]]
    after: list[tuple[int, ...]]
    sends: list[list[StepMessage]]
    waits: list[int]
    links: int

    def step(self, number: int) -> Step:
        block, microbatch = divmod(number, self.microbatches)
        kind, stage = divmod(block, self.stages)
        return Step(STEP_KINDS[kind], stage, microbatch)

    def sources(self, number: int) -> Iterator[int]:
        """The steps whose messages a step awaits."""
        for block, messages in enumerate(self.sends):
            for message in messages:
                source = number - message.offset
                if source // self.microbatches == block:
                    yield source


def merged(edges: Edges) -> dict[tuple[int, int], StageEdge]:
    """One edge for all values between the same two stages."""
    joined: dict[tuple[int, int], StageEdge] = {}
    for edge in (StageEdge(*edge) for edge in edges):
        pair = edge.source, edge.target
        old = joined.get(pair, StageEdge(*pair, 0.0, None))
        backward = edge.backward if old.backward is None else old.backward + (edge.backward or 0.0)
        joined[pair] = StageEdge(*pair, old.forward + edge.forward, backward)
    return joined


def dependencies_of(schedule: Schedule, edges: Edges) -> Dependencies:
    """The wiring of a schedule that has each step once, on the devices of its stage."""
    microbatches, stages = schedule.microbatches, schedule.stages
    groups = schedule.groups()
    first = {
        (kind, stage): (at * stages + stage) * microbatches
        for at, kind in enumerate(STEP_KINDS)
        for stage in range(stages)
    }
    rows = [
        [first[kind, stage] + microbatch for kind, stage, microbatch in schedule.devices[devices[0]]]
        for devices in groups
    ]
    after: list[tuple[int, ...]] = [()] * (len(STEP_KINDS) * stages * microbatches)
    waits = [0] * len(after)
    for row in rows:
        for number, following in pairwise(row):
            after[number] += (following,)
            waits[following] += 1
    links: dict[tuple[int, int], int] = {}
    sends: list[list[StepMessage]] = [[] for _ in range(len(STEP_KINDS) * stages)]
    places = [_places(groups, devices) for devices in schedule.holders]
    for source, target, kind, seconds in _messages(merged(edges).values(), backward=not schedule.inference):
        pairs = [(a, b) for a in places[source] for b in places[target] if a != b]
        if places[source] == places[target]:
            pairs = []
        used = tuple(links.setdefault(pair, len(links)) for pair in pairs)
        begin, end = first[kind, source], first[kind, target]
        sends[begin // microbatches].append(StepMessage(end - begin, used, seconds))
        for number in range(end, end + microbatches):
            waits[number] += 1
    return Dependencies(
        stages=stages,
        microbatches=microbatches,
        groups=groups,
        rows=rows,
        after=after,
        sends=sends,
        waits=waits,
        links=len(links),
    )


def _places(groups: tuple[Devices, ...], holders: Devices) -> list[int]:
    members = set(holders)
    return [at for at, group in enumerate(groups) if group[0] in members]


def _messages(edges: Iterable[StageEdge], *, backward: bool) -> Iterator[tuple[int, int, StepKind, float]]:
    for edge in edges:
        yield edge.source, edge.target, "F", edge.forward
        if backward and edge.backward is not None:
            yield edge.target, edge.source, "B", edge.backward

"""Random schedules over random graphs of stages, good ones and broken ones."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from shardwright.schedule import Schedule, StageEdge, Step


def chain(stages: int, *seconds: float) -> list[StageEdge]:
    return [StageEdge(stage, stage + 1, *seconds) for stage in range(stages - 1)]


def graph(random: Random, stages: int) -> list[StageEdge]:
    """Values from any stage to any later one, some without gradient."""
    pairs = [(a, b) for b in range(stages) for a in range(b) if random.random() < 0.5]
    return [StageEdge(a, b, random.random(), random.choice([None, 0.0, random.random()])) for a, b in pairs]


def good(random: Random, edges: list[StageEdge], stages: int) -> Schedule:
    """Every device runs its part of one order in which everything comes after what it needs."""
    devices, microbatches = random.randint(1, 4), random.randint(1, 4)
    holders = tuple(
        tuple(sorted(random.sample(range(devices), 1 if random.random() < 0.7 else random.randint(1, devices))))
        for _ in range(stages)
    )
    kinds = random.choice(["F", "FB", "FB", "FBW", "FBW"])
    before: dict[Step, set[Step]] = {}
    for stage in range(stages):
        opening = [Step("P", stage, 0)] if random.random() < 0.3 else []
        before.update({step: set() for step in opening})
        for at in range(microbatches):
            parts = kinds if random.random() < 0.8 else kinds.replace("W", "")
            last = opening
            for kind in parts:
                step = Step(kind, stage, at)
                before[step], last = set(last), [step]
    for edge in edges:
        for at in range(microbatches):
            before[Step("F", edge.target, at)].add(Step("F", edge.source, at))
            if "B" in kinds and edge.backward is not None:
                before[Step("B", edge.source, at)].add(Step("B", edge.target, at))
    order = shuffled(random, before)
    rows = [tuple(step for step in order if device in holders[step.stage]) for device in range(devices)]
    return Schedule(devices=tuple(rows), holders=holders, microbatches=microbatches, name="random")


def shuffled(random: Random, before: dict[Step, set[Step]]) -> list[Step]:
    order: list[Step] = []
    left = {step: set(needs) for step, needs in before.items()}
    while left:
        step = random.choice([step for step, needs in left.items() if not needs])
        del left[step]
        order.append(step)
        for needs in left.values():
            needs.discard(step)
    return order


def reordered(random: Random, schedule: Schedule) -> Schedule:
    """Every device in an order of its own, each stage's microbatch still forward first: many of these can't run."""
    rows = []
    for steps in schedule.devices:
        before: dict[Step, set[Step]] = {}
        for step in steps:
            same = [other for other in steps if other[1:] == step[1:] or (other[0] == "P" and other[1] == step[1])]
            before[step] = {other for other in same if "PFBW".index(other.kind) < "PFBW".index(step.kind)}
        rows.append(tuple(shuffled(random, before)))
    return replace(schedule, devices=tuple(rows))


def mutated(random: Random, schedule: Schedule) -> Schedule:
    """One thing changed: two steps swapped, one dropped, doubled, or moved to another device."""
    rows = [list(row) for row in schedule.devices]
    device = random.choice([at for at, row in enumerate(rows) if row])
    row, other = rows[device], random.choice(rows)
    at = random.randrange(len(row))
    match random.choice(["swap", "swap", "near", "drop", "double", "move"]):
        case "swap":
            to = random.randrange(len(row))
            row[at], row[to] = row[to], row[at]
        case "near":
            row.insert(at, row.pop(min(at + 1, len(row) - 1)))
        case "drop":
            row.pop(at)
        case "double":
            row.insert(random.randint(0, len(row)), row[at])
        case "move":
            step = row.pop(at)
            other.insert(random.randint(0, len(other)), step)
    return replace(schedule, devices=tuple(map(tuple, rows)))

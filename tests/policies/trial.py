"""One trial: a random model, a random policy for it, and whether the program is right or refused.

A policy is a list of verbs, drawn at random such that most of them make sense for the model. `policy_of` runs them on
a builder. A trial fails if results differ, or if something else is raised than an error of ours.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import shardwright as sw
from shardwright.errors import ShardwrightError
from shardwright.ir import Graph
from shardwright.parallelize import captured_graph
from shardwright.policy import PolicyBuilder, repeated
from shardwright.rules import analyse

from .nets import random_case

BATCH = 8
MODELS = 40
"""Different models: what a trial draws anew is the policy."""

Verb = tuple[str, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a trial: the verbs, and why it was refused or what is wrong, if it is one of these."""

    seed: int
    verbs: tuple[Verb, ...]
    ending: str
    refused: str = ""
    fault: str = ""

    def __str__(self) -> str:
        calls = "\n".join(f"    {name}{args}{kwargs}" for name, args, kwargs in self.verbs)
        return f"seed {self.seed}, {self.ending}: {self.fault or self.refused or 'the same'}\n{calls}"


class PolicyDraw:
    """Draws the verbs of a policy for a graph."""

    def __init__(self, graph: Graph, draw: random.Random) -> None:
        self.graph, self.draw = graph, draw
        self.analysis = analyse(graph)
        self.world = draw.choice((2, 2, 4))
        self.blocks = sorted({op.module_path.split(".")[1] for op in graph.ops if op.module_path.startswith("blocks.")})
        self.verbs: list[Verb] = []

    def run(self) -> tuple[Verb, ...]:
        draw, world = self.draw, self.world
        self.staged = draw.random() < 0.45
        per_stage = draw.choice([size for size in (1, 2) if size < world or not self.staged]) if self.staged else world
        names = draw.sample(["dp", "tp", "ep", "cp"], 2)
        sizes = {1: [], 2: [2], 4: draw.choice([[4], [2, 2]])}[per_stage]
        self.mesh = dict(zip(names, sizes, strict=False))
        self.add("PolicyBuilder", **self.mesh)
        if self.staged:
            self._places(world // per_stage, per_stage)
        verbs: list[Callable[[], None]] = [self._split] * 6 + [self._batch] * 2
        verbs += [self._replicate, self._store, self._store, self._recompute, self._chunk, self._tie]
        for _ in range(draw.randint(1, 7)):
            if self.mesh:
                draw.choice(verbs)()
            else:
                draw.choice([self._recompute, self._chunk])()
        if self.staged or draw.random() < 0.3:
            self._schedule()
        self.ending = draw.choice(["build"] * 8 + ["search"] + ["repeat"])
        if self.ending == "repeat":
            self.world *= 2
        return tuple(self.verbs)

    def add(self, name: str, *args: Any, **kwargs: Any) -> None:
        self.verbs.append((name, args, kwargs))

    def _target(self) -> str:
        block = self.draw.choice(self.blocks)
        near = [op for op in self.graph.ops if op.module_path.startswith(f"blocks.{block}")]
        return self.draw.choice([
            f"blocks.{block}", "blocks.*", "head", "embed", "norm", self.draw.choice(near).name,
            self.draw.choice(near).name, self.draw.choice(self.graph.ops).name,
        ])  # fmt: skip

    def _split(self) -> None:
        op = self.draw.choice([op for op in self.analysis.live if self.analysis.signatures[op.name].roles])
        role = self.draw.choice(self.analysis.signatures[op.name].roles)
        target = self.draw.choice([op.name, op.name, op.module_path or op.name])
        self.add("split", target, self.draw.choice([role.name, role.label, None, 0]), over=self._axis())

    def _batch(self) -> None:
        self.add("split", self.draw.choice(["", "", self._target()]), self.draw.choice(["batch", "batch", "sequence"]),
                 over=self._axis())  # fmt: skip

    def _replicate(self) -> None:
        self.add("replicate", self._target(), over=self.draw.choice([None, self._axis()]))

    def _store(self) -> None:
        key = self.draw.choice([p.key for p in self.graph.parameters])
        kind = self.draw.choice(["zero1", "zero2", "zero3", "zero3", "replicated"])
        self.add("store", self.draw.choice([key, "", "blocks.*"]), kind, over=self._axis())

    def _recompute(self) -> None:
        block = self.draw.choice(self.blocks)
        self.add("recompute", self.draw.choice([f"blocks.{block}", "blocks.*", "norm"]))

    def _chunk(self) -> None:
        self.add("chunk", "", self.draw.choice([None, 2, 3]))

    def _tie(self) -> None:
        self.add("tie", "blocks.*")

    def _axis(self) -> str:
        return self.draw.choice(list(self.mesh))

    def _places(self, count: int, per_stage: int) -> None:
        """Stages of blocks in their order, now and then with a device for several of them."""
        draw, devices = self.draw, list(range(count * per_stage))
        if draw.random() < 0.4:
            draw.shuffle(devices)
        groups = [devices[at * per_stage : (at + 1) * per_stage] for at in range(count)]
        stages = list(range(count)) * (2 if draw.random() < 0.3 and len(self.blocks) >= 2 * count else 1)
        most = min(len(stages), len(self.blocks))
        edges = [0, *sorted(draw.sample(range(1, len(self.blocks)), most - 1)), len(self.blocks)]
        for number, (start, end) in enumerate(pairwise(edges)):
            names = [f"blocks.{name}" for name in self.blocks[start:end]]
            self.add("place", names, groups[stages[number % len(stages)]])
        self.stages = len(edges) - 1

    def _schedule(self) -> None:
        draw = self.draw
        count = draw.choice([1, 2, 2, 4, 8])
        stages = getattr(self, "stages", 1)
        kind = draw.choice([None, None, "1f1b", "gpipe", "zb", "eager", *(["interleaved"] if stages > 2 else [])])
        self.add("schedule", kind, microbatches=count)
        for _ in range(draw.choice([0, 0, 1, 2]) if count > 1 else 0):
            stage, (early, late) = draw.randrange(stages), sorted(draw.sample(range(count), 2))
            pairs = [("F", "F", early, late), ("F", "B", late, early), ("B", "F", early, late), ("B", "B", late, early)]
            a, b, first, second = draw.choice(pairs)
            self.add("order", f"{a}{stage}.{first}", f"{b}{stage}.{second}")


def policy_of(verbs: tuple[Verb, ...], ending: str) -> Callable[[Graph, Any], Any]:
    """The policy that calls these verbs, and builds the plan, leaves the rest to a search, or repeats it."""

    def policy(graph: Graph, cluster: Any) -> Any:
        (_, _, axes), *others = verbs
        plan = PolicyBuilder(graph, cluster, **axes)
        for name, args, kwargs in others:
            getattr(plan, name)(*args, **kwargs)
        return plan if ending == "search" else plan.build()

    return repeated(policy, 2) if ending == "repeat" else policy


GRAPHS: dict[int, Graph] = {}


def try_policy(seed: int, method: str = "threads") -> Outcome:
    """One trial."""
    draw = random.Random(seed)
    number = draw.randrange(MODELS)
    model, example = random_case(number, BATCH)
    if number not in GRAPHS:
        GRAPHS[number] = captured_graph(model, example).graph
    drawing = PolicyDraw(GRAPHS[number], draw)
    verbs = drawing.run()
    try:
        report = sw.verify(
            model, policy_of(verbs, drawing.ending), example=example, ranks=drawing.world, steps=1, method=method,
            compile={"timeout": 60.0},
        )  # fmt: skip
    except ShardwrightError as error:
        return Outcome(seed=seed, verbs=verbs, ending=drawing.ending, refused=f"{type(error).__name__}: {error}")
    except Exception as error:
        return Outcome(seed=seed, verbs=verbs, ending=drawing.ending, fault=f"{type(error).__name__}: {error}")
    return Outcome(seed=seed, verbs=verbs, ending=drawing.ending, fault="" if report.passed else str(report))

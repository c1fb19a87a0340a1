"""What a constraint is: one class for each kind of entry, and the `Target` that it applies to.

`constraints` reads them from YAML, `shardwright.policy` makes them from verbs, and `limits` resolves them for a graph.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from ..ir import Op, SourceLine
from ..ir.paths import prefixes
from ..rules import without_stripes


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstraintSource:
    """An entry as it was written, and where."""

    text: str
    where: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


@dataclass(frozen=True, slots=True)
class Range:
    """Whole numbers from `least` to `most`, both included."""

    least: int = 0
    most: float = math.inf

    def __contains__(self, number: int) -> bool:
        return self.least <= number <= self.most

    @property
    def exact(self) -> int | None:
        """The number, if there is just one."""
        return self.least if self.least == self.most else None

    def within(self, other: Range | None) -> Range:
        """What is in both; it may be empty."""
        return self if other is None else Range(max(self.least, other.least), min(self.most, other.most))

    def __str__(self) -> str:
        if self.exact is not None:
            return str(self.least)
        return f"at least {self.least}" if self.most == math.inf else f"{self.least} to {int(self.most)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What an entry applies to. An empty target is everything.

    modules     paths, where a star stands for a name; what is in the module is included
    classes     of modules
    ops         kinds ("linear", "aten.linear"), or names as plan files have them ("blocks.*.up / linear")
    lines       of the model's source: "gpt.py:40" or "gpt.py:40-52"
    parameters  keys, with stars: the ops that read them
    """

    modules: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()

    @property
    def is_everything(self) -> bool:
        return not (self.modules or self.classes or self.ops or self.lines or self.parameters)

    def place(self, path: str, classes: Mapping[str, str]) -> str | None:
        """The outermost module at or above a path that is meant ("" is the model); None if none is."""
        above = ["", *prefixes(path)]
        matches = [""]
        if self.modules:
            matches += [
                next((module for module in above if any(_is_like(module, pattern) for pattern in self.modules)), "?")
            ]
        if self.classes:
            matches += [next((module for module in above if classes.get(module) in self.classes), "?")]
        return None if "?" in matches else max(matches, key=len)

    def takes(self, op: Op, classes: Mapping[str, str]) -> bool:
        """Whether an op is meant, as far as that can be known without the graph: what it reads is not looked at."""
        inside = self.place(op.module_path, classes) is not None and (not self.ops or self._names(op))
        return inside and (not self.lines or any(_is_on(op.source, line) for line in self.lines))

    def has_parameter(self, keys: Iterable[str]) -> bool:
        """Whether a parameter of these names is meant by its name."""
        return any(_is_like(key, pattern) for key in keys for pattern in self.parameters)

    def _names(self, op: Op) -> bool:
        kind = re.sub(r"\.\d+$", "", op.name.rpartition(" / ")[2])
        known = (op.target, op.target.rpartition(".")[0], *op.target.split(".")[1:2], kind, op.name)
        return any(fnmatchcase(name, pattern) for name in known for pattern in self.ops)


def _is_like(path: str, pattern: str) -> bool:
    """Whether a path is one that a pattern names: part by part, a star within its part."""
    parts, wanted = path.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(fnmatchcase(*pair) for pair in zip(parts, wanted, strict=True))


LINE = re.compile(r"(.+):(\d{1,7})(?:-(\d{1,7}))?")
"""A line of the model's source, or several: "gpt.py:40", "gpt.py:40-52"."""


def _is_on(source: SourceLine | None, pattern: str) -> bool:
    lines = LINE.fullmatch(pattern)
    if source is None or lines is None or not f"/{source.file}".endswith(f"/{lines[1]}"):
        return False
    return int(lines[2]) <= source.line <= int(lines[3] or lines[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisConstraint:
    """The mesh has an axis of this name. `inside`: each group is on one node; `data`: it splits the batch only."""

    name: str
    size: Range | None = None
    inside: bool = False
    data: bool = False
    source: ConstraintSource


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitConstraint:
    """Ops that have a label are split on it, on one axis or on any.

    label   a label, "batch" or "sequence"; the number of a dim, of the parameter if the target names some, else of
            the op's first output; or None: any split will do
    """

    target: Target
    label: str | int | None
    on: str | None = None
    source: ConstraintSource


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceConstraint:
    """The choices of some ops, by their names: what verbs of a policy come to."""

    demands: Mapping[str, tuple[ChoiceDemand, ...]]
    source: ConstraintSource


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicateConstraint:
    """Ops are not split, on one axis or on all."""

    target: Target
    on: str | None = None
    source: ConstraintSource


@dataclass(frozen=True, slots=True, kw_only=True)
class SameSplitConstraint:
    """The op of one name in several modules is split in the same way in all."""

    target: Target
    source: ConstraintSource


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConstraint:
    """The memory limit of a device."""

    bytes: float
    source: ConstraintSource


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeConstraint:
    """Modules have to be recomputed in backward, or must not be."""

    target: Target
    wanted: bool
    source: ConstraintSource


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedLossConstraint:
    """The logits of losses are made in chunks of rows: in so many, the usual number (None), or not at all (0)."""

    target: Target
    chunks: int | None
    source: ConstraintSource


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroConstraint:
    """The ZeRO levels that parameters may have, on any axes or on one.

    At least a level is asked of the copies that there are: a parameter that no axis repeats has nothing to shard.
    `kind`: of the kinds of storage that are within, the one of this name.
    """

    target: Target
    zero: Range
    on: str | None = None
    kind: str | None = None
    source: ConstraintSource


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConstraint:
    """What a pipeline has to be like: its `stages`, `microbatches` or `schedule`."""

    what: str
    value: Range | str
    source: ConstraintSource


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCutConstraint:
    """A stage begins with each of some modules, or none of them is cut."""

    target: Target
    before: bool
    source: ConstraintSource


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesConstraint:
    """The devices of each stage of a pipeline."""

    devices: tuple[tuple[int, ...], ...]
    source: ConstraintSource


class ChoiceDemand(NamedTuple):
    """A demand on an op's choice: one of `picks` on an axis; without an axis on every one, or on any."""

    picks: tuple[str, ...]
    axis: str | None = None
    every: bool = True

    def is_met(self, choice: Mapping[str, str], names: Sequence[str]) -> bool:
        picked = (choice.get(axis, "") for axis in (names if self.axis is None else (self.axis,)))
        return (all if self.every else any)(without_stripes(pick) in self.picks for pick in picked)


Constraint = (
    AxisConstraint | SplitConstraint | ReplicateConstraint | SameSplitConstraint | MemoryConstraint
    | RecomputeConstraint | ChunkedLossConstraint | ZeroConstraint | PipelineConstraint | StageCutConstraint
    | ChoiceConstraint | DevicesConstraint
)  # fmt: skip
ConstraintsLike = str | Path | Iterable[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """All constraints, and the class of every module of the model by its path."""

    items: tuple[Constraint, ...] = ()
    classes: Mapping[str, str] = field(default_factory=dict)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that are named."""
        return tuple(dict.fromkeys(item.name for item in self.items if isinstance(item, AxisConstraint)))

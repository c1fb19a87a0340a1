"""Constraints on a plan, written in YAML or as a list of dicts, and parsed once.

    - {axis: tp, size: 8, inside: node}                     the mesh has an axis tp (size and inside may be left out)
    - {axis: dp, splits: batch}                             and an axis dp that splits the batch and nothing else
    - {module: "model.layers.*.mlp.up", split: n, on: tp}   ops there that have the label n are split on it
    - {class: LlamaRMSNorm, replicated: true, on: tp}            ops there are not split on tp; without `on`, on no axis
    - {module: "model.layers.*", together: true}            the same op of all these modules is split in the same way
    - {memory: 70GiB}                                       memory limit of a device
    - {module: "model.layers.0", recompute: false}          not recomputed in backward (true: has to be)
    - {chunked_loss: 8}                                     logits in 8 chunks of rows (true: in the usual number)
    - {module: lm_head, zero: 1}                            the highest ZeRO level of its parameters
    - {stages: 4}                                           a pipeline of so many stages (1: none)
    - {microbatches: 16}                                    the number of microbatches
    - {schedule: 1f1b}                                      its schedule
    - {module: "model.layers.8", cut: before}               a stage begins with it
    - {module: "model.layers.*", cut: never}                each of these modules is on one stage

What an entry applies to is set by `module` (a path, where a star stands for a name; what is in the module is included),
by `class` (of a module) and by `op` ("aten.linear" or "linear"). All that are given must match, of a list one.
`limits` resolves them for a graph.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from ..cluster import quantity
from ..errors import PlanError, ScheduleError, raise_all
from ..formats import integer, show
from ..ir import Op
from ..ir.paths import prefixes
from ..layout import MOST_DEVICES
from ..rules import without_stripes
from ..schedule import schedule_kind
from .constraint_file import load_entries, show_entry


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstraintSource:
    """An entry as it was written, and where."""

    text: str
    where: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What an entry applies to. An empty target is everything."""

    modules: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()

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
        return self.place(op.module_path, classes) is not None and (not self.ops or self._names(op))

    def _names(self, op: Op) -> bool:
        kind = re.sub(r"\.\d+$", "", op.name.rpartition(" / ")[2])
        known = (op.target, op.target.rpartition(".")[0], *op.target.split(".")[1:2], kind)
        return any(fnmatchcase(name, pattern) for name in known for pattern in self.ops)


def _is_like(path: str, pattern: str) -> bool:
    """Whether a path is one that a pattern names: part by part, a star within its part."""
    parts, wanted = path.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(fnmatchcase(*pair) for pair in zip(parts, wanted, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisConstraint:
    """The mesh has an axis of this name. `inside`: each group is on one node; `data`: it splits the batch only."""

    name: str
    size: int | None = None
    inside: bool = False
    data: bool = False
    source: ConstraintSource


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitConstraint:
    """Ops that have a label are split on it, on one axis or on any."""

    target: Target
    label: str
    on: str | None = None
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
    """The highest ZeRO level of parameters."""

    target: Target
    level: int
    source: ConstraintSource


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConstraint:
    """What a pipeline has to be like: its `stages`, `microbatches` or `schedule`."""

    what: str
    value: int | str
    source: ConstraintSource


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCutConstraint:
    """A stage begins with each of some modules, or none of them is cut."""

    target: Target
    before: bool
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


def read_constraints(source: ConstraintsLike | None, classes: Mapping[str, str] | None = None) -> Constraints:
    """Constraints from a YAML file or a list of dicts. Every fault is named at once, with the number of its entry."""
    if source is None:
        return Constraints(classes=classes or {})
    entries, where = (source, "constraints, ")
    if isinstance(source, str | Path):
        entries, where = load_entries(source), f"{source}, "
    if not isinstance(entries, list | tuple):
        raise PlanError(f"{where}: constraints are a list of entries, not a {type(entries).__name__}")
    reader = _Reader()
    items = [reader.entry(entry, f"{where}entry {number}") for number, entry in enumerate(entries, 1)]
    constraints = tuple(item for item in items if item is not None)
    reader.faults += _unknown_axes(constraints)
    raise_all(PlanError, "the constraints make no sense:", reader.faults)
    return Constraints(items=constraints, classes=classes or {})


def _unknown_axes(items: Iterable[Constraint]) -> Iterator[str]:
    items = tuple(items)
    names = list(dict.fromkeys(item.name for item in items if isinstance(item, AxisConstraint)))
    for item in items:
        if isinstance(item, SplitConstraint | ReplicateConstraint) and item.on is not None and item.on not in names:
            known = f"the entries name {', '.join(names)}" if names else "no entry names an axis"
            yield f"{item.source}: there is no axis {item.on!r}, {known}; add {{axis: {item.on}}}"
    if len(names) > 3:
        yield f"the entries name {len(names)} axes ({', '.join(names)}); a mesh has 3 at most"


_TARGET = ("module", "class", "op")
_FIELDS = {
    "axis": ("size", "inside", "splits"),
    "split": (*_TARGET, "on"),
    "replicated": (*_TARGET, "on"),
    "together": _TARGET,
    "memory": (),
    "recompute": ("module", "class"),
    "chunked_loss": _TARGET,
    "zero": _TARGET,
    "stages": (),
    "microbatches": (),
    "schedule": (),
    "cut": ("module", "class"),
}
"""What an entry asks for, and its other fields."""
_AXIS = re.compile(r"[a-z]p\d?")
MOST_STAGES = 2**16  # and microbatches


class _Reader:
    """Reads entries, and collects what is wrong with them."""

    def __init__(self) -> None:
        self.faults: list[str] = []

    def entry(self, data: Any, where: str) -> Constraint | None:
        if not isinstance(data, Mapping):
            self.faults.append(f"{where} is a {type(data).__name__}, not a mapping such as {{memory: 70GiB}}")
            return None
        source = ConstraintSource(text=show_entry(data), where=where)
        if "whole" in data:
            self.faults.append(f"{source}: whole is called replicated now; write replicated: true")
            return None
        verbs = [key for key in data if key in _FIELDS]
        if len(verbs) != 1:
            request = f"asks for {' and '.join(verbs)}" if verbs else "asks for nothing"
            self.faults.append(f"{source}: it {request}; an entry asks for one of {', '.join(_FIELDS)}")
            return None
        (verb,) = verbs
        strange = [str(key) for key in data if key != verb and key not in _FIELDS[verb]]
        if strange:
            fields = ", ".join(_FIELDS[verb]) or "nothing"
            self.faults.append(f"{source}: {', '.join(strange)} can't be combined with {verb}, only {fields}")
        before = len(self.faults)
        read = getattr(self, f"_{verb}")
        constraint: Constraint | None = read(data, source)
        return constraint if len(self.faults) == before else None

    def _axis(self, data: Mapping[str, Any], source: ConstraintSource) -> AxisConstraint:
        name, size = data["axis"], data.get("size")
        if not isinstance(name, str) or not _AXIS.fullmatch(name):
            self.faults.append(f"{source}: an axis is called dp, tp, sp, ep, tp2 or the like, not {name!r}")
        if size is not None and integer(2, MOST_DEVICES)(size):
            self.faults.append(f"{source}: {show(size)} is no size of an axis; it is 2 or more, up to {MOST_DEVICES}")
        self._is_one_of(data, "inside", ["node"], source)
        self._is_one_of(data, "splits", ["batch"], source)
        return AxisConstraint(name=str(name), size=size, inside="inside" in data, data="splits" in data, source=source)

    def _split(self, data: Mapping[str, Any], source: ConstraintSource) -> SplitConstraint:
        if not isinstance(data["split"], str) or not data["split"]:
            self.faults.append(f"{source}: split names a label such as n, or batch, or sequence")
        return SplitConstraint(
            target=self._target(data, source), label=str(data["split"]), on=self._on(data, source), source=source
        )

    def _replicated(self, data: Mapping[str, Any], source: ConstraintSource) -> ReplicateConstraint:
        self._is_one_of(data, "replicated", [True], source)
        return ReplicateConstraint(target=self._target(data, source), on=self._on(data, source), source=source)

    def _together(self, data: Mapping[str, Any], source: ConstraintSource) -> SameSplitConstraint:
        self._is_one_of(data, "together", [True], source)
        if "module" not in data and "class" not in data:
            self.faults.append(f"{source}: together is for modules; name them by module or class")
        return SameSplitConstraint(target=self._target(data, source), source=source)

    def _memory(self, data: Mapping[str, Any], source: ConstraintSource) -> MemoryConstraint:
        bytes = 0.0
        try:
            bytes = quantity.read(data["memory"], "bytes")
        except ValueError as error:
            self.faults.append(f"{source}: {error}")
        else:
            if bytes <= 0:
                self.faults.append(f"{source}: {data['memory']!r} is no amount of memory")
        return MemoryConstraint(bytes=bytes, source=source)

    def _recompute(self, data: Mapping[str, Any], source: ConstraintSource) -> RecomputeConstraint:
        self._is_one_of(data, "recompute", [True, False], source)
        if data["recompute"] is True and "module" not in data and "class" not in data:
            self.faults.append(f"{source}: say by module or class what to recompute")
        return RecomputeConstraint(target=self._target(data, source), wanted=bool(data["recompute"]), source=source)

    def _chunked_loss(self, data: Mapping[str, Any], source: ConstraintSource) -> ChunkedLossConstraint:
        chunks = data["chunked_loss"]
        if not isinstance(chunks, bool) and not (isinstance(chunks, int) and chunks > 1):
            self.faults.append(f"{source}: chunked_loss is true, false or a number of chunks, not {chunks!r}")
            chunks = True
        count = None if chunks is True else int(chunks)
        return ChunkedLossConstraint(target=self._target(data, source), chunks=count, source=source)

    def _zero(self, data: Mapping[str, Any], source: ConstraintSource) -> ZeroConstraint:
        self._is_one_of(data, "zero", [0, 1, 2, 3], source)
        level = data["zero"] if isinstance(data["zero"], int) else 0
        return ZeroConstraint(target=self._target(data, source), level=level, source=source)

    def _count(self, data: Mapping[str, Any], source: ConstraintSource) -> PipelineConstraint:
        (what,) = (key for key in data if key in ("stages", "microbatches"))
        value = data[what]
        if integer(1, MOST_STAGES)(value):
            self.faults.append(f"{source}: {show(value)} is no number of {what}; it is 1 or more, up to {MOST_STAGES}")
            value = 1
        return PipelineConstraint(what=what, value=value, source=source)

    _stages = _microbatches = _count

    def _schedule(self, data: Mapping[str, Any], source: ConstraintSource) -> PipelineConstraint:
        try:
            schedule_kind(str(data["schedule"]))
        except ScheduleError as error:
            self.faults.append(f"{source}: {error}")
        return PipelineConstraint(what="schedule", value=str(data["schedule"]), source=source)

    def _cut(self, data: Mapping[str, Any], source: ConstraintSource) -> StageCutConstraint:
        self._is_one_of(data, "cut", ["before", "never"], source)
        if "module" not in data and "class" not in data:
            self.faults.append(f"{source}: say by module or class where a stage begins, or what is not cut")
        return StageCutConstraint(target=self._target(data, source), before=data["cut"] == "before", source=source)

    def _is_one_of(self, data: Mapping[str, Any], key: str, allowed: list[Any], source: ConstraintSource) -> None:
        if key in data and not any(type(data[key]) is type(value) and data[key] == value for value in allowed):
            shown = " or ".join(str(value).lower() for value in allowed)
            self.faults.append(f"{source}: {key} is {shown}, not {data[key]!r}")

    def _on(self, data: Mapping[str, Any], source: ConstraintSource) -> str | None:
        on = data.get("on")
        if "on" in data and not isinstance(on, str):
            self.faults.append(f"{source}: on names one axis, not {on!r}")
        return on if isinstance(on, str) else None

    def _target(self, data: Mapping[str, Any], source: ConstraintSource) -> Target:
        return Target(**{field: self._names(data, key, source) for key, field in _PLURALS.items()})

    def _names(self, data: Mapping[str, Any], key: str, source: ConstraintSource) -> tuple[str, ...]:
        value = data.get(key, ())
        names = (value,) if isinstance(value, str) else value
        fine = isinstance(names, list | tuple) and all(isinstance(name, str) and name for name in names)
        if not fine or (key in data and not names):
            self.faults.append(f"{source}: {key} is a name or a list of names, not {value!r}")
            return ()
        return tuple(names)


_PLURALS = {"module": "modules", "class": "classes", "op": "ops"}

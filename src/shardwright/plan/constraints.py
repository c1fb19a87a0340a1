"""Constraints on a plan, written in YAML or as a list of dicts, and parsed once.

    - {axis: tp, size: 8, inside: node}                     the mesh has an axis tp (size and inside may be left out)
    - {axis: tp, size: {min: 2, max: 8}}                    its size is one of these; either end may be left out
    - {axis: dp, splits: batch}                             and an axis dp that splits the batch and nothing else
    - {module: "model.layers.*.mlp.up", split: n, on: tp}   ops there that have the label n are split on it
    - {parameter: "model.layers.*.up.weight", split: 0}     ops that read these are split on what their dim 0 is
    - {module: lm_head, split: true, on: tp}                ops there are split, on whatever they can be
    - {class: LlamaRMSNorm, replicated: true, on: tp}       ops there are not split on tp; without `on`, on no axis
    - {module: "model.layers.*", together: true}            the same op of all these modules is split in the same way
    - {memory: 70GiB}                                       memory limit of a device
    - {module: "model.layers.0", recompute: false}          not recomputed in backward (true: has to be)
    - {chunked_loss: 8}                                     logits in 8 chunks of rows (true: in the usual number)
    - {module: lm_head, zero: 1}                            the highest ZeRO level of its parameters
    - {zero: {min: 2}, on: dp}                              at least ZeRO-2 along dp
    - {stages: 4}                                           a pipeline of so many stages (1: none), or a range
    - {microbatches: 16}                                    the number of microbatches, or a range
    - {schedule: 1f1b}                                      its schedule
    - {module: "model.layers.8", cut: before}               a stage begins with it
    - {module: "model.layers.*", cut: never}                each of these modules is on one stage

What an entry applies to is set by `module` (a path, where a star stands for a name; what is in the module is included),
by `class` (of a module), by `op` ("aten.linear", "linear" or its name in plan files), by `line` ("gpt.py:40" or
"gpt.py:40-52") and by `parameter` (its key). All that are given must match, of a list one. `limits` resolves them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..cluster import quantity
from ..errors import PlanError, ScheduleError, raise_all
from ..formats import integer, show
from ..layout import MOST_DEVICES
from ..schedule import schedule_kind
from ..storage import SHARDED_KINDS
from .constraint_file import load_entries, show_entry
from .constraint_kinds import (
    LINE,
    AxisConstraint,
    ChunkedLossConstraint,
    Constraint,
    Constraints,
    ConstraintsLike,
    ConstraintSource,
    MemoryConstraint,
    PipelineConstraint,
    Range,
    RecomputeConstraint,
    ReplicateConstraint,
    SameSplitConstraint,
    SplitConstraint,
    StageCutConstraint,
    Target,
    ZeroConstraint,
)


def read_constraints(
    source: ConstraintsLike | None, classes: Mapping[str, str] | None = None, *, axes_known: bool = False
) -> Constraints:
    """Constraints from a YAML file or a list of dicts. Every fault is named at once, with the number of its entry.

    `axes_known`: something beside them says which axes there are.
    """
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
    reader.faults += () if axes_known else _unknown_axes(constraints)
    raise_all(PlanError, "the constraints make no sense:", reader.faults)
    return Constraints(items=constraints, classes=classes or {})


def _unknown_axes(items: Iterable[Constraint]) -> Iterator[str]:
    items = tuple(items)
    names = list(dict.fromkeys(item.name for item in items if isinstance(item, AxisConstraint)))
    for item in items:
        if isinstance(item, ON_AN_AXIS) and item.on is not None and item.on not in names:
            known = f"the entries name {', '.join(names)}" if names else "no entry names an axis"
            yield f"{item.source}: there is no axis {item.on!r}, {known}; add {{axis: {item.on}}}"
    if len(names) > 3:
        yield f"the entries name {len(names)} axes ({', '.join(names)}); a mesh has 3 at most"


ON_AN_AXIS = (SplitConstraint, ReplicateConstraint, ZeroConstraint)
"""What may name an axis."""
_TARGET = ("module", "class", "op", "line")
_FIELDS = {
    "axis": ("size", "inside", "splits"),
    "split": (*_TARGET, "parameter", "on"),
    "replicated": (*_TARGET, "on"),
    "together": _TARGET,
    "memory": (),
    "recompute": ("module", "class"),
    "chunked_loss": _TARGET,
    "zero": (*_TARGET, "parameter", "on"),
    "stages": (),
    "microbatches": (),
    "schedule": (),
    "cut": ("module", "class"),
}
"""What an entry asks for, and its other fields."""
AXIS = re.compile(r"[a-z]p\d?")
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
        name = data["axis"]
        if not isinstance(name, str) or not AXIS.fullmatch(name):
            self.faults.append(f"{source}: an axis is called dp, tp, sp, ep, tp2 or the like, not {name!r}")
        size = self._range(data, "size", (2, MOST_DEVICES), "size of an axis", source) if "size" in data else None
        self._is_one_of(data, "inside", ["node"], source)
        self._is_one_of(data, "splits", ["batch"], source)
        return AxisConstraint(name=str(name), size=size, inside="inside" in data, data="splits" in data, source=source)

    def _split(self, data: Mapping[str, Any], source: ConstraintSource) -> SplitConstraint:
        label = data["split"]
        if label is not True and (isinstance(label, bool) or not isinstance(label, str | int) or label == ""):
            self.faults.append(
                f"{source}: split names a label such as n, or batch, or sequence, or the number of a dim; true: any"
            )
            label = True
        return SplitConstraint(
            target=self._target(data, source), label=None if label is True else label, on=self._on(data, source),
            source=source,
        )  # fmt: skip

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
        most = len(SHARDED_KINDS)
        if isinstance(data["zero"], Mapping):
            level = self._range(data, "zero", (0, most), "ZeRO level", source) or Range()
        else:
            self._is_one_of(data, "zero", list(range(most + 1)), source)
            level = Range(0, data["zero"] if isinstance(data["zero"], int) else 0)
        return ZeroConstraint(target=self._target(data, source), zero=level, on=self._on(data, source), source=source)

    def _range(
        self, data: Mapping[str, Any], key: str, ends: tuple[int, int], what: str, source: ConstraintSource
    ) -> Range | None:
        """A number, or {min: 2, max: 8}; None if it is neither."""
        value, (lowest, highest) = data[key], ends
        bounds = {"min": value, "max": value} if not isinstance(value, Mapping) else dict(value)
        strange = [name for name in bounds if name not in ("min", "max")]
        wrong = [number for number in bounds.values() if integer(lowest, highest)(number)]
        if wrong or strange or not bounds:
            shown = show(wrong[0] if wrong else value)
            self.faults.append(f"{source}: {shown} is no {what}; it is {lowest} or more, up to {highest}, or a range "
                               "such as {min: 2, max: 8}")  # fmt: skip
            return None
        least, most = bounds.get("min", lowest), bounds.get("max", math.inf)
        if least > most:
            self.faults.append(f"{source}: no {what} is {least} or more and {most} or less")
            return None
        return Range(least, most)

    def _count(self, data: Mapping[str, Any], source: ConstraintSource) -> PipelineConstraint:
        (what,) = (key for key in data if key in ("stages", "microbatches"))
        value = self._range(data, what, (1, MOST_STAGES), f"number of {what}", source)
        return PipelineConstraint(what=what, value=value or Range(1, 1), source=source)

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
        target = Target(**{field: self._names(data, key, source) for key, field in _PLURALS.items()})
        for line in target.lines:
            if not LINE.fullmatch(line):
                self.faults.append(f"{source}: {line!r} is no line of the model; write gpt.py:40 or gpt.py:40-52")
        return target

    def _names(self, data: Mapping[str, Any], key: str, source: ConstraintSource) -> tuple[str, ...]:
        value = data.get(key, ())
        names = (value,) if isinstance(value, str) else value
        fine = isinstance(names, list | tuple) and all(isinstance(name, str) and name for name in names)
        if not fine or (key in data and not names):
            self.faults.append(f"{source}: {key} is a name or a list of names, not {value!r}")
            return ()
        return tuple(names)


_PLURALS = {"module": "modules", "class": "classes", "op": "ops", "line": "lines", "parameter": "parameters"}

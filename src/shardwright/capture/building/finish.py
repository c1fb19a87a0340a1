"""From the draft to an `ir.Graph`: repeated constants joined, dead steps dropped, names given."""

from __future__ import annotations

import keyword
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from ...ir import Dtype, Op, Slot, Value
from .graph_builder import DraftOp, GraphBuilder, ValueInfo, ValueRef, map_refs, refs
from .schema import is_random_call, torch_op

HALF = frozenset({"float32", "float16", "bfloat16"})


def join_repeats(builder: GraphBuilder) -> None:
    """Number equal steps without gradient as one (`builder.renamed` maps the names)."""
    same: dict[str, str] = {}
    seen: dict[Any, DraftOp] = {}
    steps: list[DraftOp] = []

    def now(ref: ValueRef) -> ValueRef:
        return ValueRef(same.get(ref.name, ref.name))

    for step in builder.steps:
        step.arguments = map_refs(step.arguments, now)
        if not _pure(builder, step):
            steps.append(step)
            continue
        key = (step.target, step.place.autocast, repr(sorted(step.arguments.items(), key=lambda item: item[0])))
        first = seen.setdefault(key, step)
        if first is step:
            steps.append(step)
            continue
        same.update(zip(step.outputs, first.outputs, strict=True))
        if first.place.region != step.place.region:
            first.place = replace(first.place, region=None)
    builder.steps = steps
    builder.renamed.update(same)


def _pure(builder: GraphBuilder, step: DraftOp) -> bool:
    return is_pure(step) and not any(builder.infos[name].gradient for name in step.outputs)


def is_pure(step: DraftOp) -> bool:
    """Whether a step gives the same for the same arguments."""
    return step.target.startswith("aten.") and not is_random_call(torch_op(step.target), step.arguments)


def drop_dead(builder: GraphBuilder, wanted: Iterable[str]) -> None:
    """Keep the steps that the outputs and the buffer updates need."""
    needed = set(wanted)
    steps: list[DraftOp] = []
    for step in reversed(builder.steps):
        if not needed.isdisjoint(step.outputs):
            needed.update(step.inputs())
            steps.append(step)
    builder.steps = steps[::-1]


def promote_floats(builder: GraphBuilder) -> None:
    """Every float a float64, casts and creations included."""

    def up(value: Any) -> Any:
        if isinstance(value, Dtype):
            return Dtype("float64") if value in HALF else value
        return tuple(up(inner) for inner in value) if isinstance(value, tuple) else value

    for name, info in builder.infos.items():
        builder.infos[name] = ValueInfo(info.shape, "float64" if info.dtype in HALF else info.dtype, info.gradient)
    same: dict[str, str] = {}
    steps: list[DraftOp] = []
    for step in builder.steps:
        step.arguments = map_refs(step.arguments, lambda ref: ValueRef(same.get(ref.name, ref.name)))
        step.arguments = {name: up(value) for name, value in step.arguments.items()}
        source: Any = step.arguments.get("self")
        cast = step.target == "aten._to_copy.default" and isinstance(source, ValueRef)
        if cast and builder.infos[source.name].dtype == builder.infos[step.outputs[0]].dtype:
            same[step.outputs[0]] = source.name
            continue
        step.place = replace(step.place, autocast=None)
        steps.append(step)
    builder.steps = steps
    builder.renamed.update(same)


def op_names(steps: Sequence[DraftOp]) -> list[str]:
    """The names "module.path / kind", a second one of a kind in a module " / kind.1"."""
    count: Counter[str] = Counter()
    names = []
    for step in steps:
        name = f"{step.place.path} / {step.kind}" if step.place.path else f"/ {step.kind}"
        names.append(f"{name}.{count[name]}" if count[name] else name)
        count[name] += 1
    return names


def value_names(builder: GraphBuilder, fixed: Mapping[str, str]) -> dict[str, str]:
    """A readable, unique name for every value; `fixed` are names for what no step makes."""
    options = dict(fixed)
    last: dict[tuple[str, str, int], int] = {}
    for index, step in enumerate(builder.steps):
        if step.place.source:
            last[step.place.owner, step.place.source.file, step.place.source.line] = index
    for index, step in enumerate(builder.steps):
        source = step.place.source
        assigned: tuple[str, ...] = ()
        if source and (last[step.place.owner, source.file, source.line] == index or _ends_line(builder.steps, index)):
            assigned = assignment(source.code)
        for number, name in enumerate(step.outputs):
            options[name] = _wanted_name(step, assigned, number)
    count: Counter[str] = Counter()
    used: set[str] = set()
    names: dict[str, str] = {}
    for name, option in options.items():
        chosen = option
        while chosen in used:
            count[option] += 1
            chosen = f"{option}_{count[option]}"
        used.add(chosen)
        names[name] = chosen
    return names


def _ends_line(steps: Sequence[DraftOp], index: int) -> bool:
    """Whether the next step is on another line (a helper function called twice has two such ends)."""
    here = steps[index].place
    after = steps[index + 1].place if index + 1 < len(steps) else None
    return here.path == here.owner and (after is None or (after.owner, after.source) != (here.owner, here.source))


def _wanted_name(step: DraftOp, assigned: tuple[str, ...], number: int) -> str:
    if len(assigned) == len(step.outputs) or (len(assigned) > 1 and number < len(assigned) and len(step.outputs) > 1):
        return assigned[number]
    if len(assigned) == 1:
        return assigned[0]
    leaf = step.place.module.rsplit(".", 1)[-1]
    if step.place.path != step.place.owner and leaf.isidentifier() and not keyword.iskeyword(leaf):
        return leaf
    return identifier(step.kind)


@lru_cache(maxsize=4096)
def assignment(code: str) -> tuple[str, ...]:
    """The names that a line assigns to: "q, k = f(x)" -> ("q", "k"); () for anything else."""
    match = re.match(r"([A-Za-z_][\w\s,]*?)\s*(?::[^=]*)?(?:[-+*/@|&]?=)(?!=)", code)
    if match is None:
        return ()
    names = tuple(part.strip() for part in match[1].split(",") if part.strip())
    return names if all(name.isidentifier() and not keyword.iskeyword(name) for name in names) else ()


def identifier(text: str) -> str:
    """A python name made of any text."""
    name = re.sub(r"\W+", "_", text).strip("_") or "value"
    name = f"v_{name}" if name[0].isdigit() else name
    return f"{name}_" if keyword.iskeyword(name) else name


def ops_of(builder: GraphBuilder, names: Mapping[str, str]) -> tuple[Op, ...]:
    """The steps as ops of a graph."""
    ops = []
    for step, name in zip(builder.steps, op_names(builder.steps), strict=True):
        inputs = [ref.name for ref in refs(step.arguments)]  # a tensor given twice has two slots
        slots = iter([Slot(index) for index in range(len(inputs))])
        arguments = map_refs(step.arguments, partial(_next_slot, slots))
        place = step.place
        ops.append(
            Op(
                name=name, target=step.target, arguments=tuple(arguments.items()),
                inputs=tuple(names[value] for value in inputs), outputs=tuple(names[value] for value in step.outputs),
                source=place.source, module_path=place.module, region=place.region, autocast=place.autocast,
                no_grad=place.no_grad, draws=is_random_call(torch_op(step.target), step.arguments),
                mask=step.mask and step.mask.renamed(names),
            )
        )  # fmt: skip
    return tuple(ops)


def _next_slot(slots: Iterator[Slot], _: ValueRef) -> Slot:
    return next(slots)


def values_of(builder: GraphBuilder, names: Mapping[str, str]) -> dict[str, Value]:
    return {
        new: Value(name=new, shape=info.shape, dtype=info.dtype, gradient=info.gradient)
        for old, new in names.items()
        for info in [builder.infos[old]]
    }

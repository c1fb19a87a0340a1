"""From the draft to an `ir.Graph`: repeated constants joined, dead steps dropped, ops named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
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

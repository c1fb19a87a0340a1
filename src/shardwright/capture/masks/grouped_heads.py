"""Keys and values that are repeated for the heads of a group: attention reads them as they were (GQA)."""

from __future__ import annotations

from collections.abc import Mapping

from ..building.graph_builder import DraftOp, GraphBuilder, ValueInfo, ValueRef

RESHAPES = frozenset({"view", "reshape", "_unsafe_view"})


def fold_repeated_heads(builder: GraphBuilder) -> None:
    """Have attention read keys and values before they are repeated, with `enable_gqa`. The copies may be dead then."""
    producers = {name: step for step in builder.steps for name in step.outputs}
    steps: list[DraftOp] = []
    for step in builder.steps:
        if is_attention(step) and not step.arguments.get("enable_gqa"):
            _fold(builder, producers, step, steps)
        steps.append(step)
    builder.steps = steps


def is_attention(step: DraftOp) -> bool:
    return step.target == "aten.scaled_dot_product_attention.default"


def _fold(builder: GraphBuilder, producers: Mapping[str, DraftOp], step: DraftOp, steps: list[DraftOp]) -> None:
    key, value = (step.arguments[name].name for name in ("key", "value"))
    rank = len(builder.infos[key].shape)
    if rank < 3:
        return
    repeated = [_source(builder, producers, name, rank - 3) for name in (key, value)]
    if any(source is None for source in repeated):
        return
    (first, times, swap), (other, other_times, other_swap) = repeated  # type: ignore[misc]
    if times != other_times:
        return
    first, other = (_swapped(builder, steps, step, *pair) for pair in ((first, swap), (other, other_swap)))
    step.arguments = {**step.arguments, "key": ValueRef(first), "value": ValueRef(other), "enable_gqa": True}


def _source(
    builder: GraphBuilder, producers: Mapping[str, DraftOp], name: str, dim: int
) -> tuple[str, int, tuple[int, int] | None] | None:
    """What is repeated along `dim` to make a value, how often, and the dims that are swapped after it."""
    step = producers.get(name)
    if step is None:
        return None
    if step.target == "aten.transpose.int":
        dims = (step.arguments["dim0"], step.arguments["dim1"])
        if dim not in dims or min(dims) < 0:
            return None
        inner = step.arguments["self"].name
        source = _repeated(builder, producers, inner, dims[0] if dim == dims[1] else dims[1])
        return None if source is None else (*source, dims)
    source = _repeated(builder, producers, name, dim)
    return None if source is None else (*source, None)


def _repeated(builder: GraphBuilder, producers: Mapping[str, DraftOp], name: str, dim: int) -> tuple[str, int] | None:
    step = producers.get(name)
    kind = step.target.split(".")[1] if step is not None else ""
    shape = builder.infos[name].shape
    if step is not None and kind == "repeat_interleave":
        source, times = step.arguments["self"], step.arguments.get("repeats")
        at = step.arguments.get("dim")
        along = at is not None and at % len(shape) == dim
        return (source.name, times) if isinstance(times, int) and along else None
    if step is None or kind not in RESHAPES:
        return None
    expanded = producers.get(step.arguments["self"].name)
    if expanded is None or expanded.target != "aten.expand.default":
        return None
    wide, narrow = builder.infos[expanded.outputs[0]].shape, builder.infos[expanded.arguments["self"].name].shape
    source = producers.get(expanded.arguments["self"].name)
    if len(wide) != len(shape) + 1 or len(narrow) != len(wide) or narrow[dim + 1] != 1:
        return None
    grown = [at for at in range(len(wide)) if wide[at] != narrow[at]]
    joined = (*wide[:dim], wide[dim] * wide[dim + 1], *wide[dim + 2 :])
    added = source is not None and source.target == "aten.unsqueeze.default"
    if source is None or not added or grown != [dim + 1] or joined != shape:
        return None
    if source.arguments["dim"] % len(wide) != dim + 1:
        return None
    return source.arguments["self"].name, wide[dim + 1]


def _swapped(
    builder: GraphBuilder, steps: list[DraftOp], step: DraftOp, name: str, dims: tuple[int, int] | None
) -> str:
    """A value with two of its dims swapped, as its copies were."""
    if dims is None:
        return name
    info = builder.infos[name]
    shape = list(info.shape)
    shape[dims[0]], shape[dims[1]] = shape[dims[1]], shape[dims[0]]
    result = builder.value(ValueInfo(tuple(shape), info.dtype, info.gradient))
    arguments = {"self": ValueRef(name), "dim0": dims[0], "dim1": dims[1]}
    steps.append(DraftOp("aten.transpose.int", arguments, [result], step.place, "transpose"))
    return result

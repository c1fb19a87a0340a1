"""Parts of tensors: slices, sections, windows, diagonals, and tensors with a part replaced. All linear."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..ir import Op
from ..rules.dims import blocked, label_dims, write_rule
from ..rules.notation import Rule, parse
from ..rules.registry import OpCall
from . import strides
from .contexts import ProgramOnRank, TracedCall, ViewWrite
from .printing import Printing, dims_method, function
from .reading import Arguments, UnreadableLineError, read_form
from .spec import Kernel, define

# -- rules


def select(call: OpCall) -> Rule:
    dim, names = call.dim(), label_dims(call.shape)
    kept = [name for at, name in enumerate(names) if at != dim]
    names[dim] = "1" if names[dim] == "1" else f"{names[dim]}^"
    return parse(f"{' '.join(names)} ~1 -> {' '.join(kept)}")


def slice_(call: OpCall) -> Rule:
    """A slice that is one of n equal parts goes through (n, part): rotary halves. Others are blocked."""
    dim, names = call.dim(), label_dims(call.shape)
    before, after = call.shape[dim], call.outputs[0].shape[dim]
    source, result, sizes = list(names), list(names), {}
    if before != after:
        start = call.op.argument("start", 0) or 0
        start = start + before if start < 0 else start
        equal = after > 1 and before % after == 0 and start % after == 0 and call.op.argument("step", 1) == 1
        if equal:
            source[dim], result[dim] = f"({before // after} {names[dim]})", names[dim]
            sizes[names[dim]] = after
        else:
            source[dim], result[dim] = str(before), str(after)
    return parse(f"{' '.join(source)} ~1 -> {' '.join(result)}").with_sizes(sizes)


def split(call: OpCall) -> Rule:
    """Equal parts are a product, unequal ones a row of sections."""
    dim, names = call.dim(), label_dims(call.shape)
    parts = [value.shape[dim] for value in call.outputs]
    if len(parts) == 1:
        return parse(f"{' '.join(names)} ~1 -> {' '.join(names)}")
    equal = len(set(parts)) == 1
    inner = ["p"] * len(parts) if equal else [f"p{at}" for at in range(len(parts))]
    shown = [name if size != 1 else "1" for name, size in zip(inner, parts, strict=True)]
    source = [*names]
    source[dim] = f"({len(parts)} p)" if equal else f"({' | '.join(shown)})"
    if equal and parts[0] == 1:
        source[dim] = str(len(parts))
    outputs = [" ".join([*names[:dim], name, *names[dim + 1 :]]) for name in shown]
    return parse(f"{' '.join(source)} ~1 -> {', '.join(outputs)}").with_sizes(dict(zip(inner, parts, strict=True)))


def unbind(call: OpCall) -> Rule:
    dim, names = call.dim(), label_dims(call.shape)
    kept = " ".join(name for at, name in enumerate(names) if at != dim)
    names[dim] = "1" if names[dim] == "1" else f"{names[dim]}^"
    return parse(f"{' '.join(names)} ~1 -> {', '.join([kept] * len(call.outputs))}")


def unfold(call: OpCall) -> Rule:
    """Windows along a dim: it becomes their number, and a new last dim holds what is in them.

    Windows side by side (step = size) are a product of the two.
    """
    dim, names = call.dim("dimension"), label_dims(call.shape)
    size, step = call.op.argument("size"), call.op.argument("step")
    count = call.outputs[0].shape[dim]
    if step == size and count * size == call.shape[dim] and count > 1:
        source = [*names[:dim], f"(win {size})" if size > 1 else "win", *names[dim + 1 :]]
        return write_rule([source], [[*names[:dim], "win", *names[dim + 1 :], str(size)]], [1]).with_sizes(
            {"win": count}
        )
    source = [*names[:dim], str(call.shape[dim]), *names[dim + 1 :]]
    return write_rule([source], [[*names[:dim], str(count), *names[dim + 1 :], str(size)]], [1])


def scatter_slice(call: OpCall) -> Rule:
    """A slice replaced by another tensor: the dim that is sliced stays whole."""
    dim, names = call.dim(), label_dims(call.shape)
    source = [blocked(name) if at == dim else name for at, name in enumerate(names)]
    kept = call.inputs[1].shape
    if "select" in call.op.target:
        return write_rule([source, [*names[:dim], *names[dim + 1 :]]], [names], [1, 1])
    return write_rule([source, [*names[:dim], str(kept[dim]), *names[dim + 1 :]]], [names], [1, 1])


def diagonal(call: OpCall) -> Rule:
    """The two dims go, and a new one comes last."""
    default = (-2, -1) if "linalg" in call.op.target else (0, 1)
    gone = {call.dim("dim1", default[0]), call.dim("dim2", default[1])}
    names = label_dims(call.shape)
    source = [blocked(name) if at in gone else name for at, name in enumerate(names)]
    kept = [name for at, name in enumerate(names) if at not in gone]
    return write_rule([source], [[*kept, str(call.outputs[0].shape[-1])]], [1])


# -- canonical forms


def canonical_slice(call: TracedCall) -> list[str]:
    bounds = slice_bounds(call.arguments, call.input_info.shape)
    size = call.input_info.shape[bounds["dim"]]
    if bounds == {"dim": bounds["dim"], "start": 0, "end": size}:
        return call.identity(call.first)
    return call.emit("aten.slice.Tensor", self=call.first, **bounds)


def slice_bounds(arguments: dict[str, Any], shape: Sequence[int]) -> dict[str, int]:
    """dim, start, end (and step) of a slice as plain indices, whatever way they were given."""
    dim = arguments.get("dim", 0) % len(shape)
    size, step = shape[dim], arguments.get("step", 1)
    start = arguments.get("start") or 0
    start = min(max(start + size if start < 0 else start, 0), size)
    end = arguments.get("end")
    if "length" in arguments:
        end = start + arguments["length"]
    end = size if end is None else min(max(end + size if end < 0 else end, start), size)
    return {"dim": dim, "start": start, "end": end, **({"step": step} if step != 1 else {})}


def canonical_slice_scatter(call: TracedCall) -> list[str]:
    source = call.arguments["src"]
    return call.emit(self=call.first, src=source, **slice_bounds(call.arguments, call.input_info.shape))


def canonical_split(call: TracedCall) -> list[str]:
    dim = call.arguments.get("dim", 0) % len(call.input_info.shape)
    sizes = tuple(info.shape[dim] for info in call.infos)
    if len(sizes) == 1:
        return call.identity(call.first)
    if all(size == sizes[0] for size in sizes[:-1]) and 0 < sizes[-1] <= sizes[0]:
        return call.emit("aten.split.Tensor", self=call.first, split_size=sizes[0], dim=dim)
    return call.emit("aten.split_with_sizes.default", self=call.first, split_sizes=sizes, dim=dim)


# -- writes through a part


def write_slice(write: ViewWrite) -> str:
    bounds = slice_bounds(write.options, write.shape)
    return write.emit("aten.slice_scatter.default", self=write.parent, src=write.new, **bounds)


def write_select(write: ViewWrite) -> str:
    return write.emit("aten.select_scatter.default", self=write.parent, src=write.new, **write.options)


def write_diagonal(write: ViewWrite) -> str:
    return write.emit("aten.diagonal_scatter.default", self=write.parent, src=write.new, **write.options)


def write_unbound(write: ViewWrite) -> str:
    where = {"dim": write.options.get("dim", 0), "index": write.index}
    return write.emit("aten.select_scatter.default", self=write.parent, src=write.new, **where)


def write_split(write: ViewWrite) -> str:
    """Which slice of its parent an output of split, or a narrow, is."""
    options, dim = write.options, write.options.get("dim", 0)
    if "start" in options:
        start = options["start"]
    elif "chunks" in options:
        start = -(-write.shape[dim] // options["chunks"]) * write.index
    else:
        sizes: Any = options.get("split_sizes", options.get("split_size"))
        start = sizes * write.index if isinstance(sizes, int) else sum(sizes[: write.index])
    span = {"dim": dim, "start": start, "end": start + write.new_shape[dim]}
    return write.emit("aten.slice_scatter.default", self=write.parent, src=write.new, **span)


# -- on a rank


def local_split(program: ProgramOnRank, op: Op) -> Op:
    dim = op.argument("dim", 0) % len(program.values[op.inputs[0]].shape)
    parts = tuple(program.sizes_of(name)[dim] for name in op.outputs)
    if op.argument("split_size") is None:
        return op.with_arguments(split_sizes=parts)
    if all(shard.even(program.mesh.sizes[shard.axis]) for shard in program.layouts[op.inputs[0]].shards[dim]):
        return op.with_arguments(split_size=parts[0])
    arguments = tuple(("split_sizes", parts) if key == "split_size" else (key, value) for key, value in op.arguments)
    # an empty piece has no size to step by
    return replace(op, target="aten.split_with_sizes.default", arguments=arguments)


def local_slice(program: ProgramOnRank, op: Op) -> Op:
    """One of n equal parts keeps its place among the parts; other slices are on dims that are not sharded."""
    rank = len(program.values[op.inputs[0]].shape)
    dim = op.argument("dim", 0) % rank
    before = program.values[op.inputs[0]].shape[dim]
    after = program.values[op.outputs[0]].shape[dim]
    if rank > 2 and dim == rank - 1:  # x[..., :4]
        op = op.with_arguments(dim=-1)
    if before == after:
        return op.with_arguments(start=None, end=None)
    start = op.argument("start", 0) or 0
    start += before if start < 0 else 0
    step, end = op.argument("step", 1), {}
    if start + step * after >= before:  # x[1:]
        op, end = op.with_arguments(end=None), {"end": None}
    if step != 1:
        return op
    is_part = after > 1 and start % after == before % after == 0
    if not program.layouts[op.inputs[0]].shards[dim] and not is_part:
        return op
    part, unit = start // after, program.sizes_of(op.outputs[0])[dim]
    return op.with_arguments(**{"start": unit.times(part) if part else 0, "end": unit.times(part + 1), **end})


# -- in generated code


def print_slice(p: Printing) -> str:
    dim = p.literal("dim", 0)
    step = p.literal("step", 1)
    start, end = p.literal("start"), p.literal("end")
    low = "" if start in (None, 0) else p.show(start)
    high = "" if end is None or _is_open(end) else p.show(end)
    span = f"{low}:{high}" + (f":{step}" if step != 1 else "")
    if dim < 0:
        return f"{p.first()}[..., {span}{', :' * (-dim - 1)}]"
    return f"{p.first()}[{':, ' * dim}{span}]"


def print_select(p: Printing) -> str:
    dim, index = p.literal("dim", 0), p["index"]
    if isinstance(dim, int) and dim >= 0:
        return f"{p.first()}[{':, ' * dim}{index}]"
    return f"{p.first()}.select({dim}, {index})"


def print_split(p: Printing) -> str:
    key = "split_size" if p.has("split_size") else "split_sizes"
    size = p[key] if key == "split_size" else f"({p.listed(key)})"
    return f"{p.first()}.split({size}, {p.literal('dim', 0)})"


def read_slice(op: Op, node: ast.expr) -> Arguments:
    """`x[:, 2:5]` or `x[..., 2:5, :]`: one dim is sliced, the others are there as they are."""
    if not isinstance(node, ast.Subscript):
        raise UnreadableLineError("it is no slice")
    items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    dim = _only_dim(items)
    item = items[dim if dim >= 0 else len(items) + dim]
    read: Arguments = {"self": node.value, "dim": ast.Constant(value=dim)}
    if not isinstance(item, ast.Slice):
        return read | {"index": item}
    read |= {
        name: value
        for name, value in (("start", item.lower), ("end", item.upper), ("step", item.step))
        if value is not None
    }
    return read


def read_select(op: Op, node: ast.expr) -> Arguments:
    if isinstance(node, ast.Call):
        return read_form(op, node, "x.select(dim, index)")
    return read_slice(op, node)


def _only_dim(items: list[ast.expr]) -> int:
    """The dim that a subscript is about; counted from the end where it begins with `...`."""
    chosen = [at for at, item in enumerate(items) if not takes_all(item)]
    if len(chosen) > 1:
        raise UnreadableLineError("it subscripts several dims")
    if isinstance(items[0], ast.Constant) and items[0].value is Ellipsis:
        return (chosen[0] if chosen else 1) - len(items)
    return chosen[0] if chosen else len(items) - 1


def takes_all(item: ast.expr) -> bool:
    """Whether an item of a subscript leaves its dim as it is."""
    if isinstance(item, ast.Constant):
        return item.value is Ellipsis
    return isinstance(item, ast.Slice) and item.lower is None and item.upper is None and item.step is None


def _is_open(end: Any) -> bool:
    """Whether a slice goes to the end, as torch says it."""
    return isinstance(end, int) and end > 1 << 60


# -- definitions

PART = {"kernel": Kernel.PART, "saved": "", "result": "0"}
"""A view on some of the elements; backward fills the rest with zeros."""

define("slice", rule={"Tensor": slice_}, canonical=canonical_slice, view=strides.sliced, write_back=write_slice,
       localize=local_slice, prints=print_slice, reads=read_slice, unsaid={"start": 0, "step": 1},
       leaves_out=lambda op, name, value: name == "end" and _is_open(value), chains=True, **PART)  # fmt: skip
define("narrow", canonical=canonical_slice, view=strides.as_it_is, write_back=write_split, **PART)
define("select", rule={"int": select}, view=strides.selected, write_back=write_select, prints=print_select,
       reads=read_select, unsaid={"dim": 0}, chains=True, **PART)  # fmt: skip
define("unbind", rule={"int": unbind}, view=strides.selected, write_back=write_unbound, returns_list=True,
       prints=dims_method("unbind", "dim"), reads="x.unbind(dim)", chains=True, **PART)  # fmt: skip

SPLIT = {"canonical": canonical_split, "view": strides.as_it_is, "returns_list": True, **PART}
SECTIONS = {"localize": local_split, "write_back": write_split, "prints": print_split, "unsaid": {"dim": 0},
            "chains": True}  # fmt: skip
define("split", rule={"Tensor": split}, reads="x.split(split_size, dim)", **SPLIT, **SECTIONS)
define("split_with_sizes", rule=split, reads="x.split(split_sizes, dim)", **SPLIT, **SECTIONS)
define("chunk", write_back=write_split, prints=dims_method("chunk", "chunks", "dim"), reads="x.chunk(chunks, dim)",
       chains=True, **SPLIT)  # fmt: skip
define("tensor_split", **SPLIT)
define("unsafe_chunk unsafe_split unsafe_split_with_sizes", canonical=canonical_split, returns_list=True)
define("dsplit hsplit vsplit gradient nonzero_numpy split_copy split_with_sizes_copy unbind_copy", returns_list=True)

define("unfold", rule=unfold, view=strides.as_it_is, **PART)
define("unfold_copy", rule=unfold)
define("diagonal", rule=diagonal, view=strides.as_it_is, write_back=write_diagonal, kernel=Kernel.VIEW, saved="")
define("diagonal_copy linalg_diagonal", rule=diagonal)
define("slice_scatter", rule=scatter_slice, canonical=canonical_slice_scatter, saved="", prints=function)
define("select_scatter", rule=scatter_slice, saved="", prints=function)

"""Lookups: ops that read or write elements by their numbers, and the algorithm that splits a table by its rows."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from typing import Any

from ..ir import Op
from ..rules.dims import blocked, broadcast_shape, label_dims, marked, stretched, write_rule
from ..rules.notation import Rule, parse
from ..rules.registry import OpCall, letters
from ..rules.signature import Signature
from .contexts import LocalCall, ProgramOnRank, RankRun, RuntimeArguments
from .localizing import one_cut
from .parts import takes_all
from .printing import Printing, axes_text, function, plain
from .reading import Arguments, UnreadableLineError, as_tuple
from .spec import Kernel, define

# -- rules


def embedding(call: OpCall) -> Rule:
    """A table split on its rows is looked up by the algorithm "rows", which leaves a partial sum.

    Where gradients are divided by how often an index occurs, only all indices together say that.
    """
    weight, ids = (call.inputs[0], call.inputs[1])
    if call.op.argument("scale_grad_by_freq", False):
        dims = " ".join(map(str, ids.shape))
        return parse(f"{weight.shape[0]} d ~1, {dims} -> {dims} d")
    places = " ".join(n if s != 1 else "1" for n, s in zip(letters(len(ids.shape), "i"), ids.shape, strict=True))
    return (
        parse(f"v=rows+ d ~1, {places} -> {places} d") if weight.shape[0] > 1 else parse(f"1 d, {places} -> {places} d")
    )


def gather(call: OpCall) -> Rule | None:
    """The dim gathered along is read whole, and the index's own is free; so are the others where sizes agree."""
    if call.op.argument("dim") is None or len(call.inputs[1].shape) != len(call.shape):
        return None
    dim, index = call.dim(), call.inputs[1].shape
    names = label_dims(index)
    left = [
        name if at != dim and own == size else str(size)
        for at, (name, own, size) in enumerate(zip(names, index, call.shape, strict=True))
    ]
    right = [
        name if at == dim or own == size else str(own)
        for at, (name, own, size) in enumerate(zip(names, index, call.shape, strict=True))
    ]
    return write_rule([left, right], [right], [1])


def scatter(call: OpCall) -> Rule:
    """Dims other than the one written along are free where all sizes agree. Adding is a sum over what is added."""
    dim, index = call.dim(), call.inputs[1].shape
    source = call.inputs[2].shape if len(call.inputs) > 2 else index
    names = label_dims(call.shape)
    free = [at != dim and call.shape[at] == index[at] == source[at] for at in range(len(names))]
    adds = call.op.target == "aten.scatter_add.default"
    into = [name if free[at] else blocked(name) for at, name in enumerate(names)]
    along = marked("i" if adds and index[dim] == source[dim] != 1 else str(index[dim]), "+")

    def other(shape: tuple[int, ...]) -> list[str]:
        return [along if at == dim and adds else n if free[at] else str(shape[at]) for at, n in enumerate(names)]

    if adds and index[dim] == source[dim]:
        return parse(f"{' '.join(into)}&, {' '.join(other(index))}, {' '.join(other(source))} -> {' '.join(names)}")
    written = [[n if free[at] else str(v.shape[at]) for at, n in enumerate(names)] for v in call.inputs[1:]]
    replaces = call.op.target == "aten.scatter.src"
    return write_rule([into, *written], [names], [1, None, 1] if replaces else [])


def index_select(call: OpCall) -> Rule:
    dim, names = call.dim(), label_dims(call.shape)
    source = list(names)
    source[dim] = str(call.shape[dim])
    names[dim] = "i" if call.outputs[0].shape[dim] != 1 else "1"
    return write_rule([source, [names[dim]][: len(call.inputs[1].shape)]], [names], [1])


def index_write(call: OpCall) -> Rule:
    """Rows are written by number: what is added is a sum over what is added, what is replaced is read whole."""
    dim, names = call.dim(), label_dims(call.shape)
    into = [blocked(name) if at == dim else name for at, name in enumerate(names)]
    count = call.inputs[1].shape
    if "index_fill" in call.op.target:
        return write_rule([into, [str(size) for size in count], *[[]] * (len(call.inputs) - 2)], [names])
    added = "index_add" in call.op.target and bool(count)
    row = "i+" if added and count[0] > 1 else str(count[0] if count else 1)
    source = [row if at == dim else name for at, name in enumerate(names)]
    if added:
        return parse(f"{' '.join(into)}&, {row}, {' '.join(source)} -> {' '.join(names)}")
    return write_rule([into, [row][: len(count)], source], [names], [1, None, 1])


@dataclass(frozen=True, slots=True)
class IndexDims:
    """For x[i, :, j]: the labels of x, of each index, and of what comes out, with its shape."""

    source: list[str]
    indices: list[list[str]]
    result: list[str]
    shape: tuple[int, ...]
    own: frozenset[str]  # labels of the indices' own dims


def _places(call: OpCall) -> IndexDims | None:
    """What x[i, :, j] reads and makes; None where a mask is an index.

    Dims that an index stands for are read whole. The indices' own dims, broadcast together, take the place of
    the first of them if they stand side by side, else they come first.
    """
    indices = list(call.op.argument("indices", ()))
    tensors = [call.inputs[slot.index] for slot in indices if slot is not None]
    if any(value.dtype in ("bool", "uint8") for value in tensors) or not tensors:
        return None
    indices += [None] * (len(call.shape) - len(indices))
    at = [dim for dim, slot in enumerate(indices) if slot is not None]
    together = broadcast_shape([value.shape for value in tensors])
    labels, names = label_dims(together, "i"), label_dims(call.shape)
    pairs = dict(enumerate(zip(names, call.shape, strict=True)))
    first = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    kept = [dim for dim in pairs if dim not in at]
    result = [pairs[dim] for dim in kept if dim < first]
    result += zip(labels, together, strict=True)
    result += [pairs[dim] for dim in kept if dim >= first]
    return IndexDims(
        source=[str(size) if dim in at else name for dim, (name, size) in pairs.items()],
        indices=[stretched(value.shape, together, labels) for value in tensors],
        result=[name for name, _ in result],
        shape=tuple(size for _, size in result),
        own=frozenset(labels),
    )


def index(call: OpCall) -> Rule | None:
    """Dims that are indexed are read whole, the indices' own dims and the rest are free."""
    places = _places(call)
    return write_rule([places.source, *places.indices], [places.result], [1]) if places else None


def index_put(call: OpCall) -> Rule | None:
    """What is added is a sum over what is added; what replaces may only be split where no index is."""
    places = _places(call)
    if places is None:
        return None
    adds = bool(call.op.argument("accumulate", False))

    def shown(names: list[str]) -> list[str]:
        return [(marked(name, "+") if adds else blocked(name)) if name in places.own else name for name in names]

    values = stretched(call.inputs[-1].shape, places.shape, places.result)
    into = " ".join(places.source) + ("&" if adds else "")
    rest = [" ".join(shown(names)) for names in (*places.indices, values)]
    return parse(f"{', '.join([into, *rest])} -> {' '.join(places.source)}")


def one_hot(call: OpCall) -> Rule:
    names = label_dims(call.shape)
    return parse(f"{' '.join(names)} -> {' '.join([*names, str(call.outputs[0].shape[-1])])}")


def embedding_bag(call: OpCall) -> Rule:
    """Columns of the table are free. Bags are runs of unequal length, so neither they nor their ids are split."""
    width = call.outputs[0].shape[-1]
    inputs = [[str(call.shape[0]), "d"], *([str(size) for size in value.shape] for value in call.inputs[1:])]
    outputs = []
    for value in call.outputs:
        wide = len(value.shape) == 2 and value.shape[1] == width
        outputs.append([str(value.shape[0]), "d"] if wide else [str(size) for size in value.shape])
    return write_rule(inputs, outputs)


def masked_scatter(call: OpCall) -> Rule:
    """Values are taken in the order of the mask: nothing can be split."""
    return parse(f"{', '.join(['?'] * len(call.inputs))} -> {' '.join(map(str, call.outputs[0].shape))}")


def look_up(call: OpCall) -> Rule | None:
    """Each value asked for by itself, in a table that is read whole."""
    table_first = "searchsorted" in call.op.target
    queries, table = (call.inputs[1], call.inputs[0]) if table_first else (call.inputs[0], call.inputs[1])
    names = label_dims(queries.shape)
    rows = [] if len(table.shape) == 1 or not table_first else names[:-1]
    table_dims = [*rows, *map(str, table.shape[len(rows) :])]
    extra = [["?"]] * (len(call.inputs) - 2)
    return write_rule([table_dims, names, *extra] if table_first else [names, table_dims, *extra], [names])


# -- on a rank, and in generated code


def local_embedding(program: ProgramOnRank, op: Op) -> Op:
    weight = program.layouts[op.inputs[0]]
    if not weight.shards[0]:
        return op
    axes, shard = one_cut(program, op, "the rows of a table", weight.shards[0])
    return replace(op, target="runtime.embedding_rows").with_arguments(
        axes=axes, sharding=shard, rows=program.sizes_of(op.inputs[0])[0].global_size()
    )


def _padding(p: Printing) -> str:
    padding = p.literal("padding_idx", -1)
    return f", padding_idx={padding}" if padding is not None and padding >= 0 else ""


def print_embedding(p: Printing) -> str:
    return f"F.embedding({p['indices']}, {p['weight']}{_padding(p)})"


def print_embedding_rows(p: Printing) -> str:
    axes = p.literal("axes")
    sharding = "" if plain(p.literal("sharding"), p.many(axes)) else f", {p['sharding']}"
    shown = f"{p['indices']}, {p['weight']}, {axes_text(axes)}{sharding}"
    return f"runtime.embedding_rows({shown}, rows={p['rows']}{_padding(p)})"


def leaves_out_padding(op: Op, name: str, value: Any) -> bool:
    return name == "padding_idx" and bool(value < 0)


def run_embedding_rows(run: RankRun, a: RuntimeArguments) -> object:
    padding = a["padding_idx"]
    padding = None if padding is None or padding < 0 else padding
    group = run.group(a["axes"])
    return run.runtime.embedding_rows(
        a["indices"], a["weight"], group, a["sharding"], rows=a["rows"], padding_idx=padding
    )


def print_index(p: Printing) -> str:
    shown = [":" if item is None else p.show(item) for item in p.literal("indices")]
    return f"{p.first()}[{', '.join(shown)}]"


def read_index(op: Op, node: ast.expr) -> Arguments:
    if not isinstance(node, ast.Subscript):
        raise UnreadableLineError("it is no subscript")
    items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    shown = [ast.Constant(value=None) if takes_all(item) else item for item in items]
    return {"self": node.value, "indices": as_tuple(shown)}


# -- cost


def located_rows(call: LocalCall, signature: Signature) -> float:
    """Where each id is on this rank, and whether it is (`runtime/algorithms/lookup.py`)."""
    return call.inputs[1].elements * (8.0 + 1.0)


# -- definitions

LOOKUP = {"kernel": Kernel.LOOKUP}
define("embedding", rule=embedding, localize=local_embedding, saved="1", dense=True, fresh=True,
       prints=print_embedding, reads="F.embedding(indices, weight, padding_idx)", positional=2,
       defaults={"padding_idx": -1}, leaves_out=leaves_out_padding, **LOOKUP)  # fmt: skip
define("runtime.embedding_rows", dense=True, fresh=True, saved="", saved_extra=located_rows, work=(1.0, 1.0),
       prints=print_embedding_rows, positional=4, runs=run_embedding_rows,
       reads="runtime.embedding_rows(indices, weight, axes, sharding, rows, padding_idx)",
       defaults={"padding_idx": -1}, leaves_out=leaves_out_padding)  # fmt: skip
define("embedding_bag", rule={"default padding_idx": embedding_bag}, **LOOKUP)
define("_embedding_bag", rule=embedding_bag)
define("index", rule={"Tensor": index}, saved="indices", prints=print_index, reads=read_index, **LOOKUP)
define("_unsafe_index", rule={"Tensor": index}, saved="indices")
define("index_select", rule=index_select, saved="1", prints=function, **LOOKUP)
define("gather", rule=gather, saved="1", prints=function, **LOOKUP)
define("take_along_dim", rule=gather, saved="indices", **LOOKUP)
define("take", **LOOKUP)
define("one_hot", rule=one_hot)
define("searchsorted bucketize", rule={"Tensor": look_up})
define("isin", rule={"Tensor_Tensor": look_up})
define("masked_select", saved="indices")

define("scatter", rule={"src value reduce value_reduce": scatter}, saved="indices")
define("scatter_add", rule=scatter, saved="indices")
define("scatter_reduce", rule={"two": scatter})
define("index_add index_copy", rule=index_write, saved="indices")
define("index_fill", rule={"int_Scalar int_Tensor": index_write})
define("index_put", rule=index_put, saved="indices")
define("masked_scatter", rule=masked_scatter)

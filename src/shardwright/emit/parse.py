"""A line of generated code, read back: which arguments of its op it gives, by their names.

Translation validation (`validate.py`) compares what is read here with the op that the line stands
for. So nothing here may be taken from the printers: what `F.pad` does with its second argument is
said again, as torch says it. `tests/emit/test_parse.py` holds the table against torch's own signatures.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cache

from ..ir import Op

Arguments = dict[str, ast.expr]
"""The arguments of an op as the line writes them, by the op's own names for them."""


class UnreadableLineError(Exception):
    """A line that does not read as a call of its op."""


SIGNS: dict[type[ast.operator] | type[ast.cmpop], tuple[str, ...]] = {
    ast.Add: ("add",), ast.Sub: ("sub",), ast.Mult: ("mul",), ast.Div: ("div",), ast.Pow: ("pow",),
    ast.MatMult: ("matmul", "mm", "bmm"), ast.BitAnd: ("bitwise_and", "__and__"),
    ast.BitOr: ("bitwise_or", "__or__"), ast.Eq: ("eq",), ast.NotEq: ("ne",), ast.Lt: ("lt",), ast.LtE: ("le",),
    ast.Gt: ("gt",), ast.GtE: ("ge",),
}  # fmt: skip
"""The ops that an operator of Python calls on tensors."""

RIGHT = {"pow": "exponent", "mm": "mat2", "bmm": "mat2"}
"""What an op calls its right operand, where that is not `other`."""

FORMS = {
    "view": "x.view(*size)", "_unsafe_view": "x.view(*size)", "reshape": "x.reshape(*shape)",
    "expand": "x.expand(*size)", "transpose": "x.transpose(dim0, dim1)", "permute": "x.permute(*dims)",
    "unsqueeze": "x.unsqueeze(dim)", "squeeze": "x.squeeze(*dim)", "unbind": "x.unbind(dim)",
    "chunk": "x.chunk(chunks, dim)", "sum": "x.sum(dim, keepdim, dtype)", "mean": "x.mean(dim, keepdim, dtype)",
    "split": "x.split(split_size, dim)", "split_with_sizes": "x.split(split_sizes, dim)", "_to_copy": "x.to(dtype)",
    "linear": "F.linear(input, weight, bias)", "addmm": "torch.addmm(self, mat1, mat2, beta, alpha)",
    "gelu": "F.gelu(self, approximate)", "silu": "F.silu(self)", "relu": "F.relu(self)",
    "softmax": "F.softmax(self, dim, dtype)", "_softmax": "F.softmax(self, dim)",
    "log_softmax": "F.log_softmax(self, dim, dtype)",
    "layer_norm": "F.layer_norm(input, normalized_shape, weight, bias, eps)",
    "embedding": "F.embedding(indices, weight, padding_idx)",
    "cross_entropy_loss": "F.cross_entropy(self, target, weight, ignore_index, reduction, label_smoothing)",
    "mse_loss": "F.mse_loss(self, target, reduction)", "l1_loss": "F.l1_loss(self, target, reduction)",
    "scaled_dot_product_attention": (
        "F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)"
    ),
    "constant_pad_nd": "F.pad(self, pad, value)", "pad": "F.pad(self, pad, value)",
    "where": "torch.where(condition, self, other)",
    "cat": "torch.cat(tensors, dim)", "stack": "torch.stack(tensors, dim)",
    "einsum": "torch.einsum(equation, *tensors)", "broadcast_tensors": "torch.broadcast_tensors(*tensors)",
    **{f"conv{n}d": f"F.conv{n}d(input, weight, bias, stride, padding, dilation, groups)" for n in (1, 2, 3)},
    "conv_transpose2d": "F.conv_transpose2d(input, weight, bias, stride, padding, output_padding, groups, dilation)",
    "runtime.embedding_rows": "runtime.embedding_rows(indices, weight, axes, sharding, rows, padding_idx)",
    "runtime.cross_entropy": (
        "runtime.cross_entropy(self, target, rows, classes, sharding, size, weight, ignore_index, reduction, "
        "label_smoothing, count, whole)"
    ),
    "runtime.nll_loss": "runtime.nll_loss(self, target, rows, weight, ignore_index, reduction, count, whole)",
    "runtime.begin_count": "runtime.begin_count(target, rows, weight, ignore_index)",
    "runtime.count_labels": "runtime.count_labels(target, weight, ignore_index)",
    "runtime.dropout": "self.random.dropout(x, p, op_key, splits, train)",
    "comm.all_to_all": "comm.all_to_all(x, dim, to_dim, axes, sharding, to_sharding)",
    "comm.reduce": "comm.all_reduce(x, axes, op)",
    **{f"comm.{kind}": f"comm.{kind}(x, axes)" for kind in ("all_reduce", "replicate", "partial", "invariant")},
    **{f"comm.{kind}": f"comm.{kind}(x, dim, axes, sharding)"
       for kind in ("all_gather", "shard", "reduce_scatter", "zero_pad")},
    "comm.all_reduce_to_r": "comm.all_reduce(x, axes, dst)",
    "comm.all_gather_to_r": "comm.all_gather(x, dim, axes, sharding, dst)",
    "comm.shard_from_r": "comm.shard(x, dim, axes, sharding, src)",
}  # fmt: skip
"""How the line of an op reads: the callee, and the op's arguments in the callee's order; `x` is its first argument."""

KEYWORDS = {
    "comm.all_to_all": {"gather_sharding": "sharding", "shard_sharding": "to_sharding"},
    "runtime.dropout": {"training": "train"},
}
"""Keywords of a callee that an op has other names for."""

NAMED_ONLY = {
    "cross_entropy_loss": 2, "mse_loss": 2, "l1_loss": 2, "softmax": 2, "log_softmax": 2, "sum": 1, "mean": 1,
    "runtime.cross_entropy": 2, "runtime.nll_loss": 2, "runtime.begin_count": 1, "runtime.count_labels": 1,
    "runtime.dropout": 3, "runtime.embedding_rows": 4, "comm.all_to_all": 4, "comm.reduce": 2,
    "comm.all_reduce_to_r": 2, "comm.all_gather_to_r": 4, "comm.shard_from_r": 4, "addmm": 3, "constant_pad_nd": 2,
    "pad": 2,
    "scaled_dot_product_attention": 3, "gelu": 1, "embedding": 2,
}  # fmt: skip
"""How many arguments of a form are given by position; the callee has others between or before the rest."""


def parse_line(op: Op, node: ast.expr) -> Arguments:
    """The arguments that a line gives its op; raises if the line is no call of that op."""
    base = base_name(op)
    if isinstance(node, ast.Call) and dotted(node.func) == f"torch.ops.{op.target}":
        return _by_name(op, node)
    special = SPECIAL.get(op.target) or SPECIAL.get(base) or (_user_function if op.target.startswith("call.") else None)
    if special is not None:
        return special(op, node)
    if isinstance(node, ast.BinOp | ast.Compare):
        return _operator(base, node)
    if not isinstance(node, ast.Call):
        raise UnreadableLineError(f"it is no call of {op.target}")
    form = FORMS.get(op.target) or FORMS.get(base)
    if form is not None:
        return _by_form(op, node, form)
    if dotted(node.func) == f"torch.{base}":
        return _by_name(op, node)
    if isinstance(node.func, ast.Attribute) and node.func.attr == base and not node.args and not node.keywords:
        return {op.arguments[0][0]: node.func.value}
    raise UnreadableLineError(f"it calls {dotted(node.func)}")


def base_name(op: Op) -> str:
    """The op without its library and its overload: "linear"."""
    return op.target.removeprefix("weights.").removeprefix("aten.").rsplit(".", 1)[0]


def dotted(node: ast.expr) -> str:
    """A chain of attributes as text; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    inner = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{inner}.{node.attr}" if inner and isinstance(node, ast.Attribute) else ""


def keywords(node: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    """Keyword arguments, those of `**{"from": x}` too."""
    for keyword in node.keywords:
        if keyword.arg is not None:
            yield keyword.arg, keyword.value
        elif isinstance(keyword.value, ast.Dict):
            for key, value in zip(keyword.value.keys, keyword.value.values, strict=True):
                if not isinstance(key, ast.Constant):
                    raise UnreadableLineError("it has a keyword that is no text")
                yield str(key.value), value
        else:
            raise UnreadableLineError("it has keywords that can't be read")


def _by_name(op: Op, node: ast.Call) -> Arguments:
    """The first argument by its place, the others by their names."""
    if len(node.args) > 1:
        raise UnreadableLineError("it has more than one argument without a name")
    read = {op.arguments[0][0]: node.args[0]} if node.args else {}
    return _with_keywords(op, read, node)


def _with_keywords(op: Op, read: Arguments, node: ast.Call) -> Arguments:
    names = KEYWORDS.get(op.target, {})
    for keyword, value in keywords(node):
        name = names.get(keyword, keyword)
        if name in read:
            raise UnreadableLineError(f"it gives {name} twice")
        read[name] = value
    return read


@cache
def _form(text: str) -> tuple[str, tuple[str, ...]]:
    callee, _, rest = text.partition("(")
    return callee, tuple(rest.removesuffix(")").split(", "))


def _by_form(op: Op, node: ast.Call, form: str) -> Arguments:
    callee, names = _form(form)
    read: Arguments = {}
    if callee.startswith("x.") and isinstance(node.func, ast.Attribute) and node.func.attr == callee[2:]:
        read[op.arguments[0][0]] = node.func.value
    elif dotted(node.func) != _called(op, callee):
        raise UnreadableLineError(f"it calls {dotted(node.func) or ast.unparse(node.func)} instead of {callee}")
    if names[-1].startswith("*"):
        count = len(names) - 1
        read |= dict(zip(names, node.args[:count], strict=False))
        name, rest = _size_name(op, names[-1][1:]), node.args[count:]
        alone = len(rest) == 1 and (isinstance(rest[0], ast.Tuple) or not isinstance(op.argument(name), tuple))
        read[name] = rest[0] if alone else _tuple(rest)
    else:
        positional = NAMED_ONLY.get(op.target, NAMED_ONLY.get(base_name(op), len(names)))
        if len(node.args) > positional:
            raise UnreadableLineError(f"it gives {len(node.args)} arguments by position")
        first = op.arguments[0][0] if op.arguments and not op.target.startswith("comm.") else "x"
        read |= {first if name == "x" else name: value for name, value in zip(names, node.args, strict=False)}
    return _with_keywords(op, read, node)


def _called(op: Op, callee: str) -> str:
    if op.target.startswith("weights."):
        return f"self.weights.{callee.split('.', 1)[1]}"
    if op.argument("later"):
        return "runtime.all_reduce_pending"
    return f"{callee}_" if op.argument("in_place") else callee


def _size_name(op: Op, name: str) -> str:
    """`view` has overloads that call their sizes otherwise."""
    return name if op.argument(name) is not None or op.argument("size" if name == "shape" else "shape") is None else (
        "size" if name == "shape" else "shape"
    )  # fmt: skip


def _operator(base: str, node: ast.BinOp | ast.Compare) -> Arguments:
    left = node.left
    sign: ast.operator | ast.cmpop = node.ops[0] if isinstance(node, ast.Compare) else node.op
    right = node.comparators[0] if isinstance(node, ast.Compare) else node.right
    if isinstance(node, ast.Compare) and len(node.ops) > 1:
        raise UnreadableLineError("it compares more than two")
    if base not in SIGNS.get(type(sign), ()):
        raise UnreadableLineError(f"its operator is not that of {base}")
    read = {"self": left}
    if base in ("add", "sub") and isinstance(right, ast.BinOp) and isinstance(right.op, ast.Mult):
        read["alpha"], right = right.left, right.right
    return read | {RIGHT.get(base, "other"): right}


def _slice(op: Op, node: ast.expr) -> Arguments:
    """`x[:, 2:5]` or `x[..., 2:5, :]`: one dim is sliced, the others are there as they are."""
    if not isinstance(node, ast.Subscript):
        raise UnreadableLineError("it is no slice")
    items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    dim = _only_dim(items)
    item = items[dim if dim >= 0 else len(items) + dim]
    read: Arguments = {"self": node.value, "dim": _number(dim)}
    if not isinstance(item, ast.Slice):
        return read | {"index": item}
    read |= {
        name: value
        for name, value in (("start", item.lower), ("end", item.upper), ("step", item.step))
        if value is not None
    }
    return read


def _select(op: Op, node: ast.expr) -> Arguments:
    if isinstance(node, ast.Call):
        return _by_form(op, node, "x.select(dim, index)")
    return _slice(op, node)


def _only_dim(items: list[ast.expr]) -> int:
    """The dim that a subscript is about; counted from the end where it begins with `...`."""
    chosen = [at for at, item in enumerate(items) if not _is_all(item)]
    if len(chosen) > 1:
        raise UnreadableLineError("it subscripts several dims")
    if isinstance(items[0], ast.Constant) and items[0].value is Ellipsis:
        return (chosen[0] if chosen else 1) - len(items)
    return chosen[0] if chosen else len(items) - 1


def _is_all(item: ast.expr) -> bool:
    if isinstance(item, ast.Constant):
        return item.value is Ellipsis
    return isinstance(item, ast.Slice) and item.lower is None and item.upper is None and item.step is None


def _number(value: int) -> ast.expr:
    return ast.Constant(value=value)


def _index(op: Op, node: ast.expr) -> Arguments:
    if not isinstance(node, ast.Subscript):
        raise UnreadableLineError("it is no subscript")
    items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    shown = [ast.Constant(value=None) if _is_all(item) else item for item in items]
    return {"self": node.value, "indices": _tuple(shown)}


def _conv(op: Op, node: ast.expr) -> Arguments:
    """`aten.convolution` is one op for all of them; what it is transposed by and over how many dims is in the name."""
    transposed = bool(op.argument("transposed"))
    dims = len(op.argument("stride"))
    order = "output_padding, groups, dilation" if transposed else "dilation, groups"
    name = f"conv{'_transpose' if transposed else ''}{dims}d"
    if not isinstance(node, ast.Call):
        raise UnreadableLineError("it is no call")
    read = _by_form(op, node, f"F.{name}(input, weight, bias, stride, padding, {order})")
    return read | {"transposed": ast.Constant(value=transposed)}


def _batch_norm(op: Op, node: ast.expr) -> Arguments:
    if isinstance(node, ast.Subscript) and len(op.outputs) == 1:
        node = node.value
    if not isinstance(node, ast.Call):
        raise UnreadableLineError("it is no call")
    names = "input, weight, bias, running_mean, running_var, training, momentum, eps, axes"
    return _by_form(op, node, f"runtime.batch_norm({names})")


def _attention(op: Op, node: ast.expr) -> Arguments:
    if not isinstance(node, ast.Call):
        raise UnreadableLineError("it is no call")
    names = "query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, op_key, splits"
    read = _by_form(op, node, f"self.random.attention({names})")
    return {"op_key" if name == "op" else name: value for name, value in read.items()}


def _linears(op: Op, node: ast.expr) -> Arguments:
    """One layer by its weight and bias, several by lists of them."""
    if not isinstance(node, ast.Call):
        raise UnreadableLineError("it is no call")
    lead = "input, dim, axes" if op.target == "runtime.all_gather_linears" else "input, axes"
    if len(op.argument("weights")) > 1:
        return _by_form(op, node, f"{op.target}({lead}, weights, biases)")
    read = _by_form(op, node, f"{op.target.removesuffix('s')}({lead}, weights, biases)")
    return {name: _tuple([value]) if name in ("weights", "biases") else value for name, value in read.items()}


def _custom_algorithm(op: Op, node: ast.expr) -> Arguments:
    """`runtime.custom_algorithm(path, label, group, size)(...)`: a custom algorithm, and what it is called with."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Call):
        raise UnreadableLineError("it is no call of a custom algorithm")
    read = _by_form(op, node.func, "runtime.custom_algorithm(path, label, axes, size)")
    pairs = [*(("", value) for value in node.args), *keywords(node)]
    return read | {"given": _tuple([_tuple([ast.Constant(value=name), value]) for name, value in pairs])}


def _opaque(op: Op, node: ast.expr) -> Arguments:
    callee = "self.experts" if op.target == "runtime.experts" else "self.opaque"
    if not isinstance(node, ast.Call) or dotted(node.func) != callee:
        raise UnreadableLineError(f"it is no call of {callee}")
    read: Arguments = {"op_key": node.args[0], "tensors": _tuple(node.args[1:]), "held": ast.Dict(keys=[], values=[])}
    return read | {{"over": "axes"}.get(name, name): value for name, value in keywords(node)}


def _user_function(op: Op, node: ast.expr) -> Arguments:
    """A function of the user's takes everything by position."""
    if not isinstance(node, ast.Call) or node.keywords or len(node.args) != len(op.arguments):
        raise UnreadableLineError("it is no call with all arguments by position")
    return {name: value for (name, _), value in zip(op.arguments, node.args, strict=True)}


def _control_flow(*names: str) -> Callable[[Op, ast.expr], Arguments]:
    def parse(op: Op, node: ast.expr) -> Arguments:
        if not isinstance(node, ast.Call):
            raise UnreadableLineError("it is no call")
        return _by_form(op, node, f"{op.target.replace('call.', 'runtime.')}({', '.join(names)})")

    return parse


def _tuple(items: list[ast.expr]) -> ast.expr:
    return ast.Tuple(elts=items, ctx=ast.Load())


SPECIAL: dict[str, Callable[[Op, ast.expr], Arguments]] = {
    "slice": _slice, "select": _select, "index": _index, "convolution": _conv, "runtime.batch_norm": _batch_norm,
    "runtime.attention": _attention, "runtime.replicate_linears": _linears, "runtime.all_gather_linears": _linears,
    "runtime.custom_algorithm": _custom_algorithm, "call.opaque": _opaque, "runtime.experts": _opaque,
    "call.cond": _control_flow("predicate", "then", "then_operands", "other", "other_operands"),
    "call.scan": _control_flow("step", "init", "xs", "held"),
    "call.while_loop": _control_flow("test", "body", "carried", "held"),
}  # fmt: skip

"""How the runtime's own ops print: reshards, algorithms of a split op, random ops, custom ops, control flow."""

from __future__ import annotations

from collections.abc import Callable

from ..layout import Shard
from .printing import Printing, axes_text, plain, show_shard

Printer = Callable[[Printing], str]
STATED = {
    "all_reduce_to_r": ("all_reduce", ", dst=R"),
    "all_gather_to_r": ("all_gather", ", dst=R"),
    "shard_from_r": ("shard", ", src=R"),
}
"""Kinds of reshards that generated code says with a state."""

REDUCTIONS = {0: '"none"', 1: '"mean"', 2: '"sum"'}


def reshard_call(p: Printing) -> str:
    kind = p.op.target.removeprefix("comm.")
    axes: tuple[str, ...] = p.literal("axes")
    group, x = axes_text(axes), p.names[0]
    if kind == "all_to_all":
        shardings = [("gather_sharding", p.literal("sharding")), ("shard_sharding", p.literal("to_sharding"))]
        extra = "".join(f", {key}={show_shard(shard)}" for key, shard in shardings if not plain(shard, p.many(axes)))
        return f"comm.all_to_all({x}, {p['dim']}, {p['to_dim']}, {group}{extra})"
    if kind == "reduce":
        return f"comm.all_reduce({x}, {group}, op={p['op']})"
    if p.literal("later"):
        return f"runtime.all_reduce_pending({x}, {group})"
    function, state = STATED.get(kind, (kind, ""))
    if p.literal("dim") is None:
        return f"comm.{function}{'_' if p.literal('in_place') else ''}({x}, {group}{state})"
    sharding = p.literal("sharding")
    extra = "" if plain(sharding, p.many(axes)) else f", {show_shard(sharding)}"
    return f"comm.{function}({x}, {p['dim']}, {group}{extra}{state})"


def cross_entropy(p: Printing) -> str:
    reduction = p.literal("reduction", 1)
    rows, classes = p.literal("rows"), p.literal("classes")
    shown = [p["self"], p["target"]]
    if rows:
        shown.append(f"rows={axes_text(rows)}")
    if classes:
        shown += [f"classes={axes_text(classes)}", f"sharding={p['sharding']}", f"size={p['size']}"]
    shown += _which_labels(p)
    if reduction != 1:
        shown.append(f"reduction={REDUCTIONS[reduction]}")
    if p.literal("label_smoothing", 0.0):
        shown.append(f"label_smoothing={p['label_smoothing']}")
    if p.has("count"):
        shown.append(f"count={p['count']}")
    if p.literal("whole"):
        shown.append("whole=True")
    where = "runtime" if p.op.target.startswith("runtime.") else "F"
    return f"{where}.{'nll_loss' if 'nll' in p.op.target else 'cross_entropy'}({', '.join(shown)})"


def _which_labels(p: Printing) -> list[str]:
    defaults = [("weight", None), ("ignore_index", -100)]
    return [f"{key}={p[key]}" for key, usual in defaults if p.literal(key, usual) != usual]


def _begin_count(p: Printing) -> str:
    rows = axes_text(p.literal("rows"))
    return f"runtime.begin_count({', '.join([p['target'], f'rows={rows}', *_which_labels(p)])})"


def _linears(p: Printing) -> str:
    """One layer by its weight and bias, several by lists of them."""
    weights, biases, sharding = p.literal("weights"), p.literal("biases"), p.literal("sharding")
    single = len(weights) == 1
    shown = [p["input"], *([p["dim"]] if p.has("dim") else []), axes_text(p.literal("axes"))]
    for column in (weights, biases):
        if column is not None:
            shown.append(p.show(column[0]) if single else f"[{', '.join(p.show(item) for item in column)}]")
    if not plain(sharding, p.many(p.literal("axes"))):
        shown.append(f"sharding={show_shard(sharding)}")
    return f"{p.op.target.removesuffix('s') if single else p.op.target}({', '.join(shown)})"


def _batch_norm(p: Printing) -> str:
    axes = p.literal("axes")
    group = axes_text(axes) if axes else "None"
    return (
        f"runtime.batch_norm({p['input']}, {p['weight']}, {p['bias']}, {p['running_mean']}, {p['running_var']}, "
        f"{p.literal('training', True)}, {p['momentum']}, {p['eps']}, {group}){'' if len(p.op.outputs) > 1 else '[0]'}"
    )


def _custom_algorithm(p: Printing) -> str:
    shown = [f"{name}={p.show(value)}" if name else p.show(value) for name, value in p.literal("given")]
    arguments = f"{p['path']}, {p['label']}, {axes_text(p.literal('axes'))}, {p['size']}"
    return f"runtime.custom_algorithm({arguments})({', '.join(shown)})"


def _splits(p: Printing) -> str:
    splits: tuple[tuple[int, Shard], ...] = p.literal("splits")
    shown = ", ".join(f"({dim}, {axes_text((shard.axis,))}, {show_shard(shard)})" for dim, shard in splits)
    return f", splits=[{shown}]" if splits else ""


def _dropout(p: Printing) -> str:
    training = "" if p.literal("train", True) else ", training=False"
    return f"self.random.dropout({p.first()}, {p['p']}, {p['op_key']}{_splits(p)}{training})"


def _keyed_attention(p: Printing) -> str:
    mask = p["attn_mask"] if p.has("attn_mask") else "None"
    return (
        f"self.random.attention({p['query']}, {p['key']}, {p['value']}, {mask}, {p['dropout_p']}, "
        f"{bool(p.literal('is_causal'))}, {p['scale']}, {bool(p.literal('enable_gqa'))}, op={p['op_key']}{_splits(p)})"
    )


def _opaque(p: Printing) -> str:
    """A part of the user's model that stays as it is; it takes its parameters from the stage, except those named."""
    p.skip("batch", "rule")  # they say how it may be split
    shown = [p["op_key"], *(p.show(slot) for slot in p.literal("tensors"))]
    passed = [f'"{name}": {p.show(slot)}' for name, slot in zip(p.literal("names"), p.literal("held"), strict=True)]
    shown += [f"held={{{', '.join(passed)}}}"] if passed else []
    shown += [f"over={axes_text(p.literal('axes'))}"] if p.literal("axes") else []
    if p.literal("home"):
        shown += [f"home={axes_text(p.literal('home'))}", f"sharding={p['sharding']}"]
        return f"self.experts({', '.join(shown)})"
    return f"self.opaque({', '.join(shown)})"


def _cond(p: Printing) -> str:
    operands = p.literal("operands")
    shown = [p["predicate"]]
    for role in ("then", "other"):
        picked = tuple(operands[at] for at in p.literal(f"{role}_takes"))
        shown += [f"self.{p.literal(role)}", p.show(picked)]
    return f"runtime.cond({', '.join(shown)})"


def _scan(p: Printing) -> str:
    return f"runtime.scan(self.{p.literal('step')}, {p['init']}, {p['xs']}, {p['held']})"


def _while_loop(p: Printing) -> str:
    bodies = f"self.{p.literal('test')}, self.{p.literal('body')}"
    return f"runtime.while_loop({bodies}, {p['carried']}, {p['held']})"


def _embedding_rows(p: Printing) -> str:
    padding = p.literal("padding_idx", -1)
    extra = f", padding_idx={padding}" if padding is not None and padding >= 0 else ""
    return (
        f"runtime.embedding_rows({p['indices']}, {p['weight']}, {axes_text(p.literal('axes'))}, {p['sharding']}, "
        f"rows={p['rows']}{extra})"
    )


RUNTIME_PRINTERS: dict[str, Printer] = {
    "runtime.embedding_rows": _embedding_rows,
    "runtime.cross_entropy": cross_entropy, "runtime.nll_loss": cross_entropy, "runtime.begin_count": _begin_count,
    "runtime.count_labels": lambda p: f"runtime.count_labels({', '.join([p['target'], *_which_labels(p)])})",
    "runtime.replicate_linears": _linears, "runtime.all_gather_linears": _linears, "runtime.batch_norm": _batch_norm,
    "runtime.dropout": _dropout, "runtime.attention": _keyed_attention, "runtime.custom_algorithm": _custom_algorithm,
    "call.opaque": _opaque, "runtime.experts": _opaque,
    "call.cond": _cond, "call.scan": _scan, "call.while_loop": _while_loop,
}  # fmt: skip

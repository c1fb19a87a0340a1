"""Scaled dot product attention: batch and heads may be split, and the sequence (context parallelism).

    g, r    heads: groups, and the queries' heads in a group
    s       queries; every rank has all keys and values, gathered before
    t       keys, and the queries with them: keys and values travel from rank to rank (ring attention)
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..ir import Op
from ..layout import Mesh
from ..rules.notation import Rule, parse
from ..rules.registry import OpCall, letters
from ..rules.signature import Signature
from .contexts import AlgorithmCollective, LocalCall, ProgramOnRank, RankRun, RuntimeArguments, SavedForBackward
from .localizing import one_cut, splits
from .printing import Printing, axes_text, plain
from .random import groups_of_splits, print_splits
from .reading import Arguments, read_form
from .spec import Kernel, define


def attention(call: OpCall) -> Rule | None:
    """Batch and heads, queries, or keys together with queries.

    With grouped heads the queries' heads are (g r) and those of keys and values g. Where a query's place matters
    (causal), an algorithm knows the places of a shard. A mask has all keys of its queries, wherever those are.
    """
    q, k, v = (value.shape for value in call.inputs[:3])
    if len(q) < 3 or not q[:-3] == k[:-3] == v[:-3] or not len(q) == len(k) == len(v):
        return None  # leading dims that broadcast
    lead = letters(len(q) - 3, "b")
    query_heads, key_heads = q[-3], k[-3]
    grouped = query_heads != key_heads
    heads = "(g r)" if grouped else "g"
    causal = bool(call.op.argument("is_causal", False))
    s = "s=queries" if causal else "s"
    mask = call.tensor("attn_mask")
    whole = call.op.argument("dropout_p", 0.0) or (mask is not None and mask.gradient) or not call.inputs[0].floating
    t = "t^" if whole or len(q) != 4 else "t=ring@s"
    row = " ".join(lead)
    terms = [f"{row} {heads} {s} e^", f"{row} g {t} e^", f"{row} g {t} d^"]
    if mask is not None:
        terms.append(_mask_term(mask.shape, call.outputs[0].shape, lead, heads, s))
    rule = parse(f"{', '.join(terms)} -> {row} {heads} {s} d^").with_triangular("st" if causal else ())
    return rule.with_sizes({"g": key_heads, "r": query_heads // key_heads} if grouped else {})


def _mask_term(shape: tuple[int, ...], out: tuple[int, ...], lead: list[str], heads: str, s: str) -> str:
    """A mask broadcasts to [..., heads, queries, keys]."""
    full = [*lead, heads, s, str(shape[-1])]
    sizes = [*out[:-1], shape[-1]]
    shown, own = full[len(full) - len(shape) :], sizes[len(full) - len(shape) :]
    return " ".join(name if size == want else "1" for name, size, want in zip(shown, shape, own, strict=True))


def local_attention(program: ProgramOnRank, op: Op) -> Op:
    """With dropout the masks are drawn by position; shards of a sequence know their places in it."""
    where = splits(program.layouts[op.outputs[0]])
    if op.argument("dropout_p", 0.0):
        return replace(op, target="runtime.attention").with_arguments(op_key=op.name, splits=where)
    keys = program.layouts[op.inputs[1]].shards[-2]
    queries = tuple((dim, shard) for dim, shard in where if dim == len(program.layouts[op.outputs[0]].shards) - 2)
    if not keys and not (queries and op.argument("is_causal", False)):
        return op
    names = ("query", "key", "value", "attn_mask", "is_causal", "scale")
    arguments = [(name, value) for name, value in op.arguments if name in names and value is not None]
    if keys:
        axes, shard = one_cut(program, op, "keys", keys)
        arguments += [("ring", axes), ("sharding", shard)]
    if [shard for _, shard in queries] != list(keys):
        arguments.append(("splits", queries))
    return replace(op, target="runtime.context_attention", arguments=tuple(arguments))


# -- in generated code


def print_attention(p: Printing) -> str:
    causal = ", is_causal=True" if p.literal("is_causal") else ""
    gqa = ", enable_gqa=True" if p.literal("enable_gqa") else ""
    drop = f", dropout_p={p['dropout_p']}" if p.literal("dropout_p") else ""
    return (
        f"F.scaled_dot_product_attention({p['query']}, {p['key']}, {p['value']}"
        f"{p.options('attn_mask', 'scale')}{drop}{causal}{gqa})"
    )


def print_keyed_attention(p: Printing) -> str:
    mask = p["attn_mask"] if p.has("attn_mask") else "None"
    return (
        f"self.random.attention({p['query']}, {p['key']}, {p['value']}, {mask}, {p['dropout_p']}, "
        f"{bool(p.literal('is_causal'))}, {p['scale']}, {bool(p.literal('enable_gqa'))}, op={p['op_key']}"
        f"{print_splits(p)})"
    )


def read_keyed_attention(op: Op, node: ast.expr) -> Arguments:
    names = "query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, op_key, splits"
    read = read_form(op, node, f"self.random.attention({names})")
    return {"op_key" if name == "op" else name: value for name, value in read.items()}


def run_keyed_attention(run: RankRun, a: RuntimeArguments) -> object:
    return run.random.attention(
        a["query"], a["key"], a["value"], a["attn_mask"], a["dropout_p"], bool(a["is_causal"]), a["scale"],
        bool(a["enable_gqa"]), op=a["op_key"], splits=groups_of_splits(run, a),
    )  # fmt: skip


def print_context_attention(p: Printing) -> str:
    shown = [p["query"], p["key"], p["value"]]
    shown += [f"{name}={p[name]}" for name in ("attn_mask", "scale") if p.has(name)]
    if p.literal("is_causal"):
        shown.append("is_causal=True")
    if p.has("ring"):
        axes = p.literal("ring")
        even = plain(p.literal("sharding"), p.many(axes))
        shown += [f"ring={axes_text(axes)}", *([] if even else [f"sharding={p['sharding']}"])]
    where = print_splits(p) if p.has("splits") else ""
    return f"runtime.context_attention({', '.join(shown)}{where})"


def run_context_attention(run: RankRun, a: RuntimeArguments) -> object:
    return run.runtime.context_attention(
        a["query"], a["key"], a["value"], attn_mask=a["attn_mask"], scale=a["scale"],
        is_causal=bool(a["is_causal"]), ring=run.group(a["ring"]), sharding=a["sharding"],
        splits=groups_of_splits(run, a) if a["splits"] is not None else None,
    )  # fmt: skip


# -- communication


def send_keys(
    call: LocalCall, signature: Signature, axes: Mapping[str, tuple[str, ...]], mesh: Mesh
) -> list[AlgorithmCollective]:
    """A ring: keys and values of every other rank, forward; backward these again, and their gradients."""
    if "ring" not in axes:
        return []
    ranks = math.prod(mesh.axis(name).size for name in axes["ring"])
    block = call.inputs[1].bytes + call.inputs[2].bytes
    shifts = [AlgorithmCollective("send", block, axes["ring"], "forward")] * (ranks - 1)
    if call.gradient:
        shifts += [AlgorithmCollective("send", 2 * block, axes["ring"], "backward")] * (ranks - 1)
    return shifts


# -- memory


def saved_attention(call: LocalCall, signature: Signature, flat: Sequence[bool] | None) -> SavedForBackward:
    """The fused kernel keeps q, k, v, its result and a number for each query; other ways keep the scores.

    The kernel wants a floating mask, and one without a gradient. With dropout the weights are computed as they stand.
    """
    query, key, value = call.inputs[:3]
    flat = flat or [True] * len(call.inputs)
    shape = signature.analysis.graph.values[call.op.inputs[0]].shape
    keys = signature.analysis.graph.values[call.op.inputs[1]].shape[-2]
    queries = query.elements / max(shape[-1], 1)
    scores = queries * keys * query.item
    mask = call.inputs[3] if len(call.inputs) > 3 else None
    rest = (False,) * (len(call.inputs) - 3)
    if call.op.argument("dropout_p", 0.0):  # softmax, the mask that drops, what is left
        copies = sum(tensor.bytes for tensor, is_flat in zip((query, key, value), flat, strict=False) if not is_flat)
        own = tuple(flat[:3])
        if len(shape) > 2 and call.op.argument("enable_gqa", False):  # the KV heads and values, repeated
            groups = shape[-3] / max(signature.analysis.graph.values[call.op.inputs[1]].shape[-3], 1)
            repeated = groups * (key.bytes + value.bytes)
            copies, own = repeated + (0.0 if flat[0] else query.bytes), (flat[0], False, False)
        return SavedForBackward((*own, *rest), (False,), copies + scores * 2 + queries * keys)
    if mask is not None and mask.gradient:  # scaled copies of q and k, softmax
        return SavedForBackward((False, False, True, *rest), (False,), query.bytes + key.bytes + scores)
    extra = queries * 4.0
    if mask is not None and mask.dtype == "bool":
        extra += mask.elements * query.item
    elif mask is not None:
        rest = (True, *rest[1:])
    return SavedForBackward((True, True, True, *rest), (True,), extra)


def scores_work(call: LocalCall, signature: Signature) -> tuple[float, float]:
    """The scores, where the fused kernel can't be used."""
    shape = signature.analysis.graph.values[call.op.inputs[0]].shape
    keys = signature.analysis.graph.values[call.op.inputs[1]].shape[-2]
    query = call.inputs[0]
    scores = query.bytes / max(shape[-1], 1) * keys
    if call.op.argument("dropout_p", 0.0) or (len(call.inputs) > 3 and call.inputs[3].gradient):
        return 2 * scores, 2 * scores
    return 0.0, 0.0


define("scaled_dot_product_attention", rule=attention, keyed=True, localize=local_attention, kernel=Kernel.ATTENTION,
       keeps_order=True, saved=saved_attention, work=scores_work, collectives=send_keys, prints=print_attention,
       positional=3,
       result="attention",
       reads="F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)",
       unsaid={"dropout_p": 0.0, "is_causal": False, "enable_gqa": False})  # fmt: skip
define("runtime.attention", keyed=True, prints=print_keyed_attention, reads=read_keyed_attention,
       runs=run_keyed_attention, unsaid={"is_causal": False, "enable_gqa": False})  # fmt: skip
define("runtime.context_attention", prints=print_context_attention, positional=3, runs=run_context_attention,
       reads="runtime.context_attention(query, key, value, attn_mask, scale, is_causal, ring, sharding, splits)",
       unsaid={"is_causal": False})  # fmt: skip
define("_scaled_dot_product_attention_math _scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention "
       "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu _flash_attention_forward "
       "_scaled_dot_product_fused_attention_overrideable _efficient_attention_forward _native_multi_head_attention "
       "_triton_scaled_dot_attention", kernel=Kernel.ATTENTION)  # fmt: skip

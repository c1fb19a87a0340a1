"""Scaled dot product attention: batch and heads may be split, and queries where nothing depends on their place."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace

from ..ir import Op
from ..rules.notation import Rule, parse
from ..rules.registry import OpCall, letters
from ..rules.signature import Signature
from .contexts import LocalCall, ProgramOnRank, RankRun, RuntimeArguments, SavedForBackward
from .localizing import splits
from .printing import Printing
from .random import groups_of_splits, print_splits
from .reading import Arguments, read_form
from .spec import Kernel, define


def attention(call: OpCall) -> Rule | None:
    """Batch and heads. Queries may be split too if nothing depends on their place.

    With grouped heads the queries' heads are (g r) and those of keys and values g.
    """
    q, k, v = (value.shape for value in call.inputs[:3])
    if len(q) < 3 or not q[:-3] == k[:-3] == v[:-3] or not len(q) == len(k) == len(v):
        return None  # leading dims that broadcast
    lead = letters(len(q) - 3, "b")
    query_heads, key_heads = q[-3], k[-3]
    grouped = query_heads != key_heads
    heads = "(g r)" if grouped else "g"
    causal = bool(call.op.argument("is_causal", False))
    s = "s^" if causal else "s"
    row = " ".join(lead)
    terms = [f"{row} {heads} {s} e^", f"{row} g t^ e^", f"{row} g t^ d^"]
    mask = call.tensor("attn_mask")
    if mask is not None:
        terms.append(_mask_term(mask.shape, call.outputs[0].shape, lead, heads, s))
    rule = parse(f"{', '.join(terms)} -> {row} {heads} {s} d^")
    return rule.with_sizes({"g": key_heads, "r": query_heads // key_heads} if grouped else {})


def _mask_term(shape: tuple[int, ...], out: tuple[int, ...], lead: list[str], heads: str, s: str) -> str:
    """A mask broadcasts to [..., heads, queries, keys]."""
    full = [*lead, heads, s, "t^"]
    sizes = [*out[:-1], None]
    shown, own = full[len(full) - len(shape) :], sizes[len(full) - len(shape) :]
    return " ".join(
        name if want is None or size == want else "1" for name, size, want in zip(shown, shape, own, strict=True)
    )


def local_attention(program: ProgramOnRank, op: Op) -> Op:
    """With dropout the masks are drawn by position."""
    if not op.argument("dropout_p", 0.0):
        return op
    where = splits(program.layouts[op.outputs[0]])
    return replace(op, target="runtime.attention").with_arguments(op_key=op.name, splits=where)


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


def scores_work(call: LocalCall, signature: Signature, flat: Sequence[bool] | None) -> tuple[float, float]:
    """The scores, where the fused kernel can't be used; else a copy of the gradient, and the tiles of one thread."""
    shape = signature.analysis.graph.values[call.op.inputs[0]].shape
    keys = signature.analysis.graph.values[call.op.inputs[1]].shape[-2]
    query = call.inputs[0]
    scores = query.bytes / max(shape[-1], 1) * keys
    if call.op.argument("dropout_p", 0.0) or (len(call.inputs) > 3 and call.inputs[3].gradient):
        return scores, scores + (call.outputs[0].bytes if call.op.argument("enable_gqa", False) else 0.0)
    queries = 256 if shape[-2] >= 768 else 64 if shape[-2] >= 192 else 32
    tile = 4.0 * queries * min(keys, 512)
    return tile + 4.0 * queries * (shape[-1] + 2), call.outputs[0].bytes + 2 * tile


define("scaled_dot_product_attention", rule=attention, keyed=True, localize=local_attention, kernel=Kernel.ATTENTION,
       keeps_order=True, saved=saved_attention, work=scores_work, prints=print_attention, positional=3,
       result="attention",
       reads="F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)",
       unsaid={"dropout_p": 0.0, "is_causal": False, "enable_gqa": False})  # fmt: skip
define("runtime.attention", keyed=True, prints=print_keyed_attention, reads=read_keyed_attention,
       runs=run_keyed_attention, unsaid={"is_causal": False, "enable_gqa": False})  # fmt: skip
define("_scaled_dot_product_attention_math _scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention "
       "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu _flash_attention_forward "
       "_scaled_dot_product_fused_attention_overrideable _efficient_attention_forward _native_multi_head_attention "
       "_triton_scaled_dot_attention", kernel=Kernel.ATTENTION)  # fmt: skip

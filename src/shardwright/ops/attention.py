"""Scaled dot product attention: batch and heads may be split, and queries where nothing depends on their place.

`STRUCTURED` is attention that has a few numbers, and values for documents and padding, in place of a mask
(`ir.MaskStructure`, `runtime/algorithms/attention.py`).
"""

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

STRUCTURED = "shardwright.attention.default"
"""Attention with a structure in place of a mask."""


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
    by_place = call.op.argument("is_causal", False) or not _reaches_everywhere(call.op)
    s = "s^" if by_place else "s"
    row = " ".join(lead)
    terms = [f"{row} {heads} {s} e^", f"{row} g t^ e^", f"{row} g t^ d^"]
    mask = call.tensor("attn_mask")
    if mask is not None:
        terms.append(_mask_term(mask.shape, call.outputs[0].shape, lead, heads, s))
    for name, places in (("query_documents", s), ("key_documents", "t^"), ("padding", "t^")):
        data = call.tensor(name)
        if data is not None:
            terms.append(f"{row if data.shape[0] == q[0] else '1'} {places}")
    rule = parse(f"{', '.join(terms)} -> {row} {heads} {s} d^")
    return rule.with_sizes({"g": key_heads, "r": query_heads // key_heads} if grouped else {})


def _reaches_everywhere(op: Op) -> bool:
    """Whether no position of a query or a key decides what is seen."""
    return op.argument("before") is None and op.argument("after") is None


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


def print_structured_attention(p: Printing) -> str:
    numbers = p.options("before", "after") + (p.options("prefix") if p.literal("prefix") else "")
    documents = [p[name] for name in ("query_documents", "key_documents") if p.has(name)]
    if documents:
        same = len(set(documents)) == 1
        numbers += f", documents={documents[0] if same else f'({documents[0]}, {documents[1]})'}"
    return f"runtime.attention({p['query']}, {p['key']}, {p['value']}{numbers}{p.options('padding', 'scale')})"


def read_structured_attention(op: Op, node: ast.expr) -> Arguments:
    names = "query, key, value, before, after, prefix, documents, padding, scale"
    read = read_form(op, node, f"runtime.attention({names})", 3)
    documents = read.pop("documents", None)
    if documents is not None:
        pair = documents.elts if isinstance(documents, ast.Tuple) else [documents, documents]
        read |= dict(zip(("query_documents", "key_documents"), pair, strict=True))
    return read


def run_structured_attention(run: RankRun, a: RuntimeArguments) -> object:
    documents = None if a["key_documents"] is None else (a["query_documents"], a["key_documents"])
    return run.runtime.attention(
        a["query"], a["key"], a["value"], before=a["before"], after=a["after"], prefix=a.get("prefix", 0),
        documents=documents, padding=a["padding"], scale=a["scale"],
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


def scores_work(call: LocalCall, signature: Signature) -> tuple[float, float]:
    """The scores, where the fused kernel can't be used."""
    shape = signature.analysis.graph.values[call.op.inputs[0]].shape
    keys = signature.analysis.graph.values[call.op.inputs[1]].shape[-2]
    query = call.inputs[0]
    scores = query.bytes / max(shape[-1], 1) * keys
    if call.op.argument("dropout_p", 0.0) or (len(call.inputs) > 3 and call.inputs[3].gradient):
        return 2 * scores, 2 * scores
    return 0.0, 0.0


def saved_structured_attention(call: LocalCall, signature: Signature, flat: Sequence[bool] | None) -> SavedForBackward:
    """All inputs, the result, and a number for each query."""
    query = call.inputs[0]
    width = signature.analysis.graph.values[call.op.inputs[0]].shape[-1]
    return SavedForBackward((True,) * len(call.inputs), (True,), query.elements / max(width, 1) * max(query.item, 4))


def structured_work(call: LocalCall, signature: Signature) -> tuple[float, float]:
    """Gradients of keys and values come in parts; half precision is summed in float32."""
    query, key, value = call.inputs[:3]
    wide = 0.0 if query.item >= 4 else 4.0 / query.item
    parts = key.bytes + value.bytes
    return wide * call.outputs[0].bytes, parts + wide * (query.bytes + parts)


define("scaled_dot_product_attention", rule=attention, keyed=True, localize=local_attention, kernel=Kernel.ATTENTION,
       keeps_order=True, saved=saved_attention, work=scores_work, prints=print_attention, positional=3,
       result="attention",
       reads="F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)",
       unsaid={"dropout_p": 0.0, "is_causal": False, "enable_gqa": False})  # fmt: skip
define("runtime.attention", keyed=True, prints=print_keyed_attention, reads=read_keyed_attention,
       runs=run_keyed_attention, unsaid={"is_causal": False, "enable_gqa": False})  # fmt: skip
define(STRUCTURED, rule=attention, kernel=Kernel.ATTENTION, keeps_order=True, saved=saved_structured_attention,
       work=structured_work, prints=print_structured_attention, reads=read_structured_attention,
       runs=run_structured_attention, result="attention", unsaid={"prefix": 0},
       leaves_out=lambda op, name, value: False)  # after=0 is not the same as nothing  # fmt: skip
define("_scaled_dot_product_attention_math _scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention "
       "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu _flash_attention_forward "
       "_scaled_dot_product_fused_attention_overrideable _efficient_attention_forward _native_multi_head_attention "
       "_triton_scaled_dot_attention", kernel=Kernel.ATTENTION)  # fmt: skip

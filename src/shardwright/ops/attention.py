"""Scaled dot product attention: batch and heads may be split, and the sequence (context parallelism).

    g, r    heads: groups, and the queries' heads in a group
    s       queries; every rank has all keys and values, gathered before
    t       keys, and the queries with them: keys and values travel from rank to rank (ring attention)

`STRUCTURED` is attention that has a few numbers, and values for documents and padding, in place of a mask
(`ir.MaskStructure`, `runtime/algorithms/attention.py`).
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..ir import Op
from ..layout import Mesh, join_shards
from ..rules.notation import Rule, parse
from ..rules.registry import OpCall, letters
from ..rules.signature import Signature
from .contexts import AlgorithmCollective, LocalCall, ProgramOnRank, RankRun, RuntimeArguments, SavedForBackward
from .localizing import one_cut, splits
from .printing import Printing, axes_text, plain
from .random import groups_of_splits, print_splits
from .reading import Arguments, read_form
from .spec import Kernel, define

STRUCTURED = "shardwright.attention.default"
"""Attention with a structure in place of a mask."""

CHUNK = 128
"""Queries that share one small mask (`runtime/algorithms/attention_kernels.py`)."""

LIMITS = ("is_causal", "before", "after", "prefix")
DATA = ("attn_mask", "query_documents", "key_documents", "padding", "scale")
PLACED = ("query", "key", "value", *LIMITS, *DATA)
"""What attention on shards of a sequence is called with; heads in groups show by their shapes."""


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
    causal = bool(call.op.argument("is_causal", False)) or call.op.argument("after") is not None
    windowed = call.op.argument("before") is not None
    s = "s=queries" if causal or windowed else "s"
    mask = call.tensor("attn_mask")
    whole = call.op.argument("dropout_p", 0.0) or (mask is not None and mask.gradient) or not call.inputs[0].floating
    t = "t^" if whole or len(q) != 4 else "t=ring@s"
    row = " ".join(lead)
    terms = [f"{row} {heads} {s} e^", f"{row} g {t} e^", f"{row} g {t} d^"]
    if mask is not None:
        terms.append(_mask_term(mask.shape, call.outputs[0].shape, lead, heads, s))
    for name, places in (("query_documents", s), ("key_documents", str(k[-2])), ("padding", str(k[-2]))):
        data = call.tensor(name)
        if data is not None:
            terms.append(f"{row if data.shape[0] == q[0] else '1'} {places}")
    rule = parse(f"{', '.join(terms)} -> {row} {heads} {s} d^")
    rule = rule.with_triangular("st" if causal and not windowed else ())  # a window is as wide everywhere
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
    rule = program.analysis.signatures[op.name].rule
    if not keys and not (queries and rule and "s" in rule.algorithms):
        return op
    arguments = [(name, value) for name, value in op.arguments if name in PLACED and value is not None]
    if keys:
        joined = join_shards(keys, program.mesh.sizes) if len(keys) > 1 else keys[0]
        if joined is None and not all(shard.even(program.mesh.sizes[shard.axis]) for shard in keys):
            one_cut(program, op, "keys", keys)  # refuses them
        arguments += [("ring", tuple(shard.axis for shard in keys)), ("sharding", joined or keys)]
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


def print_structured_attention(p: Printing) -> str:
    return f"runtime.attention({p['query']}, {p['key']}, {p['value']}{_structure(p)}{p.options('scale')})"


def _structure(p: Printing) -> str:
    """Who sees what, as keywords."""
    numbers = p.options("before", "after") + (p.options("prefix") if p.literal("prefix") else "")
    documents = [p[name] for name in ("query_documents", "key_documents") if p.has(name)]
    if documents:
        same = len(set(documents)) == 1
        numbers += f", documents={documents[0] if same else f'({documents[0]}, {documents[1]})'}"
    return f"{numbers}{p.options('padding')}"


def read_structured_attention(op: Op, node: ast.expr) -> Arguments:
    names = "query, key, value, before, after, prefix, documents, padding, scale"
    return _with_documents(read_form(op, node, f"runtime.attention({names})", 3))


def _with_documents(read: Arguments) -> Arguments:
    documents = read.pop("documents", None)
    if documents is not None:
        pair = documents.elts if isinstance(documents, ast.Tuple) else [documents, documents]
        read |= dict(zip(("query_documents", "key_documents"), pair, strict=True))
    return read


def run_structured_attention(run: RankRun, a: RuntimeArguments) -> object:
    return run.runtime.attention(a["query"], a["key"], a["value"], scale=a["scale"], **_structure_of(a))


def _structure_of(a: RuntimeArguments) -> dict[str, object]:
    documents = None if a["key_documents"] is None else (a["query_documents"], a["key_documents"])
    limits = {"before": a["before"], "after": a["after"], "prefix": a["prefix"] or 0}
    return {**limits, "documents": documents, "padding": a["padding"]}


def print_context_attention(p: Printing) -> str:
    causal = ", is_causal=True" if p.literal("is_causal") else ""
    shown = f"{p['query']}, {p['key']}, {p['value']}{p.options('attn_mask')}{causal}{_structure(p)}{p.options('scale')}"
    if p.has("ring"):
        axes = p.literal("ring")
        sharding = p.literal("sharding")
        even = not isinstance(sharding, tuple) and plain(sharding, p.many(axes))
        shown += f", ring={axes_text(axes)}" + ("" if even else f", sharding={p['sharding']}")
    return f"runtime.context_attention({shown}{print_splits(p) if p.has('splits') else ''})"


def read_context_attention(op: Op, node: ast.expr) -> Arguments:
    names = "query, key, value, attn_mask, is_causal, before, after, prefix, documents, padding, scale"
    return _with_documents(read_form(op, node, f"runtime.context_attention({names}, ring, sharding, splits)", 3))


def run_context_attention(run: RankRun, a: RuntimeArguments) -> object:
    return run.runtime.context_attention(
        a["query"], a["key"], a["value"], attn_mask=a["attn_mask"], is_causal=bool(a["is_causal"]), scale=a["scale"],
        ring=run.group(a["ring"]), sharding=a["sharding"],
        splits=None if a["splits"] is None else groups_of_splits(run, a), **_structure_of(a),
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
    shifts = [AlgorithmCollective("send", block, axes["ring"], "forward", overlapped=True)] * (ranks - 1)
    if call.gradient:
        shifts += [AlgorithmCollective("send", 2 * block, axes["ring"], "backward", overlapped=True)] * (ranks - 1)
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


def saved_structured_attention(call: LocalCall, signature: Signature, flat: Sequence[bool] | None) -> SavedForBackward:
    """All inputs, the result, and a number for each query."""
    query = call.inputs[0]
    width = signature.analysis.graph.values[call.op.inputs[0]].shape[-1]
    return SavedForBackward((True,) * len(call.inputs), (True,), query.elements / max(width, 1) * max(query.item, 4))


def structured_work(call: LocalCall, signature: Signature, flat: Sequence[bool] | None) -> tuple[float, float]:
    """Some queries at a time: their part of the result or of gradients, a mask, and what the kernel needs.

    Half precision sums in float32.
    """
    query, key, value = call.inputs[:3]
    (*_, length, _), (*_, keys, _) = (signature.analysis.graph.values[name].shape for name in call.op.inputs[:2])
    rows = min(CHUNK, length)
    wide = 0.0 if query.item >= 4 else 4.0 / query.item
    mask, parts = rows * keys * (query.item + 3), key.bytes + value.bytes  # added to scores, and made of three booleans
    kernel = scores_work(call, signature, flat)
    forward = mask + (rows / length + wide) * call.outputs[0].bytes
    backward = mask + rows / length * query.bytes + parts + wide * (query.bytes + parts)
    return kernel[0] + forward, kernel[1] + backward


define("scaled_dot_product_attention", rule=attention, keyed=True, localize=local_attention, kernel=Kernel.ATTENTION,
       keeps_order=True, saved=saved_attention, work=scores_work, collectives=send_keys, prints=print_attention,
       positional=3, result="attention",
       reads="F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)",
       defaults={"dropout_p": 0.0, "is_causal": False, "enable_gqa": False})  # fmt: skip
define("runtime.attention", keyed=True, prints=print_keyed_attention, reads=read_keyed_attention,
       runs=run_keyed_attention, defaults={"is_causal": False, "enable_gqa": False})  # fmt: skip
define("runtime.context_attention", prints=print_context_attention, reads=read_context_attention,
       runs=run_context_attention, defaults={"is_causal": False, "prefix": 0},
       leaves_out=lambda op, name, value: False)  # fmt: skip
define(STRUCTURED, rule=attention, localize=local_attention, kernel=Kernel.ATTENTION, keeps_order=True,
       saved=saved_structured_attention, work=structured_work, collectives=send_keys,
       prints=print_structured_attention, reads=read_structured_attention, runs=run_structured_attention,
       result="attention", defaults={"prefix": 0},
       leaves_out=lambda op, name, value: False)  # after=0 is not the same as nothing  # fmt: skip
define("_scaled_dot_product_attention_math _scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention "
       "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu _flash_attention_forward "
       "_scaled_dot_product_fused_attention_overrideable _efficient_attention_forward _native_multi_head_attention "
       "_triton_scaled_dot_attention", kernel=Kernel.ATTENTION)  # fmt: skip

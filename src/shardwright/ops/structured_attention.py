"""Attention that has a few numbers, and values for documents and padding, in place of a mask.

The numbers and values are those of `ir.MaskStructure`; `runtime/algorithms/attention.py` runs it.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from ..ir import Op
from ..rules.notation import Rule, parse
from ..rules.registry import OpCall
from ..rules.signature import Signature
from .contexts import LocalCall, RankRun, RuntimeArguments, SavedForBackward
from .printing import Printing
from .reading import Arguments, read_form
from .spec import Kernel, define

STRUCTURED = "shardwright.attention.default"
"""Attention with a structure in place of a mask, of [batch, heads, length, width]."""


def structured_attention(call: OpCall) -> Rule:
    """Batch and heads. Queries may be split too if nothing depends on their place.

    With grouped heads the queries' heads are (g r) and those of keys and values g. Ids and padding may be alike for
    all samples.
    """
    query, key = call.inputs[0].shape, call.inputs[1].shape
    heads = "g" if query[1] == key[1] else "(g r)"
    by_place = call.op.argument("before") is not None or call.op.argument("after") is not None
    s = "s^" if by_place else "s"
    terms = [f"ba {heads} {s} e^", "ba g t^ e^", "ba g t^ d^"]
    for name, places in (("query_documents", s), ("key_documents", "t^"), ("padding", "t^")):
        data = call.tensor(name)
        if data is not None:
            terms.append(f"{'ba' if data.shape[0] == query[0] else '1'} {places}")
    rule = parse(f"{', '.join(terms)} -> ba {heads} {s} d^")
    return rule.with_sizes({"g": key[1], "r": query[1] // key[1]} if heads != "g" else {})


# -- in generated code


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


define(STRUCTURED, rule=structured_attention, kernel=Kernel.ATTENTION, keeps_order=True,
       saved=saved_structured_attention, work=structured_work, prints=print_structured_attention,
       reads=read_structured_attention, runs=run_structured_attention, result="attention", unsaid={"prefix": 0},
       leaves_out=lambda op, name, value: False)  # after=0 is not the same as nothing  # fmt: skip

"""Packed documents: a call that passes `document_ids` promises that attention does not cross documents.

A model that does not know of the argument, or that drops it, would train on other documents' tokens without anyone
noticing. So the mask of every attention over the sequence has to depend on `document_ids`, or on `position_ids` that
start anew at each document, of which the models of transformers make their masks. Recurrent layers have no mask and are
refused; they are known by their convolutions and cumulative sums.
"""

from __future__ import annotations

from ..building.graph_builder import DraftOp, GraphBuilder, ValueRef
from ..building.leaves import Leaves
from ..failure import unsupported
from .grouped_heads import is_attention

DOCUMENTS = "document_ids"
POSITIONS = "position_ids"
CUMULATIVE = frozenset({"cumsum", "cumprod", "logcumsumexp"})
CONVOLUTIONS = frozenset({"conv1d", "convolution"})
REMEDY = (
    "Make the mask of document_ids (docs/data.md). Models of transformers make it of position_ids, if they are called "
    "without a cache and without attention_mask: set model.config.use_cache = False. If the argument means something "
    "else, give it another name."
)


def check_documents(leaves: Leaves) -> None:
    """Refuse a model that is given document ids and lets attention cross documents."""
    builder = leaves.builder
    named = ((leaf.path.rstrip("']").rpartition("['")[2], leaf.value) for leaf in leaves.inputs)  # also batch['name']
    ids = {name: value for name, value in named if value and name in (DOCUMENTS, POSITIONS)}
    if DOCUMENTS not in ids or not builder.infos[ids[DOCUMENTS]].shape:
        return
    tokens = builder.infos[ids[DOCUMENTS]].shape[-1]
    derived = _derived(builder, set(ids.values()))
    attention = [step for step in builder.steps if is_attention(step) and _lengths(builder, step) == (tokens, tokens)]
    for step in attention:
        mask = step.arguments.get("attn_mask")
        if not isinstance(mask, ValueRef) or mask.name not in derived:
            what = "The call passes document_ids, but attention crosses documents: its mask is not made of them"
            raise unsupported(what, step.place.source, REMEDY)
    for step in builder.steps:
        if _looks_along(builder, step, tokens):
            what = "The call passes document_ids, but this looks along the sequence from document to document"
            raise unsupported(what, step.place.source, "Train such a model on documents that are padded.")
    read = any(ids[DOCUMENTS] in step.inputs() for step in builder.steps)
    masks = [name for name in derived if builder.infos[name].dtype == "bool"]
    if not attention and not read and not any(builder.infos[name].shape[-2:] == (tokens, tokens) for name in masks):
        raise unsupported("The call passes document_ids, but the model does not read them", None, REMEDY)


def _derived(builder: GraphBuilder, sources: set[str]) -> set[str]:
    """The values without gradient that depend on these: a mask is one of them."""
    derived = set(sources)
    for step in builder.steps:
        if not derived.isdisjoint(step.inputs()):
            derived |= {name for name in step.outputs if not builder.infos[name].gradient}
    return derived


def _looks_along(builder: GraphBuilder, step: DraftOp, tokens: int) -> bool:
    """Whether an op without a mask carries something from token to token: a convolution, or a cumulative sum."""
    kind = step.target.split(".")[1]
    if not any(builder.infos[name].gradient for name in step.outputs):
        return False
    if kind in CUMULATIVE:
        shape = builder.infos[step.outputs[0]].shape
        return bool(shape) and shape[step.arguments["dim"] % len(shape)] == tokens
    if kind not in CONVOLUTIONS:
        return False
    width = builder.infos[step.arguments["weight"].name].shape[-1]
    source = builder.infos[step.arguments["input"].name].shape[-1]
    return width > 1 and tokens <= source < tokens + width  # with its padding, if that was added before


def _lengths(builder: GraphBuilder, step: DraftOp) -> tuple[int, int]:
    """How many queries and keys an attention op has."""
    query, key = (builder.infos[step.arguments[name].name].shape[-2] for name in ("query", "key"))
    return query, key

"""Attention ops, written by what their masks mean instead of with the masks.

    full, causal       without a mask, with `is_causal`
    padded keys alone  with a mask [batch, 1, 1, keys]
    anything else      as the op `STRUCTURED`, with numbers, document ids [batch, length] and padding [batch, keys]

A query that sees no key has a result of 0 with a boolean mask and with one of -inf, and so it has with `STRUCTURED`.
With a finite number it has uniform weights: such a mask stays, unless it is certain that every query sees a key.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ...ir import MaskStructure
from ...ops.attention import STRUCTURED
from ..building.graph_builder import DraftOp, GraphBuilder, ValueInfo, ValueRef
from ..building.leaves import Leaves
from .grouped_heads import fold_repeated_heads, is_attention
from .known_values import KnownValues
from .mask_data import MaskData
from .meaning import broadcast
from .meanings import Meanings
from .packed_positions import by_places
from .predicates import Place
from .structure import NEVER, NotStructured, hides_with_a_number, rows_of, structure_of, visible


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseMask:
    """A mask that an attention op goes on to read, and what it means or why that is not known."""

    value: str
    reason: str = ""
    structure: MaskStructure | None = None


@dataclass(frozen=True, slots=True)
class ProvedMask:
    """What the mask of an attention op means.

    rows         the values that it reads, and where
    by_number    it hides keys by a finite number
    """

    structure: MaskStructure
    rows: Mapping[str, tuple[Place, ...]]
    by_number: bool


def structure_masks(leaves: Leaves) -> list[DenseMask]:
    """Have attention ops run by what their masks mean, without the masks; those that are left.

    Constants and buffers that were looked at are noted as `leaves.fixed`, inputs that tell of padding as
    `leaves.padding`.
    """
    builder = leaves.builder
    fold_repeated_heads(builder)
    values = KnownValues(builder, leaves.known_values(), leaves.fixed)
    meanings = Meanings(builder, values)
    reading = [step for step in builder.steps if is_attention(step) and "attn_mask" in step.arguments]
    dense = [step for step in reading if not _needless(meanings, step)]
    inputs = [leaf.value for leaf in leaves.inputs if leaf.value] if dense else []
    leaves.padding.update(_padding(builder, values, inputs, dense))
    if leaves.padding and leaves.masks.unpadded:
        meanings = Meanings(builder, values, leaves.padding)
    data = MaskData(builder, [])
    masks = []
    for step in builder.steps:
        if is_attention(step):
            masks.append(_structure(meanings, step, data))
        data.steps.append(step)
    builder.steps = data.steps
    return [mask for mask in masks if mask is not None]


def _padding(
    builder: GraphBuilder, values: KnownValues, inputs: Iterable[str], dense: Sequence[DraftOp]
) -> dict[str, int]:
    """The inputs that would make masks needless if they were one number everywhere, and that number."""
    padding: dict[str, int] = {}
    for name in inputs:
        info = builder.infos[name]
        if info.gradient or not info.shape or info.dtype.startswith("complex"):
            continue
        for number in (1, 0):
            meanings = Meanings(builder, values, {name: number})
            if any(_needless(meanings, step, math.prod(info.shape)) for step in dense):
                padding.setdefault(name, number)
    return padding


def _needless(meanings: Meanings, step: DraftOp, elements: int = 0) -> bool:
    """Whether a mask says nothing more than `is_causal` or nothing at all, and is larger than some elements."""
    if elements > math.prod(meanings.info(step.arguments["attn_mask"].name).shape):
        return False
    try:
        return _droppable(_proved(meanings, step).structure, _scores(meanings, step))
    except NotStructured:
        return False


def _droppable(structure: MaskStructure, shape: tuple[int, ...]) -> bool:
    """Whether attention needs no mask. `is_causal` counts from the first query and the first key."""
    return structure.is_full or (structure.is_causal and shape[-1] == shape[-2])


def _proved(meanings: Meanings, step: DraftOp) -> ProvedMask:
    """What the mask of a step means; NotStructured if that is not known."""
    mask, shape = step.arguments["attn_mask"], _scores(meanings, step)
    info = meanings.info(mask.name)
    if info.gradient:
        raise NotStructured("it has a gradient")
    meaning = broadcast(meanings.of(mask.name), info.shape, shape)
    predicate = by_places(visible(meaning, info.dtype), meanings)
    structure = structure_of(predicate, shape)
    _check(meanings, mask.name, structure, shape)
    return ProvedMask(structure, rows_of(predicate, shape), hides_with_a_number(meaning))


def dense_mask_notes(masks: Iterable[DenseMask], names: Mapping[str, str], infos: Mapping[str, ValueInfo]) -> list[str]:
    """What a plan says of the masks that stay."""
    notes = []
    for mask, count in Counter(masks).items():
        why = f"it is {mask.structure.renamed(names)}, and {mask.reason}" if mask.structure else mask.reason
        ops = f"{count} attention ops read" if count > 1 else "an attention op reads"
        notes.append(f"{ops} the dense mask {names[mask.value]} {list(infos[mask.value].shape)}: {why}")
    return notes


def _structure(meanings: Meanings, step: DraftOp, data: MaskData) -> DenseMask | None:
    """Structure one attention op; the mask, if it goes on to read one."""
    mask, shape = step.arguments.get("attn_mask"), _scores(meanings, step)
    if not isinstance(mask, ValueRef):
        step.mask = MaskStructure(after=0) if step.arguments.get("is_causal") else MaskStructure()
        return None
    try:
        proved = _proved(meanings, step)
    except NotStructured as reason:
        return DenseMask(value=mask.name, reason=str(reason))
    step.mask = proved.structure
    if _droppable(proved.structure, shape):
        del step.arguments["attn_mask"]
        if proved.structure.is_causal:
            step.arguments["is_causal"] = True
        return None
    if meanings.info(mask.name).shape[-2:-1] in ((), (1,)):  # it broadcasts over queries
        return None
    try:
        _write(meanings, step, proved, data)
    except NotStructured as reason:
        return DenseMask(value=mask.name, reason=str(reason), structure=proved.structure)
    return None


def _write(meanings: Meanings, step: DraftOp, proved: ProvedMask, data: MaskData) -> None:
    """Attention by a structure, or by a mask for each key; NotStructured if it needs the mask as it is."""
    structure, shape, mask = proved.structure, _scores(meanings, step), step.arguments["attn_mask"].name
    query, key, value = (meanings.info(step.arguments[name].name).shape for name in ("query", "key", "value"))
    if proved.by_number and not structure.sees_in_every_row(*shape[-2:]):
        raise NotStructured("a query that sees no key would have uniform weights")
    by_key = structure == MaskStructure(padding=structure.padding)
    if step.arguments.get("dropout_p") and not by_key:
        raise NotStructured("attention has dropout")
    if len(query) != 4 or query[0] != key[0] or key[:3] != value[:3] or query[1] % key[1]:
        raise NotStructured("attention is not of [batch, heads, length, width]")
    producer = meanings.values.producers.get(mask, step)
    origin = replace(producer.place, region=None)  # several attention ops may read it, in and out of regions
    padding = data.padding(structure.padding, proved.rows, shape, origin)
    documents = None
    if structure.documents is not None:
        documents = data.row(structure.documents, proved.rows[structure.documents], shape, origin)
    _name(meanings, producer, padding=padding, documents=documents)
    if padding is not None and by_key:
        step.arguments["attn_mask"] = data.by_key(padding, origin)
        return
    arguments = {
        "query_documents": documents, "key_documents": documents, "padding": padding, "before": structure.before,
        "after": structure.after, "prefix": structure.prefix or None, "scale": step.arguments.get("scale"),
    }  # fmt: skip
    step.arguments = {name: step.arguments[name] for name in ("query", "key", "value")}
    step.arguments |= {name: argument for name, argument in arguments.items() if argument is not None}
    step.target = STRUCTURED


def _name(meanings: Meanings, mask: DraftOp, **data: ValueRef | None) -> None:
    """Data goes by what it is, where the line that makes it names the mask."""
    for name, ref in data.items():
        step = None if ref is None else meanings.values.producers.get(ref.name)
        line = mask.place if step is None else step.place
        if ref is not None and (line.owner, line.source) == (mask.place.owner, mask.place.source):
            meanings.builder.names[ref.name] = name


def _scores(meanings: Meanings, step: DraftOp) -> tuple[int, ...]:
    """The shape of the scores: [..., heads, queries, keys]."""
    keys = meanings.info(step.arguments["key"].name).shape[-2]
    return (*meanings.info(step.outputs[0]).shape[:-1], keys)


def _check(meanings: Meanings, name: str, structure: MaskStructure, shape: tuple[int, ...]) -> None:
    """Compare what was proved with the values of a mask, where it has some and is not too large."""
    tensor = None if structure.documents or structure.padding else meanings.values.evaluate(name)
    if tensor is None:
        return
    with _disable_current_modes():
        queries, keys = torch.arange(shape[-2], device="cpu")[:, None], torch.arange(shape[-1], device="cpu")
        expected = torch.ones(shape[-2:], dtype=torch.bool, device="cpu")
        if structure.after is not None:
            expected &= (keys <= queries + structure.after) | (keys < structure.prefix)
        if structure.before is not None:
            expected &= keys >= queries - structure.before
        actual = tensor if tensor.dtype is torch.bool else tensor > NEVER
        if not bool((actual.cpu() == expected).all()):
            raise NotStructured(f"its values are not {structure}, which its ops seem to say")

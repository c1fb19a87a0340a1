"""Attention ops, written without the masks that say nothing more than `is_causal` or nothing at all."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ...ir import MaskStructure
from ..building.graph_builder import DraftOp, GraphBuilder, ValueInfo, ValueRef
from ..building.leaves import Leaves
from .grouped_heads import fold_repeated_heads, is_attention
from .known_values import KnownValues
from .meanings import Meanings, broadcast
from .structure import NEVER, NotStructured, structure_of, visible


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseMask:
    """A mask that an attention op goes on to read, and what it means or why that is not known."""

    value: str
    reason: str = ""
    structure: MaskStructure | None = None


def structure_masks(leaves: Leaves) -> list[DenseMask]:
    """Give attention ops what their masks mean, and take away the masks that they need not read; what is left.

    Constants and buffers that were looked at are noted as `leaves.fixed`, inputs that tell of padding as
    `leaves.padding`.
    """
    builder = leaves.builder
    fold_repeated_heads(builder)
    values = KnownValues(builder, leaves.known_values(), leaves.fixed)
    meanings = Meanings(builder, values)
    masks = [_structure(meanings, step) for step in builder.steps if is_attention(step)]
    inputs = [leaf.value for leaf in leaves.inputs if leaf.value]
    leaves.padding.update(_padding(builder, values, inputs) if any(masks) else {})
    if leaves.padding and leaves.masks.unpadded:
        meanings = Meanings(builder, values, leaves.padding)
        masks = [_structure(meanings, step) for step in builder.steps if is_attention(step)]
    return [mask for mask in masks if mask is not None]


def _padding(builder: GraphBuilder, values: KnownValues, inputs: Iterable[str]) -> dict[str, int]:
    """The inputs that would make masks needless if they were one number everywhere, and that number."""
    dense = [step for step in builder.steps if is_attention(step) and "attn_mask" in step.arguments]
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


def _needless(meanings: Meanings, step: DraftOp, elements: int) -> bool:
    mask, shape = step.arguments["attn_mask"], _scores(meanings, step)
    info = meanings.info(mask.name)
    if info.gradient or elements > math.prod(info.shape):
        return False
    try:
        predicate = visible(broadcast(meanings.of(mask.name), info.shape, shape), info.dtype)
        return _droppable(structure_of(predicate, shape), shape)
    except NotStructured:
        return False


def _droppable(structure: MaskStructure, shape: tuple[int, ...]) -> bool:
    """Whether attention needs no mask. `is_causal` counts from the first query and the first key."""
    return structure.is_full or (structure.is_causal and shape[-1] == shape[-2])


def dense_mask_notes(masks: Iterable[DenseMask], names: Mapping[str, str], infos: Mapping[str, ValueInfo]) -> list[str]:
    """What a plan says of the masks that stay."""
    notes = []
    for mask, count in Counter(masks).items():
        why = f"it is {mask.structure.renamed(names)}" if mask.structure else mask.reason
        ops = f"{count} attention ops read" if count > 1 else "an attention op reads"
        notes.append(f"{ops} the dense mask {names[mask.value]} {list(infos[mask.value].shape)}: {why}")
    return notes


def _structure(meanings: Meanings, step: DraftOp) -> DenseMask | None:
    """Structure one attention op; the mask, if it still has one."""
    mask, shape = step.arguments.get("attn_mask"), _scores(meanings, step)
    if not isinstance(mask, ValueRef):
        step.mask = MaskStructure(after=0) if step.arguments.get("is_causal") else MaskStructure()
        return None
    info = meanings.info(mask.name)
    if info.gradient:
        return DenseMask(value=mask.name, reason="it has a gradient")
    try:
        predicate = visible(broadcast(meanings.of(mask.name), info.shape, shape), info.dtype)
        step.mask = structure_of(predicate, shape)
        _check(meanings, mask.name, step.mask, shape)
    except NotStructured as reason:
        step.mask = None
        return DenseMask(value=mask.name, reason=str(reason))
    if not _droppable(step.mask, shape):
        return DenseMask(value=mask.name, structure=step.mask)
    del step.arguments["attn_mask"]
    if step.mask.is_causal:
        step.arguments["is_causal"] = True
    return None


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

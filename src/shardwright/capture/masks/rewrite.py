"""Attention ops, written without the masks that say nothing more than `is_causal` or nothing at all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ...ir import MaskStructure
from ..building.graph_builder import DraftOp, GraphBuilder, ValueInfo, ValueRef
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


def structure_masks(builder: GraphBuilder, tensors: Mapping[str, Tensor], used: set[str]) -> list[DenseMask]:
    """Give attention ops what their masks mean, and take away the masks that they need not read; what is left.

    `tensors` are the values of constants and of buffers that are known; those that were looked at are added to `used`.
    """
    fold_repeated_heads(builder)
    meanings = Meanings(builder, KnownValues(builder, tensors, used))
    masks = [_structure(meanings, step) for step in builder.steps if is_attention(step)]
    return [mask for mask in masks if mask is not None]


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
    square = shape[-1] == shape[-2]  # `is_causal` counts from the first query and the first key
    if not step.mask.is_full and not (step.mask.is_causal and square):
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

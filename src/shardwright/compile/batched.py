"""The inputs of a captured call: which have the batch as their dim 0, and by what ranks compare them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..batch_dim import BatchDim, declared_by, find_batch_dim
from ..capture import CapturedGraph
from ..runtime.faults.input_comparison import CallSignature
from ..runtime.model.inputs import PLAIN, Mode


def signature_of(captured: CapturedGraph, mode: Mode) -> CallSignature:
    """What calls of a program are compared by between ranks."""
    graph, arguments = captured.graph, dict[str, str]()
    for leaf in captured.input_leaves:
        if leaf.value is not None:
            arguments[leaf.path] = f"{leaf.dtype} {list(leaf.shape)}"
        elif isinstance(leaf.literal, PLAIN):
            arguments[leaf.path] = repr(leaf.literal)
    return CallSignature(
        program=f'{graph.name} ({graph.entry}, {graph.fingerprint}, inputs="{mode}")',
        arguments=arguments,
        tensors=tuple(value.path for value in graph.inputs),
        batched=tuple(graph.is_batched(value) for value in graph.inputs),
        mode=mode,
    )


def with_batch(captured: CapturedGraph, batch: BatchDim, size: int | None) -> CapturedGraph:
    """A captured call with a batch of `size` in the inputs that are batched, whatever its own sizes tell."""
    graph = captured.graph
    named = {leaf.value: has for leaf, has in zip(captured.input_leaves, batch.batched, strict=True)}
    inputs = tuple(replace(value, batched=named[value.value]) for value in graph.inputs)
    if (inputs, size) == (graph.inputs, graph.batch):
        return captured
    return replace(captured, graph=replace(graph, inputs=inputs, batch=size))


def with_unbatched(captured: CapturedGraph, unbatched: Sequence[str] | None) -> CapturedGraph:
    """A captured call in which people say which inputs have no batch dim."""
    inputs = [(leaf.path, leaf.shape) for leaf in captured.input_leaves]
    batch = find_batch_dim(inputs, declared_by(unbatched, [path for path, _ in inputs]))
    return with_batch(captured, batch, batch.size)


def stand_in(tensor: Tensor, batched: bool, scale: int, parts: int) -> Tensor:
    """A tensor without memory, at global shape, or at that of one of several parts."""
    shape = list(tensor.shape)
    if batched:
        shape[0] = shape[0] * scale // parts
    empty = torch.empty(shape, dtype=tensor.dtype, device="meta")
    return empty.requires_grad_(tensor.requires_grad)

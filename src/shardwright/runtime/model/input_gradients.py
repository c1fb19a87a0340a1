"""Gradients of a model's inputs, where a rank passes only some of the samples.

With inputs="global" every rank passes the global batch, and the gradient of an input is global. With
inputs="per_replica" a replica's loss is about its own samples. Its outputs are weighted, so that parameters get
the mean over replicas (`reduction`); the gradient of the replica's own input is that of its own loss, as in DDP: the
weight is removed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from shardwright.errors import InputError

from ..collectives import comm


def expect_none(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """With inputs="per_rank" samples of all ranks are gathered by a collective that has no gradient."""
    if _wanting([leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]):
        raise InputError(
            'an input requires grad, but with inputs="per_rank" it is gathered from all ranks without a gradient; '
            'use inputs="per_replica" (each replica its own samples) or inputs="global" (the global batch)'
        )


def expect_no_transform(arguments: Any) -> None:
    """`torch.func` and forward-mode AD run a function on wrapped tensors, which can't be communicated."""
    if torch._C._functorch.peek_interpreter_stack() is not None or (
        forward_ad._current_level >= 0 and any(map(_has_tangent, torch.utils._pytree.tree_leaves(arguments)))
    ):
        raise InputError(
            "a compiled model was called by torch.func (vmap, grad, jacrev, ...) or in forward-mode AD, which don't "
            "support the collectives of its programs; call it on the full batch and use torch.autograd.grad, "
            "with create_graph=True for second derivatives, or use the transform in forward, before parallelize"
        )


def _has_tangent(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and forward_ad.unpack_dual(leaf).tangent is not None  # type: ignore[no-untyped-call]


def unweighed(tensors: list[Tensor], own: Sequence[bool], kind: str, groups: int, in_pipeline: bool) -> list[Tensor]:
    """The inputs of one of several replicas. `own`: for each output tensor, whether it is about the replica."""
    if groups == 1 or not _wanting(tensors) or not (any(own) or in_pipeline):
        return tensors
    faults = {
        "in a pipeline the gradient of an input is summed over ranks": in_pipeline,
        "some outputs are about the replica's samples and others, such as a loss, about the global batch": not all(own),
        'with reduction="token" the weight of a loss is known only after the model was called': kind == "token",
    }
    for fault, holds in faults.items():
        if holds:
            raise InputError(
                f'an input requires grad, but with inputs="per_replica" {fault}, so it would not be that of its own '
                'loss; use inputs="global"'
            )
    return [comm.scale_gradient(tensor, float(groups)) for tensor in tensors] if kind == "mean" else tensors


def _wanting(tensors: Sequence[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)

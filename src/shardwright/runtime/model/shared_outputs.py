"""Outputs that the model also uses internally: their gradients are refused.

    h = self.up(x)
    return self.down(h), h

On one device the gradient of `h` includes everything computed from it, inside of the model and outside. In a program
the returned value is a copy of the one that the model continues with (gathered, or of another stage), and its gradient
is only that of its use outside. So reading it is refused: hooks, `retain_grad`, `torch.autograd.grad(loss, h)`.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import InputError

from ..faults.watch import report_failure


def watch_gradient(output: Tensor, path: str) -> None:
    """Refuse reading the gradient of an output that the model also uses itself."""
    if not output.requires_grad or output.grad_fn is None:
        return
    alive, node = weakref.ref(output), output.grad_fn

    @report_failure
    def check(gradient: Tensor | None) -> None:
        if gradient is None:  # of a pipeline, all of whose outputs come from one node
            return
        tensor = alive()
        theirs = [hook for hook in hooks.values() if not str(hook.__module__).startswith("shardwright.")]
        if theirs or (tensor is not None and tensor.retains_grad) or _ends_here(node):
            raise InputError(
                f"the gradient of the output {path} is read (by a hook, retain_grad or torch.autograd.grad), but "
                "the model also uses it itself: a parallelized model only has the gradient of its use "
                "outside; compute what you need inside of the model, or return it without using it"
            )

    output.register_hook(check)  # type: ignore[no-untyped-call]
    hooks: Any = output._backward_hooks or {}  # a wrapper (`PendingTensor`) has none of its own


def _ends_here(node: Any) -> bool:
    """Whether the running backward computes the gradient of this node's output and ends there."""
    inner = [inner_node for inner_node, _ in node.next_functions if inner_node is not None]
    try:
        return bool(inner) and not any(torch._C._will_engine_execute_node(inner_node) for inner_node in inner)
    except RuntimeError:  # a leaf that torch.autograd.grad was asked for
        return False

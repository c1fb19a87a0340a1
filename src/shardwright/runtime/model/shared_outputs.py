"""Outputs that the model computes with itself: what a hook on one sees.

    h = self.up(x)
    return self.down(h), h

On one device the gradient of `h` is that of everything made of it, inside of the model and outside. In a program what
is returned is a copy beside the value that the model went on with (gathered, or of another stage), and its gradient is
that of what was done with it outside. So whoever looks at it is refused: hooks, `retain_grad`,
`torch.autograd.grad(loss, h)`.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import InputError

from ..faults.watch import report_failure


def watch_gradient(output: Tensor, path: str) -> None:
    """Refuse a look at the gradient of an output that the model computes with itself."""
    if not output.requires_grad or output.grad_fn is None:
        return
    alive, node = weakref.ref(output), output.grad_fn

    @report_failure
    def check(gradient: Tensor | None) -> None:
        if gradient is None:  # of a pipeline, all of whose outputs one node has made
            return
        tensor = alive()
        theirs = [hook for hook in hooks.values() if not str(hook.__module__).startswith("shardwright.")]
        if theirs or (tensor is not None and tensor.retains_grad) or _ends_here(node):
            raise InputError(
                f"the gradient of the output {path} is looked at (by a hook, retain_grad or torch.autograd.grad), and "
                "the model computes with it itself: a parallelized model has the gradient of what was done with it "
                "outside only; compute what you need of it inside of the model, or return it without using it"
            )

    output.register_hook(check)  # type: ignore[no-untyped-call]
    hooks: Any = output._backward_hooks or {}  # a tensor that stands for another (`PendingTensor`) has none of its own


def _ends_here(node: Any) -> bool:
    """Whether the backward that runs was asked for the gradient of what a node made, and goes no further."""
    inner = [inner_node for inner_node, _ in node.next_functions if inner_node is not None]
    try:
        return bool(inner) and not any(torch._C._will_engine_execute_node(inner_node) for inner_node in inner)
    except RuntimeError:  # a leaf that torch.autograd.grad was asked for
        return False

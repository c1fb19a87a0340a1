"""Where autograd takes the gradient of a leaf in the backward that runs.

loss.backward()                     "grad"     is added to `.grad`, after hooks that may sum it later
loss.backward(inputs=[p])           "grad" for p, "nowhere" for others: nobody asked for them
torch.autograd.grad(loss, [p])      "caller": is handed out as it is when the leaf's hooks are through
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

Destination = Literal["grad", "caller", "nowhere"]


def destination_of(node: Any) -> Destination:
    """Of a leaf's node (`AccumulateGrad`), while autograd runs."""
    try:
        return "grad" if torch._C._will_engine_execute_node(node) else "nowhere"
    except RuntimeError:  # how the engine answers for a leaf of `torch.autograd.grad`
        return "caller"


def leaf_node(leaf: Tensor) -> Any:
    """The node that adds to the `.grad` of a leaf that needs a gradient."""
    with torch.enable_grad():
        view_node: Any = leaf.view_as(leaf).grad_fn
    return view_node.next_functions[0][0]


def needs_gradient(leaf: Tensor) -> bool:
    """Whether a leaf still needs one: it may have been frozen since the forward whose backward runs."""
    with torch._C.DisableTorchFunctionSubclass():
        return leaf.requires_grad

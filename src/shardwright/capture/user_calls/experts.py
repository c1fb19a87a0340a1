"""MoE layers: submodules that stay one op, with a rule that says how they may be split.

A layer of experts takes tokens, the experts of each, and their weights, and returns tokens:

    forward(hidden [t, d], index [t, k], weights [t, k]) -> [t, d]

Its parameters are stacked, one slice an expert. Each token is then by itself, whatever the insides are,
and an axis may take the experts with the tokens (runtime/experts.py). The layers of transformers are known
by the attributes that they all have; `sw.experts` marks others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ...rules.dims import label_dims

KNOWN_BY = ("num_experts", "has_gate", "has_bias", "is_transposed", "is_concatenated")


def is_known(module: nn.Module) -> bool:
    """Whether a module is one of the layers of experts of transformers."""
    return all(hasattr(module, name) for name in KNOWN_BY) and isinstance(getattr(module, "down_proj", None), Tensor)


def fits(leaves: Sequence[Any]) -> bool:
    """Whether a call takes what a layer of experts takes."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if len(tensors) != 3 or len(leaves) != 3:
        return False
    hidden, index, weights = tensors
    return (
        hidden.dim() == index.dim() == 2
        and not index.is_floating_point()
        and index.shape == weights.shape
        and index.shape[0] == hidden.shape[0]
        and hidden.is_floating_point()
    )


def rule_of(module: nn.Module, state: Mapping[str, Tensor]) -> str:
    """The rule of a layer: tokens and experts, and for the known layers what lies between the two products."""
    count = getattr(module, "num_experts", None) or next((len(x) for x in state.values() if x.dim()), 0)
    terms = ["t d^", "t k^", "t k^"]
    inside = _inside(module, state) if is_known(module) else {}
    for at, (name, tensor) in enumerate(state.items()):
        blocked = " ".join(f"{label}^" if label != "1" else label for label in label_dims(tensor.shape[1:], f"p{at}"))
        if tensor.dim() and tensor.shape[0] == count and count > 1:
            terms.append(f"e {inside.get(name) or blocked}")
        else:
            terms.append(" ".join(str(size) for size in tensor.shape))
    text = ", ".join(terms)
    return f"{text.replace(', e ', ', e=experts@t ', 1)} -> t d^"


def _inside(module: Any, state: Mapping[str, Tensor]) -> dict[str, str]:
    """The dims of known parameters, f being what the first product makes and the second sums."""
    known = {"gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj_bias"}
    if set(state) - known:  # something else comes between, or after
        return {}
    wide = ("(2 f+)" if module.is_concatenated else "(f+ 2)") if module.has_gate else "f+"
    first = "gate_up_proj" if module.has_gate else "up_proj"
    turned = module.is_transposed
    return {
        first: f"d^ {wide}" if turned else f"{wide} d^",
        "down_proj": "f+ d^" if turned else "d^ f+",
        f"{first}_bias": wide,
        "down_proj_bias": "d^&",
    }

"""Whether tensors that a loop pairs with the parameters of a pipeline belong together.

    for average, p in zip(ema.parameters(), model.parameters()):
        average.mul_(0.999).add_(p, alpha=0.001)

In a pipeline a rank goes through the parameters of its own stages, and a copy of the model on one device through all
of them. Such a `zip` pairs the wrong ones, in silence where shapes agree. Seen from an op, that is:

    two parameters of other names in one elementwise op              refused
    a parameter of a stage, and one that is of no pipeline           refused
    a plain tensor that is written to with a parameter of a stage    refused
    plain tensors that are read, such as masks and noise             not known, and taken as they are
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import InputError

from .local_ops import is_elementwise, writes


def expect_aligned(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse an elementwise function that pairs a parameter of a stage with what belongs to another."""
    name = str(getattr(func, "__name__", ""))
    in_place = name.endswith("_") if name.startswith("_foreach_") else writes(name)
    for row in _paired_tensors(name, args, kwargs):
        mine = [x for x in row if getattr(x, "stages", None) is not None]
        others = [x for x in row if getattr(x, "stages", None) is None]
        if not mine:
            continue
        strange = len({x.spec.name for x in mine}) > 1 or any(isinstance(x, nn.Parameter) for x in others)  # type: ignore[attr-defined]
        misplaced = strange or (in_place and any(row[0] is x for x in others))
        if misplaced and not _in_an_optimizer():
            raise InputError(
                f"{name.strip('_')} of parameter {mine[0].spec.name} with a tensor that is not known to belong to it: "  # type: ignore[attr-defined]
                "in a pipeline a rank goes through the parameters of its own stages only, so that zip() with those of "
                "another model pairs the wrong ones. For EMA use shardwright.ema.EMA(model); to "
                "copy weights, model.full_state_dict(); for tensors beside parameters, make them of model.parameters() "
                "once the model is compiled (p.detach().clone())"
            )


def _in_an_optimizer() -> bool:
    """Whether the step of an optimizer runs, which keeps its state by parameter and pairs nothing by position."""
    frame = sys._getframe(1)
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), torch.optim.Optimizer):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _paired_tensors(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Sequence[Tensor]]:
    """The tensors that are computed with element by element, more than one at a time."""
    if name.startswith("_foreach_"):
        lists = [
            argument
            for argument in args
            if isinstance(argument, list | tuple) and argument and isinstance(argument[0], Tensor)
        ]
        tuples: Any = zip(*lists, strict=False) if len(lists) > 1 else ()
    else:
        tuples = [torch.utils._pytree.tree_leaves((args, kwargs))] if is_elementwise(name) else ()
    for row in tuples:
        tensors = [x for x in row if isinstance(x, Tensor) and x.ndim]
        if len(tensors) > 1:
            yield tensors

"""Branches and loops that data decides, run as Python: only the branch that is taken runs.

What decides is whole, the same on every rank, so that all ranks take the same way. What is made is tied to
every operand, be it with a gradient of zero: a parameter that only the other branch reads has zeros for its
gradient on all ranks, and no rank waits for a gradient that never comes. A graph run op by op (`capture`) and a
compiled program (`runtime`) both run them by this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def tie_to_operands(results: Sequence[Tensor], operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The same values; those that float depend on every operand that needs a gradient."""
    wanting = [tensor for tensor in operands if tensor.requires_grad]
    floats = [at for at, tensor in enumerate(results) if tensor.is_floating_point()]
    if not wanting or not floats or not torch.is_grad_enabled():
        return tuple(results)
    tied = _Tie.apply(len(floats), *(results[at] for at in floats), *wanting)  # type: ignore[no-untyped-call]
    known = dict(zip(floats, tied, strict=True))
    return tuple(known.get(at, tensor) for at, tensor in enumerate(results))


class _Tie(torch.autograd.Function):
    """The first tensors as they are; the others get zeros for a gradient."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.shapes = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors[count:]]
        return tuple(tensor.view_as(tensor) for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        zeros = (torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.shapes)
        return None, *gradients, *zeros


Body = Callable[..., Any]


def cond(predicate: Tensor, then: Body, inputs: Sequence[Tensor], other: Body, others: Sequence[Tensor]) -> Any:
    """`then(*inputs)` if the predicate is true, else `other(*others)`; unused inputs get a gradient of zero."""
    branch, operands, rest = (then, inputs, others) if bool(predicate) else (other, others, inputs)
    return _joined(_many(branch(*operands)), [*operands, *rest])


def scan(step: Body, init: Sequence[Tensor], xs: Sequence[Tensor], constants: Sequence[Tensor]) -> Any:
    """Run a step for every slice of `xs`, starting from `init`; the final carry, then the stacked results."""
    carry, stacked = tuple(init), []
    for slices in zip(*(x.unbind(0) for x in xs), strict=True):
        results = _many(step(*carry, *slices, *constants))
        carry = results[: len(carry)]
        stacked.append(results[len(carry) :])
    return _joined((*carry, *(torch.stack(column) for column in zip(*stacked, strict=True))), [*init, *xs, *constants])


def while_loop(test: Body, body: Body, carried: Sequence[Tensor], constants: Sequence[Tensor]) -> Any:
    """Run the body while the test is true; the final carry."""
    state = tuple(carried)
    while bool(test(*state, *constants)):
        state = _many(body(*state, *constants))
    return _joined(state, [*carried, *constants])


def _many(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _joined(results: tuple[Tensor, ...], operands: Sequence[Tensor]) -> Any:
    tied = tie_to_operands(results, operands)
    return tied[0] if len(tied) == 1 else tied

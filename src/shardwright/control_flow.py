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


def tie_to_operands(made: Sequence[Tensor], operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The same values; those that float depend on every operand that needs a gradient."""
    wanting = [held for held in operands if held.requires_grad]
    floats = [at for at, held in enumerate(made) if held.is_floating_point()]
    if not wanting or not floats or not torch.is_grad_enabled():
        return tuple(made)
    found = _Tie.apply(len(floats), *(made[at] for at in floats), *wanting)  # type: ignore[no-untyped-call]
    known = dict(zip(floats, found, strict=True))
    return tuple(known.get(at, held) for at, held in enumerate(made))


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


def cond(predicate: Tensor, then: Body, given: Sequence[Tensor], other: Body, others: Sequence[Tensor]) -> Any:
    """What `then` makes of what it is given if the predicate is true, else what `other` makes of its own."""
    taken, operands, rest = (then, given, others) if bool(predicate) else (other, others, given)
    return _joined(_many(taken(*operands)), [*operands, *rest])


def scan(step: Body, init: Sequence[Tensor], xs: Sequence[Tensor], held: Sequence[Tensor]) -> Any:
    """Take a step for every row of `xs`, carrying on from `init`; what is carried at the end, then the rows made."""
    carry, found = tuple(init), []
    for rows in zip(*(x.unbind(0) for x in xs), strict=True):
        made = _many(step(*carry, *rows, *held))
        carry = made[: len(carry)]
        found.append(made[len(carry) :])
    return _joined((*carry, *(torch.stack(column) for column in zip(*found, strict=True))), [*init, *xs, *held])


def while_loop(test: Body, body: Body, carried: Sequence[Tensor], held: Sequence[Tensor]) -> Any:
    """Go on with the body as long as the test says so; what is carried at the end."""
    state = tuple(carried)
    while bool(test(*state, *held)):
        state = _many(body(*state, *held))
    return _joined(state, [*carried, *held])


def _many(made: Any) -> tuple[Tensor, ...]:
    return made if isinstance(made, tuple) else (made,)


def _joined(made: tuple[Tensor, ...], operands: Sequence[Tensor]) -> Any:
    found = tie_to_operands(made, operands)
    return found[0] if len(found) == 1 else found

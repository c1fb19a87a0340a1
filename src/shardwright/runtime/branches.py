"""Branches and loops that data decides, run as Python: only the branch that is taken runs.

What decides is whole, the same on every rank, so that all ranks take the same way. What is made
depends on every operand, be it with a gradient of zero: a parameter that only the other branch
reads has zeros for its gradient on all ranks, and no rank waits for a gradient that never comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.tie import tied

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
    found = tied(made, operands)
    return found[0] if len(found) == 1 else found

"""Rules for a user's own ops: an autograd function or a torch.library op gets a rule in the notation.

Without a rule such an op runs whole on every rank, and the plan says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from .errors import RuleError
from .rules import parse
from .rules.registry import register

Registered = TypeVar("Registered")


def register_op(rule: str) -> Callable[[Registered], Registered]:
    """Say how an own op may be split: `@sw.register_op("b m k+, n k+ -> b m n")`.

    Decorates a `torch.autograd.Function` or a `torch.library` op, which stays one op in the graph.
    """
    parse(rule)

    def decorate(op: Registered) -> Registered:
        register(target_of(op), rule)
        return op

    return decorate


def target_of(op: Any) -> str:
    """The name that an op has in a graph."""
    if isinstance(op, type) and issubclass(op, torch.autograd.Function):
        return f"call.{op.__module__}.{op.__qualname__}"
    if isinstance(op, torch._ops.OpOverload):
        return str(op)
    found = getattr(op, "_opoverload", None)
    if found is not None:
        return str(found)
    raise RuleError(
        f"{op!r} can't have a rule: register_op takes a torch.autograd.Function or a torch.library op; "
        "wrap a plain function in torch.library.custom_op"
    )

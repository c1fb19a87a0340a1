"""Parameters that a model reads and does not have.

A trace takes every tensor that it has not heard of for a constant. A parameter is none: it is
trained, by this model or by another. It is read without being one of the model's where a function
reaches a module by a global name, or where modules are hidden in a plain list.
"""

from __future__ import annotations

import traceback
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.overrides import TorchFunctionMode

from ...ir import SourceLine
from ..building.source_lines import source_of
from ..failure import unsupported

_ABOUT = frozenset({"size", "dim", "ndimension", "numel", "nelement", "stride", "is_floating_point", "is_contiguous"})
_ABOUT_TOO = frozenset({"shape", "dtype", "device", "requires_grad", "ndim", "is_meta", "layout", "is_leaf", "grad_fn"})


class OwnParameters(TorchFunctionMode):
    """Within this, a call of torch is refused that is given a parameter which is not the model's.

    Those of the model are fakes while it is traced; what has values and is trained is none of them.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not torch.compiler.is_dynamo_compiling():  # cond and scan are captured by dynamo, which would look in here
            for argument in (*args, *(kwargs.values() if kwargs else ())):
                for inner in argument if isinstance(argument, list | tuple) else (argument,):
                    if isinstance(inner, Tensor) and is_foreign(inner) and not _asks_no_values(func):
                        raise refusal(inner, source_of("".join(traceback.format_stack())))
        return func(*args, **(kwargs or {}))


def is_foreign(tensor: Tensor) -> bool:
    """Whether a tensor in a trace is trained, or may be, and has values."""
    return (isinstance(tensor, nn.Parameter) or tensor.requires_grad) and not is_fake(tensor)


def _asks_no_values(func: Any) -> bool:
    """Whether a call reads a shape or a dtype only."""
    name = getattr(func, "__name__", "")
    return name in _ABOUT or (name == "__get__" and getattr(func.__self__, "__name__", "") in _ABOUT_TOO)


def refusal(tensor: Tensor, source: SourceLine | None) -> Exception:
    what = "parameter" if isinstance(tensor, nn.Parameter) else "tensor that requires a gradient"
    return unsupported(
        f"A {what} {list(tensor.shape)} is read but is not a parameter of the model: it would be a constant of the "
        "program, and never trained",
        source,
        "Register the module that it belongs to (self.name = module, or nn.ModuleList for a list of them), and let "
        "functions reach modules by self, an argument or a variable around them, not by a global name. What is not "
        "trained can be a buffer (register_buffer).",
    )

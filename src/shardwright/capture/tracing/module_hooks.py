"""Hooks on modules that were registered before a model is compiled.

A hook of a module is ordinary Python that runs at every call. In a compiled model modules are not called: a forward
hook would run once, while the model is traced, with tensors that have no values, and what it leaves in the user's lists
would be symbols; a backward hook would never run. So they are refused by name. Those of `torch.nn.utils` (weight_norm,
spectral_norm, pruning) only compute a weight, and those of transformers only hand on what a forward returns, which
tracing sees; what is inside of an opaque submodule runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules import module as of_all

from ...errors import InputError, raise_all
from ..user_calls.opaque import opaque_parts

_COMPUTE_ONLY = ("torch.nn.", "shardwright.", "transformers.utils.output_capturing")
_KINDS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}


def check_hooks(model: nn.Module) -> None:
    """Refuse a model with hooks that a compiled program would not run."""
    opaque = tuple(path for path, _ in opaque_parts(model))
    faults = [
        f"{path or 'the model'} ({type(part).__name__}) has a {kind}: {_describe_hook(hook)}"
        for path, part in model.named_modules()
        if not any(path == opaque_path or path.startswith(f"{opaque_path}.") for opaque_path in opaque)
        for kind, hook in _hooks(part)
    ]
    faults += [
        f"every module has a {kind}: {_describe_hook(hook)}"
        for name, kind in _KINDS.items()
        for hook in getattr(of_all, f"_global{name}").values()
    ]
    raise_all(
        InputError,
        "hooks of modules do not run in a compiled model, whose modules are not called one by one; remove them before "
        "parallelize (handle.remove()) and do in forward what they compute, return from forward what they look at, or "
        "register those of the whole model on what parallelize returns:",
        faults,
    )


def _hooks(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, kind in _KINDS.items():
        for hook in getattr(module, name, {}).values():
            if not _module_of(hook).startswith(_COMPUTE_ONLY):
                yield kind, hook


def _module_of(hook: Any) -> str:
    """Where a hook is written; that of an object is written in its class."""
    return str(getattr(hook, "__module__", None) or type(hook).__module__)


def _describe_hook(hook: Callable[..., Any]) -> str:
    code = getattr(getattr(hook, "__func__", hook), "__code__", None)
    name = getattr(hook, "__qualname__", type(hook).__qualname__)
    return f"{name} of {code.co_filename}:{code.co_firstlineno}" if code is not None else str(name)

"""Compile a PyTorch model written for one device into a program that trains on many.

Each public name is imported when it is first used, so that `import shardwright` costs nothing, and the command line
answers `--help` without torch.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from . import errors as errors

if TYPE_CHECKING:
    from .capture import experts, opaque
    from .checkpoint import load, load_weights, save, save_weights
    from .data.loader import loader
    from .ema import EMA
    from .huggingface import empty_model
    from .initialization import initialize
    from .options import CompileOptions, PipelineOptions
    from .parallelize import parallelize, plan
    from .register import register_op
    from .rehearse import rehearse
    from .report import diff
    from .report.explain import explain
    from .report.visual import report
    from .runtime.launch import launch
    from .train import Trainer
    from .verify import verify

__version__ = "0.1.0"

__all__ = [
    "EMA",
    "CompileOptions",
    "PipelineOptions",
    "Trainer",
    "diff",
    "empty_model",
    "experts",
    "explain",
    "initialize",
    "launch",
    "load",
    "load_weights",
    "loader",
    "opaque",
    "parallelize",
    "plan",
    "register_op",
    "rehearse",
    "report",
    "save",
    "save_weights",
    "verify",
]

_MODULES = {
    "capture": "experts opaque",
    "checkpoint": "load load_weights save save_weights",
    "data": "loader",
    "ema": "EMA",
    "huggingface": "empty_model",
    "initialization": "initialize",
    "options": "CompileOptions PipelineOptions",
    "parallelize": "parallelize plan",
    "register": "register_op",
    "rehearse": "rehearse",
    "report": "diff explain report",
    "runtime.launch": "launch",
    "train": "Trainer",
    "verify": "verify",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Facade(ModuleType):
    """Keeps public functions reachable under names that packages have too: `sw.plan` is not `shardwright/plan/`."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _MODULE_OF and isinstance(value, ModuleType)):  # what an import of a submodule sets
            super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        """By name, as cloudpickle sends any other module that a function refers to."""
        return importlib.import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Facade

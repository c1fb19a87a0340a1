"""One call of `torch.export`, made safe for the user's module."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx._lazy_graph_module import _use_lazy_graph_module

from .checks import PassedChecks
from .draws import KnownDraws
from .failure import explain
from .keep import Kept, keeping
from .known import KnownValues
from .places import user_frames
from .signature import register_containers
from .stand_in import StandIn

_LOUD = (
    "torch.export._trace",
    "torch._subclasses.fake_tensor",
    "torch.fx.experimental.symbolic_shapes",
)  # they log what is raised anyway


@dataclass(frozen=True, slots=True)
class Trace:
    """The exported program (not functional, at global shape) and what export would have dropped."""

    program: ExportedProgram
    kept: Kept
    stand_in: StandIn


def trace(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Trace:
    """Export a module on fakes; the module is afterwards as it was before."""
    register_containers((tuple(args), dict(kwargs)))
    first: BaseException | None = None
    for strict in (False, True):
        stand_in = StandIn()
        with (
            _quiet(),
            user_frames(),
            stand_in.in_place_of(module),
            keeping() as kept,
            _known(module, strict),
            KnownDraws(),
            PassedChecks(),
            KnownValues(),
            _use_lazy_graph_module(True),  # export writes its graph out as Python thirty times, for nobody
        ):
            fake_args, fake_kwargs = stand_in.inputs((tuple(args), dict(kwargs)))
            try:
                program = torch.export.export(module, fake_args, fake_kwargs, strict=strict)
            except Exception as error:
                first = first or error
                continue
        if strict and (kept.calls or kept.regions):
            break  # dynamo has no notion of our markers: better no graph than a wrong one
        return Trace(program, kept, stand_in)
    assert first is not None
    raise explain(module, first) from first


@contextmanager
def without_collection() -> Iterator[None]:
    """Compiling makes many small objects that live on; collecting garbage meanwhile only walks the heap."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@contextmanager
def _known(module: nn.Module, strict: bool) -> Iterator[None]:
    """Register the dataclasses that the module returns, at the moment it returns them."""
    if strict:
        yield
        return
    hook = module.register_forward_hook(lambda _module, _args, result: register_containers(result))
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence what torch says about its own insides while it exports."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"(torch|copyreg)(\.|$)")
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"(torch|copyreg)(\.|$)")
        warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\).*")
        warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
        warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.(export|_export|fx|_dynamo)(\.|$)")
        loggers = [logging.getLogger(name) for name in _LOUD]
        before = [logger.disabled for logger in loggers]
        try:
            for logger in loggers:
                logger.disabled = True
            yield
        finally:
            for logger, disabled in zip(loggers, before, strict=True):
                logger.disabled = disabled

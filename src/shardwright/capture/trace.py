"""One call of `torch.export`, made safe for the user's module."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export import _trace as _export_module
from torch.fx._lazy_graph_module import _use_lazy_graph_module

from ..errors import CaptureError
from .checks import PassedChecks, unvalidated
from .counting import counting
from .draws import KnownDraws
from .failure import causes, explain
from .foreign import OwnParameters
from .keep import Kept, keeping
from .known import KnownValues
from .opaque import marking, opaque_parts
from .part import Opaque
from .places import user_frames
from .reads import Reads, everything, reading
from .real import NoValues, Real, Seen, check_rows, see
from .signature import register_containers
from .stand_in import StandIn

export: Any = _export_module
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
    notes: tuple[str, ...] = ()
    reads: Reads = frozenset()


def trace(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], real: Real) -> Trace:
    """Export a module on fakes; the module is afterwards as it was before.

    Opaque submodules that fakes tell nothing about are looked at while the real model runs.
    """
    register_containers((tuple(args), dict(kwargs)))
    parts = dict(opaque_parts(module))
    seen: dict[str, list[Seen]] = {}
    while True:
        kept = Kept()
        try:
            traced = _export(module, args, kwargs, kept, seen, (False,) if parts else (False, True))
        except CaptureError:
            if kept.wanting is None or kept.wanting[0] in seen:
                raise
            seen.update(see(real, module, [kept.wanting[0]]))
            continue
        return replace(traced, notes=(*traced.notes, *_checked(kept, module, real, seen)))


def _checked(kept: Kept, module: nn.Module, real: Real, seen: dict[str, list[Seen]]) -> tuple[str, ...]:
    """Notes, after holding opaque submodules to what they say of their rows."""
    paths = dict.fromkeys(call.path for call in kept.calls.values() if isinstance(call, Opaque) and call.batch)
    if not paths:
        return ()
    missing = [path for path in paths if path not in seen]
    try:
        seen.update(see(real, module, missing) if missing else {})
    except NoValues:
        return tuple(f"that the rows of {path} are independent was not checked: there are no values" for path in paths)
    return tuple(note for path in paths if (note := check_rows(path, seen[path][0])))


def _export(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    kept: Kept,
    seen: Mapping[str, Sequence[Seen]],
    ways: Sequence[bool],
) -> Trace:
    first: BaseException | None = None
    listens = True  # to what is read; dynamo, which captures the bodies of scan, stumbles over a listener
    todo = list(ways)
    while todo:
        strict = todo.pop(0)
        stand_in, checks = StandIn(), PassedChecks()
        fake_args, fake_kwargs = stand_in.inputs((tuple(args), dict(kwargs)))
        with (
            _quiet(),
            user_frames(),
            stand_in.in_place_of(module),
            keeping(kept),
            marking(module, kept, seen),
            counting(kept),
            _known(module, strict),
            nullcontext() if strict else KnownDraws(),
            nullcontext() if strict else OwnParameters(),
            nullcontext() if strict else checks,
            nullcontext() if strict else KnownValues(),
            unvalidated(),
            _use_lazy_graph_module(not strict),  # export writes its graph out as Python thirty times, for nobody
            reading(module) if listens and not strict else nullcontext(everything(module)) as reads,
        ):
            try:
                program = torch.export.export(module, fake_args, fake_kwargs, strict=strict)
            except Exception as error:
                first = first or error
                if any(isinstance(seen, CaptureError) for seen in causes(error)):
                    break  # what was refused on purpose might go unseen in the other way
                if listens and not strict and any(_is_of_dynamo(seen) for seen in causes(error)):
                    listens, first = False, None
                    todo.insert(0, False)
                continue
        if strict and (kept.calls or kept.regions):
            break  # dynamo has no notion of our markers: better no graph than a wrong one
        return Trace(program, kept, stand_in, checks.notes(), frozenset(reads))
    assert first is not None
    refused = next((error for error in causes(first) if isinstance(error, CaptureError)), None)
    if refused is not None:
        raise refused
    raise explain(module, first) from first


def _is_of_dynamo(error: BaseException) -> bool:
    return type(error).__module__.startswith("torch._dynamo")


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
        inside = r"(torch\.(export|_export|fx|_dynamo)|shardwright\.capture)(\.|$)"  # where modes pass calls on
        warnings.filterwarnings("ignore", category=UserWarning, module=inside)
        export.print = lambda *args, **kwargs: None  # it prints half of a graph when it fails
        loggers = [logging.getLogger(name) for name in _LOUD]
        before = [logger.disabled for logger in loggers]
        try:
            for logger in loggers:
                logger.disabled = True
            yield
        finally:
            export.__dict__.pop("print", None)
            for logger, disabled in zip(loggers, before, strict=True):
                logger.disabled = disabled

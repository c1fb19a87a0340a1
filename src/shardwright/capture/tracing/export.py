"""One call of `torch.export`, made safe for the user's module."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export import _trace as _export_module
from torch.fx._lazy_graph_module import _use_lazy_graph_module

from ...errors import CaptureError
from ..building.call_paths import register_containers
from ..building.masked_selection import EqualSelections
from ..building.source_lines import user_frames
from ..failure import causes, explain, with_source_line
from ..user_calls.kept import KeptCalls, keeping
from ..user_calls.opaque import marking, opaque_parts
from ..user_calls.opaque_call import OpaqueCall
from ..user_calls.real_run import NoValues, ObservedCall, Real, check_rows, observe_calls
from .attribute_reads import Reads, everything, reading
from .bincount import traceable_bincount
from .carried_state import (
    Attributes,
    ChangedAgain,
    attributes,
    carried,
    changed_in_place,
    left_behind,
    with_attributes,
)
from .constant_values import ConstantValues
from .fake_tensors import FakeTensors
from .fixed_arguments import fixing
from .foreign_parameters import OwnParameters
from .grad_mode import GradMode, as_called
from .known_draws import KnownDraws
from .node_notes import noting
from .python_random import PythonDraws, check_draws
from .row_norms import traceable_row_norms
from .running_statistics import traceable_statistics
from .sizes import KnownSizes
from .tensor_data import TensorData
from .transformer_masks import traceable_masks
from .value_checks import PassedChecks, unvalidated
from .variables import GRAD_MODE, Variable, VariableWalk
from .vmap import vectorizing
from .written_variables import WrittenVariables, refuse_changing, refuse_written

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
    user_calls: KeptCalls
    stand_in: FakeTensors
    notes: tuple[str, ...] = ()
    left: Attributes = field(default_factory=dict)  # attributes that the call has changed
    reads: Reads = frozenset()
    variables: tuple[Variable, ...] = ()  # globals, closure variables and class attributes that it may have read


def trace(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], real: Real) -> Trace:
    """Export a module on fakes; the module is afterwards as it was before.

    Opaque submodules that fakes tell nothing about are looked at while the real model runs.
    """
    _refuse_scripted(module)
    register_containers((tuple(args), dict(kwargs)))
    parts = dict(opaque_parts(module))
    seen: dict[str, list[ObservedCall]] = {}
    walk = VariableWalk(module)
    while True:
        user_calls, before, draws = KeptCalls(), WrittenVariables(walk.variables.values()), PythonDraws()
        try:
            with as_called(GRAD_MODE in walk.variables):
                traced = _export(module, args, kwargs, user_calls, seen, (False,) if parts else (False, True))
        except CaptureError:
            if user_calls.wanting is None or user_calls.wanting[0] in seen:
                raise
            seen.update(observe_calls(real, module, [user_calls.wanting[0]]))
            continue

        def again() -> str:
            with as_called(GRAD_MODE in walk.variables):
                return str(_export(module, args, kwargs, KeptCalls(), seen, (False,)).program.graph)

        written = before.changed()
        if walk.draws:  # threads that load data draw too
            check_draws(draws, str(traced.program.graph), again, walk.draws)
        if traced.left or written:
            _check_next(module, again, traced, written)
        walk.go_on(name for _, name in traced.reads)
        notes = (*traced.notes, *_checked(user_calls, module, real, seen))
        return replace(traced, notes=notes, variables=tuple(walk.variables.values()))


def _refuse_scripted(module: nn.Module) -> None:
    for path, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            name = f"model.{path}" if path else "the model"
            raise CaptureError(
                f"{name} is a module of torch.jit, whose code can't be seen. Use the module that torch.jit.script or "
                "torch.jit.trace was given; functions of torch.jit.script are fine.",
                path=path,
            )


def _check_next(module: nn.Module, again: Callable[[], str], traced: Trace, written: Sequence[Variable]) -> None:
    """Refuse a forward that would be another one at its next call, or that changes something else at every call.

    See carried_state.py and written_variables.py.
    """
    variables, contents = WrittenVariables(written), ChangedAgain(traced.left)
    with with_attributes(module, traced.left):
        try:
            graph = again()
        except CaptureError:
            graph = ""
    if graph != str(traced.program.graph):
        raise carried(module, list(traced.left)) if traced.left else refuse_written(written)
    if variables.changed():
        raise refuse_changing(variables.changed())
    if contents.keys():
        raise changed_in_place(module, contents.keys())


def _checked(
    user_calls: KeptCalls, module: nn.Module, real: Real, seen: dict[str, list[ObservedCall]]
) -> tuple[str, ...]:
    """Notes, after checking that samples of opaque submodules are independent where they claim it."""
    paths = dict.fromkeys(
        call.path for call in user_calls.calls.values() if isinstance(call, OpaqueCall) and call.batch
    )
    if not paths:
        return ()
    missing = [path for path in paths if path not in seen]
    try:
        seen.update(observe_calls(real, module, missing) if missing else {})
    except NoValues:
        return tuple(
            f"that the samples of {path} are independent was not checked: there are no values" for path in paths
        )
    return tuple(note for path in paths if (note := check_rows(path, seen[path][0])))


def _export(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    user_calls: KeptCalls,
    seen: Mapping[str, Sequence[ObservedCall]],
    modes: Sequence[bool],
) -> Trace:
    first: BaseException | None = None
    listens = True  # to what is read; dynamo, which captures the bodies of scan, stumbles over a listener
    todo = list(modes)
    while todo:
        strict = todo.pop(0)
        stand_in, checks, known = FakeTensors(), PassedChecks(), ConstantValues()
        left: Attributes = {}
        fake_args, fake_kwargs = stand_in.inputs((tuple(args), dict(kwargs)))
        with (
            _quiet(),
            user_frames(),
            stand_in.in_place_of(module),
            fixing(module, fake_args, fake_kwargs) as (positional, named),
            noting(),
            keeping(user_calls),
            marking(module, user_calls, seen),
            traceable_bincount(user_calls),
            traceable_statistics(user_calls),
            traceable_row_norms(user_calls),
            vectorizing(user_calls),
            _watching(module, strict, known, left),
            nullcontext() if strict else _modes(user_calls, checks, known),
            unvalidated(),
            _use_lazy_graph_module(not strict),  # export writes its graph out as Python thirty times, for nobody
            reading(module) if listens and not strict else nullcontext(everything(module)) as reads,
        ):
            try:
                program = torch.export.export(module, positional, named, strict=strict)
            except Exception as error:
                first = first or error
                if any(isinstance(cause, CaptureError) for cause in causes(error)):
                    break  # refused on purpose: dynamo would not see why
                if listens and not strict and any(_is_of_dynamo(cause) for cause in causes(error)):
                    listens, first = False, None
                    todo.insert(0, False)
                continue
        if strict and (user_calls.calls or user_calls.regions):
            break  # dynamo has no notion of our markers: better no graph than a wrong one
        return Trace(program, user_calls, stand_in, checks.notes(), left, frozenset(reads))
    assert first is not None
    refused = next((error for error in causes(first) if isinstance(error, CaptureError)), None)
    if refused is not None:
        raise with_source_line(module, refused, first)
    raise explain(module, first) from first


@contextmanager
def _modes(user_calls: KeptCalls, checks: PassedChecks, known: ConstantValues) -> Iterator[None]:
    """What looks at the calls of torch while a model is traced by running it, the innermost last."""
    with ExitStack() as stack:
        for mode in (
            GradMode(), KnownDraws(), OwnParameters(), checks, known, TensorData(), EqualSelections(),
            KnownSizes(known), traceable_masks(user_calls, known),
        ):  # fmt: skip
            stack.enter_context(mode)
        yield


def _is_of_dynamo(error: BaseException) -> bool:
    return type(error).__module__.startswith("torch._dynamo")


@contextmanager
def without_collection() -> Iterator[None]:
    """Compiling makes many small objects that live on; collecting garbage meanwhile only costs time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@contextmanager
def _watching(module: nn.Module, strict: bool, known: ConstantValues, left: Attributes) -> Iterator[None]:
    """Register the dataclasses that the module returns, and see what it leaves behind, when it returns."""
    if strict:
        yield
        return
    before = attributes(module)

    def returns(_module: nn.Module, _args: Any, result: Any) -> None:
        register_containers(result)
        left.update(left_behind(before, attributes(module), known))

    hook = module.register_forward_hook(returns)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's warnings about its own internals while it exports."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"(torch|copyreg)(\.|$)")
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"(torch|copyreg)(\.|$)")
        warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\).*")
        warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
        warnings.filterwarnings(
            "ignore", message=r"The tensor attributes? .* assigned during export"
        )  # see carried_state.py
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

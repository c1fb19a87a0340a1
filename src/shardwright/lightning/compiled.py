"""A LightningModule after it was compiled: its steps, or some of its submodules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.optim import Optimizer

from ..compile import CompilerSettings
from ..compiled_parts import replace_parts
from ..errors import InputError
from ..options import GENERATED, CompileOptions, expect_only, read_options
from ..parallelize import parallelize
from ..plan.request import PlanRequest
from ..runtime.model.access import show_again
from ..runtime.model.parallel_model import ParallelModel
from ..runtime.optimizer.adopt import adopt
from ..runtime.world import start
from .effects import Append, is_metric, outermost
from .steps import SLOTS, StepEffects, stepping, without_text


class CompiledModule(Protocol):
    """What the strategy needs of a compiled module."""

    module: LightningModule
    options: Mapping[str, Any]

    @property
    def model(self) -> nn.Module:
        """The module that checkpoints save."""

    def step(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a step of the module."""

    def no_sync(self) -> Any:
        """Defer the gradient sync."""

    def adopt(self, optimizers: Sequence[Optimizer]) -> None:
        """Adopt optimizers that were built on the shards."""

    def data_place(self) -> tuple[int, int] | None:
        """The data-parallel replica of this rank and their number; None if not known yet."""


class CompiledSteps:
    """The steps of a module as programs. The module shows the shards from then on."""

    def __init__(
        self, module: LightningModule, optimizers: Sequence[Optimizer], options: Mapping[str, Any], device: torch.device
    ) -> None:
        self.module, self.options, self._book = module, options, StepEffects()
        self._device = device
        shell = stepping(module, self._book)
        result = parallelize(shell, optimizers[0] if optimizers else None, **options)
        self.model: ParallelModel = result[0] if optimizers else result
        self.model.stand_for(module, harmless="lightning.")  # its model summary registers hooks that record shapes

    def prepare(self, step: str, batch: Any) -> None:
        """Compile for a step and put the shards in the module; its submodules keep their train or eval mode."""
        flags = [submodule.training for submodule in self.module.modules()]
        if step != "training_step":
            self.module.eval()
        self.model.training = self.module.training
        self.model.prepare((step, *without_text(batch), _places(self.module, step)), {})
        self._show()
        for submodule, flag in zip(self.module.modules(), flags, strict=True):
            submodule.training = flag

    def step(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        batch, *rest = (*args, *kwargs.values())
        places = dict(zip(_places(self.module, name), rest, strict=False))
        places |= {key: None for key in places if key == "batch_idx"}
        return self._call(name, batch, places)

    def _call(self, name: str, batch: Any, places: Mapping[str, Any]) -> Any:
        self.model.training = self.module.training
        with _ordinary():
            result = self.model(name, *without_text(batch), places)
        if self.module._parameters is not self.model._parameters:
            self._show()
        for effect in self._book.effects:
            if isinstance(effect, Append):  # a list that a step appends to is not constant
                self.model.forget(effect.name)
        self._book.do(self.module, result["effects"])
        return result["result"]

    def _show(self) -> None:
        """Put the shards in the module itself; metrics stay the module's own, and forward becomes a program too."""
        metrics = outermost(self.module)
        module, model = self.module, self.model
        for slot in SLOTS:
            vars(module)[slot] = getattr(model, slot)
        for path, metric in metrics:
            parent, _, name = path.rpartition(".")
            slots: Any = module.get_submodule(parent)._modules
            slots.put(name, metric.to(self._device))
        show_again(model)
        vars(module)["forward"] = lambda *args, **kwargs: self._call("forward", (args, kwargs), {})

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with self.model.no_sync():
            yield

    def adopt(self, optimizers: Sequence[Optimizer]) -> None:
        _adopt(optimizers, self.model.parameters())

    def data_place(self) -> tuple[int, int] | None:
        return (self.model.data_rank, self.model.data_size) if self.model.plan is not None else None


class CompiledParts:
    """Compiled submodules in a module that otherwise runs eagerly."""

    def __init__(
        self, module: LightningModule, optimizers: Sequence[Optimizer], parts: Any, options: Mapping[str, Any]
    ) -> None:
        self.module, self.options = module, options
        strange = sorted(set(options) - {"plan", "inputs", "seed", "compile"})
        if strange:
            raise InputError(f"{', '.join(strange)}: only for compiled steps, not for parts=")
        compile = read_options(CompileOptions, options.get("compile"))
        expect_only(compile, ("directory", "opaque"), "parts=", "it is only for compiled steps")
        _untoggle_what_was_compiled_meanwhile(module)
        settings = CompilerSettings(
            request=PlanRequest.read(options["plan"]), inputs=options["inputs"], opaque=compile.opaque,
            seed=options.get("seed", 0), directory=Path(compile.directory or GENERATED),
        )  # fmt: skip
        replace_parts(module, optimizers, start(), settings, parts)

    @property
    def model(self) -> nn.Module:
        return self.module

    def step(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with _ordinary():
            return getattr(self.module, name)(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with ExitStack() as stack:
            for part in self._compiled():
                stack.enter_context(part.no_sync())
            yield

    def adopt(self, optimizers: Sequence[Optimizer]) -> None:
        _adopt(optimizers, (parameter for part in self._compiled() for parameter in part.parameters()))

    def data_place(self) -> tuple[int, int] | None:
        first = next(part for part in self.module.modules() if isinstance(part, ParallelModel))
        return first.data_rank, first.data_size

    def _compiled(self) -> list[ParallelModel]:
        return [part for part in self.module.modules() if isinstance(part, ParallelModel) and part.plan is not None]


def _untoggle_what_was_compiled_meanwhile(module: LightningModule) -> None:
    """`untoggle_optimizer` restores what `toggle_optimizer` has frozen, also parameters that were sharded since."""
    originals, untoggle = dict(module.named_parameters()), module.untoggle_optimizer

    def untoggle_optimizer(optimizer: Any) -> None:
        toggled: dict[Any, bool] = dict(module._param_requires_grad_state)
        untoggle(optimizer)
        for name, parameter in module.named_parameters():
            original = originals.get(name)
            if original is not parameter and original in toggled:
                parameter.requires_grad_(toggled[original])

    vars(module)["untoggle_optimizer"] = untoggle_optimizer


def _adopt(optimizers: Sequence[Optimizer], shards: Iterable[nn.Parameter]) -> None:
    same = {parameter: parameter for parameter in shards}
    for optimizer in optimizers:
        adopt(optimizer, same)  # type: ignore[arg-type]


def heavy_parts(module: LightningModule) -> list[str]:
    """The children that have parameters; for containers that are never called, their children."""
    paths: list[str] = []

    def look(at: nn.Module, path: str) -> None:
        for name, child in at.named_children():
            inner = f"{path}{name}"
            if isinstance(child, nn.ModuleList | nn.ModuleDict):
                look(child, f"{inner}.")
            elif not is_metric(child) and next(child.parameters(), None) is not None:
                paths.append(inner)

    look(module, "")
    if not paths:
        raise InputError(f"{type(module).__name__} has no submodule with parameters that could be compiled")
    return paths


@contextmanager
def _ordinary() -> Iterator[None]:
    """Leave inference mode: a program caches tensors that training uses too."""
    gradients = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(gradients):
        yield


def _places(module: LightningModule, step: str) -> dict[str, Any]:
    """The arguments of a step besides its batch, as Lightning passes them; None if unknown."""
    if step == "forward":
        return {}
    taken = _taken(getattr(type(module), step))
    return {name: None if name == "batch_idx" else 0 for name in taken if name in ("batch_idx", "dataloader_idx")}


@cache
def _taken(step: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a step's arguments after self and the batch."""
    return tuple(inspect.signature(step).parameters)[2:]

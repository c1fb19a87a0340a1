"""What both sides do: a few training steps on one batch, then optionally one evaluation.

A `VerifyTask` describes what to run; a `TrainingRun` has everything that is compared, gathered and under
the original names. `follow` is the loop; the two sides differ only in how they call the model and
where they find gradients (`original.py`, `compiled.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import InputError
from ..options import Outputs
from ..precision import Precision

Entry = Literal["train", "eval"]
Tensors = dict[str, Tensor | None]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Loss = Callable[[Any], Tensor]


@dataclass(frozen=True, kw_only=True)
class VerifyTask:
    """A call of a model in the dtype of the comparison, and what to do with it."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    optimizer: MakeOptimizer
    loss: Loss = field(default_factory=lambda: loss_of)
    steps: int = 3
    entries: tuple[Entry, ...] = ("train",)
    seed: int = 0
    precision: Precision = field(default_factory=Precision)
    outputs: Outputs = "all"  # which of them are compared, and leave the compiled model

    @property
    def dtype(self) -> torch.dtype:
        tensors = (*self.module.parameters(), *(x for x in pytree.tree_leaves((self.args, self.kwargs))))
        floats = [x.dtype for x in tensors if isinstance(x, Tensor) and x.is_floating_point()]
        return floats[0] if floats else torch.float32

    @property
    def promote(self) -> bool:
        """In float64, casts to float32 in a model's code would end parity at 5e-8."""
        return self.dtype is torch.float64


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """One training step: outputs and gradients."""

    outputs: Tensors
    gradients: Tensors


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """Everything about a run that is compared."""

    steps: tuple[TrainingStep, ...] = ()
    parameters: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)
    evaluated: Tensors = field(default_factory=dict)


class ComparedModel(Protocol):
    """The original or the compiled model, ready to train."""

    optimizer: torch.optim.Optimizer

    def forward(self, entry: Entry) -> Any: ...

    def gradients(self) -> Tensors: ...

    def parameters(self) -> Tensors: ...

    def buffers(self) -> Tensors: ...


def follow(side: ComparedModel, task: VerifyTask) -> TrainingRun:
    """Train for the task's steps, then evaluate if requested."""
    steps: list[TrainingStep] = []
    for _ in range(task.steps if "train" in task.entries else 0):
        side.optimizer.zero_grad()
        output = side.forward("train")
        outputs = named_outputs(output, task.outputs)
        loss = task.loss(output)
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        steps.append(TrainingStep(outputs=outputs, gradients=side.gradients()))
        side.optimizer.step()
    evaluated: Tensors = {}
    if "eval" in task.entries:
        with torch.no_grad():
            evaluated = named_outputs(side.forward("eval"), task.outputs)
    return TrainingRun(steps=tuple(steps), parameters=side.parameters(), buffers=side.buffers(), evaluated=evaluated)


def named_outputs(output: Any, which: Outputs = "all") -> Tensors:
    """Every tensor and number of a model's output, or only the numbers, by path."""
    tensors: Tensors = {}
    for path, leaf in pytree.tree_flatten_with_path(output)[0]:
        name = ".".join(_word(key) for key in path) or "output"
        if isinstance(leaf, Tensor):
            continuous = leaf.is_floating_point() or leaf.is_complex()
            tensors[name] = leaf.detach().clone() if continuous else leaf.double()
        elif isinstance(leaf, bool | int | float):
            tensors[name] = torch.tensor(float(leaf), dtype=torch.float64)
    return tensors if which == "all" else {name: x for name, x in tensors.items() if x is None or not x.shape}


def _word(key: Any) -> str:
    return str(next((getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name)), key))


def loss_of(output: Any) -> Tensor:
    """The loss that a model returns, or a fixed mix of its outputs if it returns none."""
    loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss.reshape(())
    floats = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]
    if not floats:
        raise InputError("the model returns no floating tensor, so there is nothing to train and verify")
    if floats[0].numel() == 1 and floats[0].requires_grad:
        return floats[0].reshape(())
    parts = [(x * torch.arange(x.numel(), dtype=x.dtype, device=x.device).cos().view(x.shape)).mean() for x in floats]
    return torch.stack([part.to(parts[0].dtype) for part in parts]).sum()


def trainable(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [parameter for parameter in parameters if parameter.requires_grad]


def first_names(module: nn.Module) -> dict[str, str]:
    """For every key of a parameter its first key (tied weights have several)."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for key, parameter in module.named_parameters(remove_duplicate=False):
        names[key] = first.setdefault(id(parameter), key)
    return names


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


OPTIMIZERS: dict[str, MakeOptimizer] = {"sgd": sgd, "adamw": adamw}

"""Side effects of a step: it logs, calls metrics, appends to lists of its module.

A step is captured once and run many times as a program of tensors. During capture these calls are
recorded instead of executed, and their tensors become outputs of the program. After each run they are
executed in order, with the values of that run.

    self.log("loss", loss)              Log
    self.accuracy(logits, labels)       MetricCall, of torchmetrics; its result is Pending meanwhile
    self.outputs.append(loss)           Append
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils import _pytree as pytree
from torchmetrics import Metric, MetricCollection

from ..errors import CaptureError


class Untouchable:
    """A placeholder that a step may pass on but not inspect. `why` says what to do instead."""

    def __init__(self, why: str) -> None:
        self.why = why

    def _look(self, *_: object) -> NoReturn:
        raise CaptureError(self.why)

    __bool__ = __index__ = __int__ = __float__ = __str__ = __len__ = __iter__ = __getitem__ = __neg__ = _look
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _look
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __pow__ = __rpow__ = _look
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _look
    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> NoReturn:
        self._look()


class Pending(Untouchable):
    """The result of a metric that is called later. It can only be logged."""

    def __init__(self, number: int) -> None:
        super().__init__(
            "a step uses the result of a metric, but metrics are called after the compiled step has run; log the "
            "metric, or run the step eagerly and compile submodules: ShardwrightStrategy(parts=[...])"
        )
        self.number = number


@dataclass(frozen=True, slots=True)
class MetricRef:
    """A metric by its path in the module."""

    path: str


@dataclass(frozen=True, slots=True)
class Log:
    """A call of self.log or self.log_dict; `value` is the logged value if it is not a tensor of the program."""

    method: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    value: Any

    def do(self, module: LightningModule, values: Any, answers: Mapping[int, Any]) -> Any:
        value = self.value
        if isinstance(value, Pending):
            value = answers[value.number]
        elif isinstance(value, MetricRef):
            value = module.get_submodule(value.path)
        elif value is None:
            value = values
        return getattr(module, self.method)(*self.args, value, **self.kwargs)


@dataclass(frozen=True, slots=True)
class MetricCall:
    """A call of a metric."""

    path: str
    method: str

    def do(self, module: LightningModule, values: Any, answers: Mapping[int, Any]) -> Any:
        args, kwargs = values
        metric = module.get_submodule(self.path)
        return metric(*args, **kwargs) if self.method == "forward" else getattr(metric, self.method)(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Append:
    """An append to a list attribute of the module."""

    name: str

    def do(self, module: LightningModule, values: Any, answers: Mapping[int, Any]) -> Any:
        getattr(module, self.name).append(values)


Effect = Log | MetricCall | Append


@dataclass
class EffectLog:
    """All recorded effects, by number, and the tensors of those of the step being captured."""

    effects: list[Effect] = field(default_factory=list)
    captured: dict[str, Any] | None = None  # by number, while a step is captured
    paths: dict[int, str] = field(default_factory=dict)  # of the metrics of the module that is captured

    def note(self, effect: Effect, values: Any) -> int:
        """Record an effect. Its tensors become outputs of the program."""
        assert self.captured is not None
        number = len(self.effects)
        self.effects.append(effect)
        self.captured[str(number)] = values
        return number

    def do(self, module: LightningModule, values: Mapping[str, Any]) -> None:
        """Execute the recorded effects of a step, with detached tensors."""
        values = pytree.tree_map_only(Tensor, torch.Tensor.detach, values)
        answers: dict[int, Any] = {}
        for number in sorted(map(int, values)):
            answers[number] = self.effects[number].do(module, values[str(number)], answers)


def note_log(book: EffectLog, method: str, args: tuple[Any, ...], value: Any, kwargs: Mapping[str, Any]) -> None:
    """A call of self.log, with the name in `args`, or of self.log_dict."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            note_log(book, "log", (name,), item, kwargs)
    elif isinstance(value, Tensor):
        book.note(Log(method, args, kwargs, None), value)
    elif is_metric(value):
        book.note(Log(method, args, kwargs, MetricRef(book.paths[id(value)])), None)
    else:
        book.note(Log(method, args, kwargs, value), None)


METRIC_METHODS = ("forward", "update", "compute", "reset")


def is_metric(module: object) -> bool:
    return isinstance(module, Metric | MetricCollection)


@contextmanager
def noting(module: LightningModule, book: EffectLog) -> Iterator[None]:
    """Within this context the metrics of a module record their calls."""
    metrics = {path: metric for path, metric in module.named_modules() if is_metric(metric)}
    before = {
        path: {name: vars(submodule)[name] for name in METRIC_METHODS if name in vars(submodule)}
        for path, submodule in metrics.items()
    }
    book.paths = {id(metric): path for path, metric in metrics.items()}
    for path, metric in metrics.items():
        for method in METRIC_METHODS:
            vars(metric)[method] = partial(_ask, book, path, method)
    try:
        yield
    finally:
        for path, metric in metrics.items():
            for method in METRIC_METHODS:
                vars(metric).pop(method)
            vars(metric).update(before[path])


def _ask(book: EffectLog, path: str, method: str, *args: Any, **kwargs: Any) -> Pending:
    return Pending(book.note(MetricCall(path, method), (list(args), kwargs)))


def outermost(module: torch.nn.Module) -> Sequence[tuple[str, torch.nn.Module]]:
    """Metrics and collections of them, not those inside of others."""
    metrics: list[tuple[str, torch.nn.Module]] = []
    for path, submodule in module.named_modules():
        if is_metric(submodule) and not any(path.startswith(f"{other}.") for other, _ in metrics):
            metrics.append((path, submodule))
    return metrics

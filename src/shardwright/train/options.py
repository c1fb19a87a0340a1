"""Settings of a run that belong together, as a person writes them in a config file."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch.utils.data import Dataset, Sampler

from ..data import Packing
from ..errors import InputError
from ..options import MOVED
from ..runtime.model.reduction import LossReduction, reduction_fault
from .loggers import Logger

Last = Literal["keep", "drop", "pad"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions:
    """How batches are made of a dataset.

    shuffle     a new order of the training data every epoch, the same on all ranks; None: unless it is a stream
    last        of a smaller last batch of an epoch: "keep" it, "drop" it, or "pad" it, see docs/data.md
    workers     processes that fetch ahead; 0: none
    prefetch    batches that each of them has ready
    pin_memory  copy batches to a GPU without waiting; None: if there is one
    ignore      with "pad": what marks labels of rows that don't count, such as {"labels": -100}
    draw_by_row what the dataset draws for a row comes from seed, epoch and row alone, see docs/data.md
    collate     a function from a list of rows to a batch, if torch's own will not do
    sampler     from the dataset to an order of its rows, the same on all ranks; else `shuffle`
    packing     pack the rows, which are documents of tokens, into sequences; a batch counts sequences then
    options     anything else that torch.utils.data.DataLoader takes
    """

    shuffle: bool | None = None
    last: Last = "keep"
    workers: int = 0
    prefetch: int | None = None
    pin_memory: bool | None = None
    ignore: dict[str | int, float] | None = None
    draw_by_row: bool = False
    collate: Callable[[list[Any]], Any] | None = None
    sampler: Callable[[Dataset], Sampler] | None = None  # type: ignore[type-arg]  # as a config file names a class
    packing: Packing | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("sampler", "draw_by_row"):
            if self.packing is not None and getattr(self, name):
                raise InputError(f"loader.{name} is for rows that are samples; with loader.packing leave it out")
        if self.workers < 0:
            raise InputError(f"loader.workers={self.workers} is no number of processes")
        if self.prefetch is not None and not self.workers:
            raise InputError("loader.prefetch is for loader.workers that fetch ahead, and there are 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """When a run is saved, and what is kept. The end of a run is always saved.

    every         steps between two checkpoints; None: by epochs alone
    every_epochs  epochs between two; None: by steps alone
    keep_last     how many of the newest are kept; None: all
    keep_best     how many of the best by `metric` are kept beside those; a new best is saved when it is found
    metric, mode  what "best" means: the smallest ("min") or the largest ("max")
    background    go on training while one is written
    """

    every: int | None = None
    every_epochs: int | None = 1
    keep_last: int | None = 2
    keep_best: int = 1
    metric: str = "val_loss"
    mode: Literal["min", "max"] = "min"
    background: bool = True

    def __post_init__(self) -> None:
        _check_counts(self, "checkpoints", ("every", "every_epochs", "keep_last"))

    def better(self, value: float, than: float | None) -> bool:
        """Whether a value is better than the best so far."""
        if math.isnan(value):
            return False
        return than is None or (value < than if self.mode == "min" else value > than)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizationOptions:
    """How gradients become an update.

    micro_batch_size   samples of one call of the model, over all ranks; smaller than batch_size to accumulate
    accumulate         calls of the model for one update; set by the two batch sizes, or by itself
    reduction          how the losses of an update's calls become one: their mean by samples, their sum, or their mean
                       by labels that count (not -100)
    clip_norm          the largest norm of all gradients together; inf to measure it only
    clip_value         the largest size of an element of a gradient
    loss_scale         the factor of losses that a run in float16 begins with
    parameter_groups   settings of some parameters, by patterns of names: {match: "*.bias", weight_decay: 0.0}
    scheduler_every    whether the schedule of the learning rate moves after every step or every epoch
    """

    micro_batch_size: int | None = None
    accumulate: int | None = None
    reduction: LossReduction = "mean"
    clip_norm: float | None = None
    clip_value: float | None = None
    loss_scale: float = 2.0**16
    parameter_groups: Sequence[dict[str, Any]] = ()
    scheduler_every: Literal["step", "epoch"] = "step"

    def __post_init__(self) -> None:
        for name in ("clip_norm", "clip_value"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InputError(
                    f"optimization.{name}={value} would leave nothing of a gradient; use a positive number"
                )
        _check_counts(self, "optimization", ("micro_batch_size", "accumulate"))
        if fault := reduction_fault(self.reduction):
            raise InputError(f"optimization.{fault}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationOptions:
    """When the validation data is looked at.

    every         steps between two validations; None: by epochs alone
    every_epochs  epochs between two; None: by steps alone
    batches       how many batches of the validation data are looked at; None: all
    """

    every: int | None = None
    every_epochs: int | None = 1
    batches: int | None = None

    def __post_init__(self) -> None:
        _check_counts(self, "validation", ("every", "every_epochs", "batches"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Steps of which a trace is made, for each rank.

    start   the first step that is traced, counted from the start of this run, after those that warm up
    steps   how many
    memory, shapes, stacks   what is noted too; each makes the trace larger and the steps slower
    """

    start: int = 5
    steps: int = 3
    memory: bool = False
    shapes: bool = False
    stacks: bool = False

    def __post_init__(self) -> None:
        if self.start < 1 or self.steps < 1:
            raise InputError(f"profile: start={self.start} and steps={self.steps} are both at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggingOptions:
    """What is written down of a run.

    loggers   where numbers go; None: the console and a CSV file
    every     steps between two logs
    profile   steps to trace
    """

    loggers: Sequence[Logger] | None = None
    every: int = 10
    profile: Profile | None = None

    def __post_init__(self) -> None:
        _check_counts(self, "logging", ("every",))


def _check_counts(options: Any, group: str, names: Sequence[str]) -> None:
    for name in names:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise InputError(f"{group}.{name}={value} makes no sense; use 1 or more, or leave it out")


MOVED_IN_TRAINER = {
    **{name: MOVED[name] for name in ("microbatches", "microbatch_semantics", "outputs", "unbatched", "opaque")},
    "sampler": "loader.sampler",
    "loggers": "logging.loggers",
    "log_every": "logging.every",
    "profile": "logging.profile",
    "val_every": "validation.every",
    "val_every_epochs": "validation.every_epochs",
    "val_batches": "validation.batches",
    "micro_batch_size": "optimization.micro_batch_size",
    "accumulate": "optimization.accumulate",
    "reduction": "optimization.reduction",
    "clip_norm": "optimization.clip_norm",
    "clip_value": "optimization.clip_value",
    "loss_scale": "optimization.loss_scale",
    "parameter_groups": "optimization.parameter_groups",
    "scheduler_every": "optimization.scheduler_every",
}
"""Arguments of `Trainer` that are in a group now, in Python, in config files and on the command line."""

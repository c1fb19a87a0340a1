"""Settings of a run that belong together, as a person writes them in a config file."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import InputError

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
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
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
        for name in ("every", "every_epochs", "keep_last"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"checkpoints.{name}={value} makes no sense; use 1 or more, or leave it out")

    def better(self, value: float, than: float | None) -> bool:
        """Whether a value is better than the best so far."""
        if math.isnan(value):
            return False
        return than is None or (value < than if self.mode == "min" else value > than)


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

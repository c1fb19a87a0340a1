"""A trace of real steps, one file per rank, for ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..runtime.world import here
from .callbacks import Callback, Metrics
from .options import Profile

if TYPE_CHECKING:
    from .trainer import Trainer

FOLDER = "profile"


class Profiler(Callback):
    """Traces some steps of this run: those from `start` on, counted from where the run starts or resumes."""

    def __init__(self, options: Profile) -> None:
        self.options = options
        self.path: Path | None = None  # of this rank's trace, once written
        self._done = 0
        self._profiler: Any = None

    def on_step_start(self, trainer: Trainer, step: int) -> None:
        if self._done == self.options.start - 1:
            self._profiler = torch.profiler.profile(
                activities=torch.profiler.supported_activities(),  # type: ignore[no-untyped-call]
                profile_memory=self.options.memory, record_shapes=self.options.shapes,
                with_stack=self.options.stacks,
            )  # fmt: skip
            self._profiler.start()

    def on_step_end(self, trainer: Trainer, step: int, metrics: Metrics, outputs: list[Any]) -> None:
        self._done += 1
        if self._profiler is not None and self._done == self.options.start - 1 + self.options.steps:
            self._write(trainer, step)

    def on_train_end(self, trainer: Trainer) -> None:
        if self._profiler is not None:  # the run ended before the last step to trace
            self._write(trainer, trainer.progress.step)
        elif self.path is None:
            trainer.say(f"no step was traced: the run had {self._done} steps, tracing starts at {self.options.start}")

    def on_finish(self, trainer: Trainer) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def _write(self, trainer: Trainer, step: int) -> None:
        self._profiler.stop()
        folder = trainer.run.path / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"step-{step:06d}-rank-{here().rank:05d}.json.gz"
        self._profiler.export_chrome_trace(str(path))
        self._profiler, self.path = None, path
        trainer.say(
            f"wrote a trace of {self.options.steps} steps to {folder}, a file per rank: open it in ui.perfetto.dev"
        )

"""Callbacks for what goes wrong in a run: numbers that are not finite, replicas that drift apart, signals to end."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from ..errors import DriftError, InputError
from ..runtime.faults.nonfinite import agree_finite, explain_nonfinite
from ..runtime.faults.replicas import check_replicas
from ..runtime.faults.signals import USUAL, StopSignals
from .batches import arguments, loss_of
from .callbacks import Callback

if TYPE_CHECKING:
    from .trainer import Trainer

Action = Literal["raise", "warn"]


class NonFinite(Callback):
    """Looks at the loss of every call, and if asked at gradients; one that is not finite is traced to its first op.

    Ranks agree on it by one small all_reduce a call, which waits for the loss; looking at gradients waits for backward.
    With fp16 and a loss scale gradients overflow now and then and are skipped: look at the loss only.
    """

    def __init__(self, action: Action = "raise", every: int = 1, gradients: bool = False) -> None:
        """Look at every n-th step, and raise or warn."""
        _check(action, every)
        self.action, self.every, self.gradients = action, every, gradients

    def on_batch_end(self, trainer: Trainer, batch: Any, output: Any, number: int) -> None:
        step = trainer.progress.step + 1
        if step % self.every or agree_finite(trainer.model, loss_of(output), gradients=self.gradients):
            return
        args, kwargs = arguments(batch)
        error = explain_nonfinite(trainer.model, args, kwargs, loss_of=loss_of)
        _act(self.action, type(error)(f"step {step}, batch {number}: {error}"))


class CheckReplicas(Callback):
    """Compares what ranks hold alike, by hashes, every n steps."""

    def __init__(self, every: int = 100, action: Action = "raise") -> None:
        _check(action, every)
        self.every, self.action = every, action

    def on_step_end(self, trainer: Trainer, step: int, metrics: dict[str, float], outputs: list[Any]) -> None:
        if step % self.every == 0:
            try:
                check_replicas(trainer.model)
            except DriftError as error:
                _act(self.action, DriftError(f"after step {step}, {error}"))


class StopOnSignal(Callback):
    """SIGTERM and SIGUSR1 end a run after the step that runs, on all ranks, with a checkpoint. A Trainer has one."""

    def __init__(self, signals: Sequence[str] = USUAL) -> None:
        self.signals = tuple(signals)
        self._stop_signals: StopSignals | None = None

    def on_train_start(self, trainer: Trainer) -> None:
        self._stop_signals = StopSignals(
            self.signals, lambda name: trainer.stop(f"{name} on rank {trainer.world.rank}")
        )
        self._stop_signals.open()

    def on_finish(self, trainer: Trainer) -> None:
        if self._stop_signals is not None:
            self._stop_signals.close()


def _check(action: str, every: int) -> None:
    if action not in ("raise", "warn"):
        raise InputError(f'action={action!r} is not known; use "raise" or "warn"')
    if every < 1:
        raise InputError(f"every={every}: a number of steps, 1 or more")


def _act(action: Action, error: Exception) -> None:
    if action == "raise":
        raise error
    warnings.warn(str(error), stacklevel=4)

"""Callbacks for faults: non-finite losses, replicas that drift apart, signals to stop."""

from __future__ import annotations

import os
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
STOPPING = b"\nstopping after this step, with a checkpoint; press Ctrl-C again to abort\n"


class NonFinite(Callback):
    """Checks the loss of every call, optionally the gradients; a non-finite value is traced to its first op.

    Ranks agree by one small all_reduce per call, which waits for the loss; checking gradients waits for backward.
    With fp16 and a loss scale gradients overflow now and then and are skipped: check the loss only.
    """

    def __init__(self, action: Action = "raise", every: int = 1, gradients: bool = False) -> None:
        """Check every n-th step, and raise or warn."""
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
    """Compares by hashes, every n steps, what should be equal on several ranks."""

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
    """SIGTERM, SIGUSR1 and Ctrl-C stop a run after the step, on all ranks, with a checkpoint. Part of every Trainer.

    A second Ctrl-C aborts at once.
    """

    def __init__(self, signals: Sequence[str] = USUAL) -> None:
        self.signals = tuple(signals)
        self._stop_signals: StopSignals | None = None

    def on_train_start(self, trainer: Trainer) -> None:
        def stop(name: str) -> None:
            trainer.stop(f"{name} on rank {trainer.world.rank}")
            if name == "SIGINT" and trainer.world.rank == 0:
                os.write(2, STOPPING)  # in the middle of anything, where print may be busy

        self._stop_signals = StopSignals(self.signals, stop)
        self._stop_signals.open()

    def on_finish(self, trainer: Trainer) -> None:
        if self._stop_signals is not None:
            self._stop_signals.close()


def _check(action: str, every: int) -> None:
    if action not in ("raise", "warn"):
        raise InputError(f'action={action!r} is unknown; use "raise" or "warn"')
    if every < 1:
        raise InputError(f"every={every}: must be at least 1 step")


def _act(action: Action, error: Exception) -> None:
    if action == "raise":
        raise error
    warnings.warn(str(error), stacklevel=4)

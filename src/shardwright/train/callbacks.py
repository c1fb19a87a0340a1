"""Hooks for a user's code, in the order of a run:

    on_setup                                    compiled and loaded, nothing has run
    on_load_checkpoint, after_load_checkpoint   only if it resumes
    on_train_start
      on_epoch_start
        on_step_start                           all that one update needs
          before_zero_grad, after_zero_grad
          on_accumulate_start                   forward and backward of all its batches
            on_batch_start, on_batch_end        one of them
            before_sync, after_sync             around the last backward, in which gradients are synced
          on_accumulate_end
          after_average                         the loss and other numbers of the update are known
          before_clip, after_clip
          before_optimizer_step, after_optimizer_step
          before_log                            numbers may be added or changed
        on_step_end
        on_val_start
          on_val_batch_start, on_val_batch_end
          after_val_average, before_log_val
        on_val_end
        on_save_checkpoint
      on_epoch_end
    on_stop                                     if a stop was requested
    on_train_end
    on_finish                                   always, also after an error

Every rank calls every callback, in the order of the list.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from ..errors import InputError

if TYPE_CHECKING:
    from .trainer import Trainer

Metrics = dict[str, float]


class Callback:
    """Every hook does nothing; override what you need. `state_dict` is saved in checkpoints."""

    def on_setup(self, trainer: Trainer) -> None:
        """The model is compiled; nothing is loaded, nothing has run."""

    def on_load_checkpoint(self, trainer: Trainer, path: Any) -> None:
        """The run is about to resume from this checkpoint."""

    def after_load_checkpoint(self, trainer: Trainer, saved: dict[str, Any]) -> None:
        """Everything is loaded. `saved` is what callbacks added on saving."""

    def on_save_checkpoint(self, trainer: Trainer, saved: dict[str, Any]) -> None:
        """A checkpoint is about to be saved. Add numbers, strings, lists and tensors to `saved`."""

    def on_train_start(self, trainer: Trainer) -> None:
        """Before the first epoch of this run."""

    def on_train_end(self, trainer: Trainer) -> None:
        """After the last step, and the last checkpoint."""

    def on_stop(self, trainer: Trainer, reason: str) -> None:
        """All ranks have agreed to stop after this step."""

    def on_finish(self, trainer: Trainer) -> None:
        """The very end, also after an error."""

    def on_epoch_start(self, trainer: Trainer, epoch: int) -> None:
        """Before the first batch of an epoch, or where the run resumes in it."""

    def on_epoch_end(self, trainer: Trainer, epoch: int) -> None:
        """After an epoch and its validation."""

    def on_step_start(self, trainer: Trainer, step: int) -> None:
        """Before an update. `step` counts from 1."""

    def on_step_end(self, trainer: Trainer, step: int, metrics: Metrics, outputs: list[Any]) -> None:
        """After an update; validation and saving come later. `metrics` is empty if the step was not logged."""

    def on_accumulate_start(self, trainer: Trainer, batches: list[Any]) -> None:
        """Before forward and backward of the batches of an update."""

    def on_accumulate_end(self, trainer: Trainer, outputs: list[Any]) -> None:
        """After them. `outputs` are those of the model for each batch."""

    def on_batch_start(self, trainer: Trainer, batch: Any, number: int) -> None:
        """Before forward of one batch of an update."""

    def on_batch_end(self, trainer: Trainer, batch: Any, output: Any, number: int) -> None:
        """After its backward."""

    def before_zero_grad(self, trainer: Trainer) -> None:
        """Gradients are those of the previous step."""

    def after_zero_grad(self, trainer: Trainer) -> None:
        """Gradients are cleared."""

    def before_sync(self, trainer: Trainer) -> None:
        """Before the backward in which gradients are summed over ranks."""

    def after_sync(self, trainer: Trainer) -> None:
        """Gradients are synced on all ranks."""

    def after_average(self, trainer: Trainer, averages: dict[str, Tensor]) -> None:
        """The loss of the update, and other named scalars of the outputs, averaged over its batches."""

    def before_clip(self, trainer: Trainer) -> None:
        """Before gradients are clipped; also called if clipping is off."""

    def after_clip(self, trainer: Trainer, norm: Tensor | None) -> None:
        """`norm` is that of all gradients before they were clipped; None if it was not computed."""

    def before_optimizer_step(self, trainer: Trainer) -> None:
        """Gradients are final, parameters not yet updated."""

    def after_optimizer_step(self, trainer: Trainer) -> None:
        """Parameters are updated; the LR scheduler has not stepped yet."""

    def before_log(self, trainer: Trainer, metrics: Metrics) -> None:
        """These numbers are about to be logged; change them in place. The first rank's are written."""

    def on_val_start(self, trainer: Trainer) -> None:
        """Before validation. The model is in eval mode."""

    def on_val_end(self, trainer: Trainer, metrics: Metrics) -> None:
        """After validation. The model is in training mode again, if it was."""

    def on_val_batch_start(self, trainer: Trainer, batch: Any, number: int) -> None:
        """Before a batch of validation."""

    def on_val_batch_end(self, trainer: Trainer, batch: Any, output: Any, number: int) -> None:
        """After a batch of validation."""

    def after_val_average(self, trainer: Trainer, averages: dict[str, Tensor]) -> None:
        """The mean loss of validation, and other named scalars of the outputs."""

    def before_log_val(self, trainer: Trainer, metrics: Metrics) -> None:
        """These numbers of validation are about to be logged; change them in place."""

    def state_dict(self) -> dict[str, Any]:
        """State to save in checkpoints."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore state from a checkpoint."""


class EarlyStopping(Callback):
    """Stops a run when a validation metric has not improved for some validations."""

    def __init__(
        self, metric: str = "val_loss", patience: int = 3, min_delta: float = 0.0, mode: Literal["min", "max"] = "min"
    ) -> None:
        """Stop after `patience` validations without an improvement of more than `min_delta`."""
        if patience < 1 or min_delta < 0:
            raise InputError(f"patience={patience} must be at least 1, and min_delta={min_delta} at least 0")
        if mode not in ("min", "max"):
            raise InputError(f'mode={mode!r} is unknown; use "min" or "max"')
        self.metric, self.patience, self.min_delta, self.mode = metric, patience, min_delta, mode
        self.best: float | None = None
        self.waited = 0

    def on_val_end(self, trainer: Trainer, metrics: Metrics) -> None:
        if self.metric not in metrics:
            raise InputError(
                f"early stopping watches {self.metric!r}, but validation returns {', '.join(metrics) or 'nothing'}"
            )
        value = metrics[self.metric]
        gain = 0.0 if self.best is None else self.best - value if self.mode == "min" else value - self.best
        if not math.isnan(value) and (self.best is None or gain > self.min_delta):
            self.best, self.waited = value, 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            trainer.stop(f"{self.metric} has not improved on {self.best} in {self.waited} validations")

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.waited = state["best"], state["waited"]


class LearningRateMonitor(Callback):
    """Logs the learning rate of every parameter group, optionally its momentum."""

    def __init__(self, momentum: bool = False) -> None:
        self.momentum = momentum

    def before_log(self, trainer: Trainer, metrics: Metrics) -> None:
        for number, group in enumerate(trainer.optimizer.param_groups):
            metrics[f"lr_{number}"] = float(group["lr"])
            if self.momentum and ("momentum" in group or "betas" in group):
                metrics[f"momentum_{number}"] = float(group["momentum"] if "momentum" in group else group["betas"][0])

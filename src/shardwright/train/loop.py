"""The loop: updates, validation, saving, in the order drawn in `callbacks.py`.

The loop does not know how the model is split. Ranks agree on what they must decide alike (`agreement.py`): a rank that
should stop tells the others at its next update, and all stop after the same one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.profiler import record_function
from torch.utils import _pytree as pytree

from ..errors import InputError
from .batches import arguments, count_labels_in, loss_of, move_to, numbers_of, tokens_in, weighted
from .feed import UpdateBatch, update_batches, updates
from .meters import memory_used

if TYPE_CHECKING:
    from .trainer import Trainer


@dataclass(slots=True, kw_only=True)
class Progress:
    """Progress of a run, saved in checkpoints."""

    step: int = 0
    epoch: int = 0
    rows: int = 0
    tokens: int = 0
    best: float | None = None
    best_step: int | None = None
    val_step: int | None = None  # of the last validation

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for field in fields(self):
            setattr(self, field.name, state[field.name])


class TrainingLoop:
    """Runs a trainer after its setup."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._norm: Tensor | None = None
        self._stopped: str | None = None

    # -- the run -------------------------------------------------------------------------------

    def run(self) -> str:
        """Train until the end or until a stop is requested; returns how it ended."""
        trainer, progress = self.trainer, self.trainer.progress
        trainer.model.train()
        trainer.fire("on_train_start")
        trainer.meter.read()  # setup time is not training time
        while not self._done() and self._stopped is None:
            self._epoch()
        if self._stopped is None and trainer.val_source is not None and progress.val_step != progress.step:
            self._validated()
        trainer.save()
        trainer.fire("on_train_end")
        return f"at step {progress.step}" + (f", stopped: {self._stopped}" if self._stopped is not None else "")

    def _done(self) -> bool:
        progress, trainer = self.trainer.progress, self.trainer
        steps = trainer.max_steps is not None and progress.step >= trainer.max_steps
        return steps or (trainer.max_epochs is not None and progress.epoch >= trainer.max_epochs)

    def _epoch(self) -> None:
        trainer, progress, batches = self.trainer, self.trainer.progress, self.trainer.batches
        fresh, before = batches.row == 0, progress.step
        trainer.fire("on_epoch_start", progress.epoch)
        for parts in updates(update_batches(batches, trainer.model), trainer.accumulate):
            self._update(parts)
            if self._between() or self._done():
                return
        if fresh and progress.step == before:
            raise InputError("the training data is empty: an epoch yields no batch")
        ended = progress.epoch
        progress.epoch = batches.epoch
        self._end_of_epoch(ended)

    def _between(self) -> bool:
        """Validation and a checkpoint after an update, if due. Returns whether to stop."""
        trainer, step = self.trainer, self.trainer.progress.step
        stop, every = trainer.agreement.answer() > 0, trainer.validation.every
        due = trainer.val_source is not None and every is not None and step % every == 0
        better = self._validated() if due else False
        kept = trainer.checkpoints
        if kept is not None and (better or (kept.every is not None and step % kept.every == 0)):
            trainer.save()
        if stop or (due and trainer.agreement.largest(trainer.wants_to_stop) > 0):
            self._stop()
        return self._stopped is not None

    def _end_of_epoch(self, epoch: int) -> None:
        trainer, kept = self.trainer, self.trainer.checkpoints
        if trainer.optimization.scheduler_every == "epoch":
            self._move_schedule()
        every = trainer.validation.every_epochs
        due = trainer.val_source is not None and every is not None and (epoch + 1) % every == 0
        due = due and trainer.progress.val_step != trainer.progress.step
        better = self._validated() if due else False
        if kept is not None and (better or (kept.every_epochs is not None and (epoch + 1) % kept.every_epochs == 0)):
            trainer.save()
        trainer.fire("on_epoch_end", epoch)
        if trainer.agreement.largest(trainer.wants_to_stop) > 0:
            self._stop()

    def _stop(self) -> None:
        trainer = self.trainer
        self._stopped = "; ".join(trainer.agreement.all_gather_texts(trainer.stop_reason or "")) or "on request"
        trainer.say(f"stopping after step {trainer.progress.step}: {self._stopped}")
        trainer.fire("on_stop", self._stopped)

    # -- one update ----------------------------------------------------------------------------

    def _update(self, parts: Sequence[UpdateBatch]) -> None:
        trainer, progress = self.trainer, self.trainer.progress
        step = progress.step + 1
        trainer.fire("on_step_start", step)
        with record_function(f"step {step}"):
            trainer.fire("before_zero_grad")
            trainer.optimizer.zero_grad()
            trainer.fire("after_zero_grad")
            outputs, averages = self._accumulate([self._here(part) for part in parts])
            trainer.agreement.ask(trainer.wants_to_stop)
            finite = trainer.scale is None or trainer.scale.down(trainer.optimizer, trainer.agreement)
            self._clip()
            trainer.fire("before_optimizer_step")
            with record_function("optimizer"):
                if finite:
                    trainer.optimizer.step()
            trainer.fire("after_optimizer_step")
            if trainer.scale is not None:
                trainer.scale.move(finite)
        rows, tokens = sum(part.rows for part in parts), sum(tokens_in(part.batch) * part.shares for part in parts)
        progress.step, progress.rows, progress.tokens = step, progress.rows + rows, progress.tokens + tokens
        trainer.meter.count(rows, tokens)
        metrics = self._log(averages) if self._is_logged(step) else {}
        if trainer.optimization.scheduler_every == "step":
            self._move_schedule()
        trainer.advance(step)
        trainer.fire("on_step_end", step, metrics, outputs)

    def _here(self, part: UpdateBatch) -> UpdateBatch:
        """A batch on this rank's device."""
        return replace(part, batch=move_to(part.batch, self.trainer.world.device))

    def _accumulate(self, parts: Sequence[UpdateBatch]) -> tuple[list[Any], dict[str, Tensor]]:
        """Forward and backward of all batches of an update; returns the outputs and their scalars."""
        trainer = self.trainer
        weights = self.weights(parts)
        trainer.fire("on_accumulate_start", [part.batch for part in parts])
        outputs: list[Any] = []
        for number, (part, weight) in enumerate(zip(parts, weights, strict=True)):
            batch, last = part.batch, number == len(parts) - 1
            trainer.model.pass_whole(part.whole)
            with nullcontext() if last else trainer.model.no_sync():
                trainer.fire("on_batch_start", batch, number)
                args, kwargs = arguments(batch)
                with record_function("forward"):
                    output = trainer.model(*args, **kwargs)
                loss = loss_of(output)
                if last:
                    trainer.fire("before_sync")
                with record_function("backward"):
                    share = loss if weight == 1.0 else loss * weight
                    torch.autograd.backward(share if trainer.scale is None else trainer.scale.up(share))
                if last:
                    trainer.fire("after_sync")
                outputs.append(_let_go(output))
                trainer.fire("on_batch_end", batch, outputs[-1], number)
        trainer.fire("on_accumulate_end", outputs)
        averages = weighted([numbers_of(output) for output in outputs], weights)
        trainer.fire("after_average", averages)
        return outputs, averages

    def weights(self, parts: Sequence[UpdateBatch]) -> list[float]:
        """The weight of each batch's loss in the update."""
        if self.trainer.optimization.reduction == "sum":
            return [1.0] * len(parts)
        if len(parts) == 1:
            return [1.0]
        return _shares(self.counts(parts))

    def counts(self, parts: Sequence[UpdateBatch]) -> list[float]:
        """The samples of each batch, or its labels that are not ignored, over all ranks."""
        trainer = self.trainer
        if trainer.optimization.reduction != "token":
            return [float(part.rows) for part in parts]
        label_counts = torch.stack([count_labels_in(part.batch) for part in parts]).double().cpu()
        if any(part.shares > 1 for part in parts):  # ranks of one replica share their count
            sharing = torch.tensor([part.shares for part in parts], dtype=torch.float64)
            label_counts = trainer.agreement.summed(label_counts * sharing / trainer.world.size)
        return [float(count) for count in label_counts]

    def _clip(self) -> None:
        trainer = self.trainer
        trainer.fire("before_clip")
        self._norm = None
        if trainer.optimization.clip_value is not None:
            torch.nn.utils.clip_grad_value_(trainer.model.parameters(), trainer.optimization.clip_value)
        if trainer.optimization.clip_norm is not None:
            self._norm = torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), trainer.optimization.clip_norm)
        trainer.fire("after_clip", self._norm)

    def _move_schedule(self) -> None:
        scheduler = self.trainer.scheduler
        if scheduler is not None and not isinstance(scheduler, ReduceLROnPlateau):  # which steps after validation
            scheduler.step()

    # -- numbers -------------------------------------------------------------------------------

    def _is_logged(self, step: int) -> bool:
        trainer = self.trainer
        return step % trainer.logging.every == 0 or step in (1, trainer.last_step)

    def _log(self, averages: dict[str, Tensor]) -> dict[str, float]:
        """Log before the scheduler steps, so that the learning rate is that of the step."""
        trainer = self.trainer
        metrics = {name: float(value) for name, value in averages.items()}
        metrics |= {"lr": float(trainer.optimizer.param_groups[0]["lr"]), "epoch": float(trainer.progress.epoch)}
        if self._norm is not None:
            metrics["grad_norm"] = float(self._norm)
        if trainer.scale is not None:
            metrics |= {"loss_scale": trainer.scale.scale, "skipped": float(trainer.scale.skipped)}
        metrics |= trainer.meter.read()
        metrics["memory_gib"] = trainer.agreement.largest(memory_used(trainer.world.device))
        trainer.fire("before_log", metrics)
        trainer.log(metrics)
        return metrics

    # -- validation ----------------------------------------------------------------------------

    def _validated(self) -> bool:
        """Validate; returns whether the monitored metric is the best so far."""
        trainer, progress, kept = self.trainer, self.trainer.progress, self.trainer.checkpoints
        metrics = self.validate()
        if isinstance(trainer.scheduler, ReduceLROnPlateau):
            trainer.scheduler.step(metrics["val_loss"])
        if kept is None or kept.metric not in metrics or not kept.better(metrics[kept.metric], progress.best):
            return False
        progress.best, progress.best_step = metrics[kept.metric], progress.step
        return kept.keep_best > 0

    def validate(self) -> dict[str, float]:
        """The mean loss over the validation data, and other named scalars of the outputs."""
        trainer = self.trainer
        with trainer.meter.paused():
            training = trainer.model.training
            trainer.model.eval()
            try:
                trainer.fire("on_val_start")
                averages = self._val_averages()
            finally:
                trainer.model.train(training)
            trainer.fire("after_val_average", averages)
            metrics = {f"val_{name}": float(value) for name, value in averages.items()}
            trainer.fire("before_log_val", metrics)
            trainer.log(metrics)
            trainer.progress.val_step, trainer.last_val = trainer.progress.step, dict(metrics)
            trainer.fire("on_val_end", metrics)
        return metrics

    @torch.no_grad()
    def _val_averages(self) -> dict[str, Tensor]:
        trainer = self.trainer
        outputs, counts = [], []
        batches = trainer.val_batches_anew()
        for number, part in enumerate(islice(update_batches(batches, trainer.model), trainer.validation.batches)):
            part = self._here(part)
            batch = part.batch
            trainer.model.pass_whole(part.whole)
            trainer.fire("on_val_batch_start", batch, number)
            args, kwargs = arguments(batch)
            output = trainer.model(*args, **kwargs)
            trainer.fire("on_val_batch_end", batch, output, number)
            outputs.append(numbers_of(output))
            counts += self.counts([part])
        if not outputs:
            raise InputError("the validation data is empty: it yields no batch")
        return weighted(outputs, _shares(counts))


def _shares(counts: Sequence[float]) -> list[float]:
    total = math.fsum(counts) or 1.0
    return [count / total for count in counts]


def _let_go(output: Any) -> Any:
    """The outputs, detached."""
    return pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output)

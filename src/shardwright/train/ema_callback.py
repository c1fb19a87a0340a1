"""EMA of the weights during a run, for validation and for the final weights."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

from ..ema import EMA
from ..errors import InputError
from .callbacks import Callback, Metrics

if TYPE_CHECKING:
    from .trainer import Trainer


class EMACallback(Callback):
    """Updates an EMA after every step (`shardwright.ema.EMA`), and validates with it.

    It is saved with the run and reshards like the weights. To export it:

        with averaging.applied():
            save_weights("average.safetensors", trainer.model)
    """

    def __init__(self, decay: float = 0.999, validate: bool = True) -> None:
        """`validate=False` validates with the weights instead."""
        if not 0 < decay < 1:
            raise InputError(f"decay={decay} must be between 0 and 1: 0.999 averages about the last thousand updates")
        self.decay, self.validate = decay, validate
        self.ema: EMA | None = None
        self._loaded = False
        self._swapped = ExitStack()

    def on_setup(self, trainer: Trainer) -> None:
        self.ema = EMA(trainer.model, self.decay)

    def after_load_checkpoint(self, trainer: Trainer, saved: dict[str, Any]) -> None:
        if not self._loaded:  # the run was started without EMA
            self.ema = EMA(trainer.model, self.decay)

    def after_optimizer_step(self, trainer: Trainer) -> None:
        self._require_ema().update()

    def applied(self) -> AbstractContextManager[None]:
        """Within this context the model has the EMA weights. All ranks must enter it."""
        return self._require_ema().swapped()

    def on_val_start(self, trainer: Trainer) -> None:
        if self.validate:
            self._swapped.enter_context(self.applied())

    def on_val_end(self, trainer: Trainer, metrics: Metrics) -> None:
        self._swapped.close()

    def on_finish(self, trainer: Trainer) -> None:
        self._swapped.close()  # validation may have failed

    def state_dict(self) -> dict[str, Any]:
        return self._require_ema().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._require_ema().load_state_dict({**state, "decay": self.decay})
        self._loaded = True

    def _require_ema(self) -> EMA:
        if self.ema is None:
            raise InputError("there is no EMA yet: it is created when the trainer is set up")
        return self.ema

"""A moving average of the weights, kept in pieces as they are, for validation and for what is left at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..errors import InputError
from ..runtime.state import PieceTensor, piece_like
from .callbacks import Callback, Metrics

if TYPE_CHECKING:
    from .trainer import Trainer


class Averaging(Callback):
    """average = decay * average + (1 - decay) * weights, after every update.

    Validation looks at the average (`validate=False`: at the weights). It is saved with the run, and goes from plan to
    plan as the weights do. To have it as ordinary weights:

        with averaging.applied(trainer):
            save_weights("average.safetensors", trainer.model)
    """

    def __init__(self, decay: float = 0.999, validate: bool = True) -> None:
        if not 0 < decay < 1:
            raise InputError(f"decay={decay} is a part of 1: 0.999 keeps about the last thousand updates")
        self.decay, self.validate = decay, validate
        self.average: dict[str, Tensor] = {}
        self._loaded = False
        self._applied: ExitStack | None = None

    def on_setup(self, trainer: Trainer) -> None:
        self.average = _copied(trainer.model)

    def after_load_checkpoint(self, trainer: Trainer, saved: dict[str, Any]) -> None:
        if not self._loaded:  # the run was begun without an average
            self.average = _copied(trainer.model)

    @torch.no_grad()
    def after_optimizer_step(self, trainer: Trainer) -> None:
        values = _floating(trainer.model)
        torch._foreach_lerp_(
            [_local(held) for held in self.average.values()],
            [_local(values[key]) for key in self.average],
            1.0 - self.decay,
        )

    @contextmanager
    def applied(self, trainer: Trainer) -> Iterator[None]:
        """The model has the average as its weights in here. All ranks must enter it."""
        before = _copied(trainer.model)
        trainer.model.load_state_dict(self.average, strict=False)
        try:
            yield
        finally:
            trainer.model.load_state_dict(before, strict=False)

    def on_val_start(self, trainer: Trainer) -> None:
        if self.validate:
            self._applied = ExitStack()
            self._applied.enter_context(self.applied(trainer))

    def on_val_end(self, trainer: Trainer, metrics: Metrics) -> None:
        if self._applied is not None:
            self._applied.close()
            self._applied = None

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for key, held in self.average.items():
                _local(held).copy_(_local(state["average"][key]))
        self._loaded = True


def _floating(model: Any) -> dict[str, Tensor]:
    """The parameters that a model trains, in pieces, by their first key; buffers are not averaged."""
    trained = {key for key, held in model.named_parameters() if held.requires_grad and held.is_floating_point()}
    return {key: held for key, held in model.state_dict().items() if key in trained}


@torch.no_grad()
def _copied(model: Any) -> dict[str, Tensor]:
    found = {}
    for key, held in _floating(model).items():
        found[key] = piece_like(held) if isinstance(held, DTensor | PieceTensor) else torch.empty_like(held)
        _local(found[key]).copy_(_local(held))
    return found


def _local(value: Tensor) -> Tensor:
    """This rank's memory of a piece."""
    if isinstance(value, PieceTensor):
        return value.local
    found: Tensor = value.to_local() if isinstance(value, DTensor) else value.detach()
    return found

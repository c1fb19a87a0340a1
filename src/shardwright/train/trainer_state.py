"""The trainer's part of a checkpoint, besides model, optimizer, scheduler and data: progress and callbacks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint import load
from .callbacks import Callback

if TYPE_CHECKING:
    from .trainer import Trainer

NAME = "trainer"


class TrainerState:
    """The trainer's part of a checkpoint. `added` is what callbacks added."""

    def __init__(self, trainer: Trainer, added: dict[str, Any]) -> None:
        self.trainer, self.added = trainer, added

    def state_dict(self) -> dict[str, Any]:
        states = {name: callback.state_dict() for name, callback in name_callbacks(self.trainer.callbacks).items()}
        return {
            "progress": self.trainer.progress.state_dict(),
            "callbacks": {name: state for name, state in states.items() if state},
            "added": self.added,
            "scale": self.trainer.scale.state_dict() if self.trainer.scale is not None else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.trainer.progress.load_state_dict(state["progress"])
        for name, callback in name_callbacks(self.trainer.callbacks).items():
            if name in state["callbacks"]:
                callback.load_state_dict(state["callbacks"][name])
        if self.trainer.scale is not None and state["scale"] is not None:
            self.trainer.scale.load_state_dict(state["scale"])
        self.added = state["added"]


def name_callbacks(callbacks: list[Callback]) -> dict[str, Callback]:
    """Callbacks by class name, numbered from the second of a class on."""
    counts: Counter[str] = Counter()
    named = {}
    for callback in callbacks:
        kind = type(callback).__name__
        counts[kind] += 1
        named[kind if counts[kind] == 1 else f"{kind} {counts[kind]}"] = callback
    return named


def load_run(trainer: Trainer, path: Path) -> None:
    """Restore a run from a checkpoint."""
    trainer.fire("on_load_checkpoint", path)
    saved = TrainerState(trainer, {})
    loaded = load(path, trainer.model, trainer.optimizer, schedulers=trainer.scheduler, extra={NAME: saved})
    trainer.batches.load_state_dict(loaded.data)
    trainer.fire("after_load_checkpoint", saved.added)

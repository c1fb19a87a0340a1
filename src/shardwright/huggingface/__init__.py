"""Hugging Face: models that are too large for one rank, and `transformers.Trainer` on many.

Read `models.py` (models without values), `trainer.py` (the Trainer) and `refused.py` (what it does not take).
Needs the package `transformers`; the Trainer needs `accelerate` too. See docs/huggingface.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .models import empty_model, empty_parameters, fill, save_adapters, without_values

if TYPE_CHECKING:
    from .trainer import HuggingFaceTrainer as Trainer

__all__ = ["Trainer", "empty_model", "empty_parameters", "fill", "save_adapters", "without_values"]


def __getattr__(name: str) -> Any:
    if name == "Trainer":  # transformers.Trainer imports accelerate, which models alone do without
        from .trainer import HuggingFaceTrainer

        return HuggingFaceTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

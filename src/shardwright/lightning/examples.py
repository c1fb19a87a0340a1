"""An example batch to compile for, before any step runs: the first one of the dataloader.

Parameters are laid out for training, but Lightning validates before it trains. So the strategy's setup
reads a batch of the training dataloader, as the loop will, and restores the dataloader.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.seed import isolate_rng

STEPS = {
    TrainerFn.FITTING: ("training_step", "fit_loop"),
    TrainerFn.VALIDATING: ("validation_step", "validate_loop"),
    TrainerFn.TESTING: ("test_step", "test_loop"),
    TrainerFn.PREDICTING: ("predict_step", "predict_loop"),
}


def example_of(strategy: Any, trainer: Trainer, example: Any) -> tuple[str, Any] | None:
    """The first step and a batch for it; None if there is no dataloader."""
    assert trainer.state.fn is not None
    step, name = STEPS[trainer.state.fn]
    if example is not None:
        return step, _moved(strategy, trainer, example)
    loop = getattr(trainer, name)
    with isolate_rng():
        loop.setup_data()
        loader = loop._combined_loader
        loop._combined_loader = loop._data_fetcher = None  # the loop sets its data up itself
        if loader is None:
            return None
        try:
            batch = next(iter(loader))[0]
        except StopIteration:
            return None
        finally:
            loader.reset()
        return step, _moved(strategy, trainer, batch)


def _moved(strategy: Any, trainer: Trainer, batch: Any) -> Any:
    """A batch as a step gets it."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
    return strategy.batch_to_device(batch, dataloader_idx=0)

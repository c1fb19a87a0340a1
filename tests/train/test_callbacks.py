"""Callbacks are called at every place of a run, in the order that the module draws."""

import inspect
import re

import pytest

from shardwright.train import Callback, callbacks

from .runs import rows, trainer

PLACES = [name for name, var in vars(Callback).items() if re.match("(on|before|after)_", name) and callable(var)]

# The places of nnScaler's trainer, and which of ours is there.
THEIRS = {
    "after_setup": "on_setup",
    "on_finalize": "on_finish",
    "on_train_start": "on_train_start",
    "on_train_end": "on_train_end",
    "on_val_start": "on_val_start",
    "on_val_end": "on_val_end",
    "on_epoch_start": "on_epoch_start",
    "on_epoch_end": "on_epoch_end",
    "on_step_start": "on_step_start",
    "on_step_end": "on_step_end",
    "on_train_step_start": "on_accumulate_start",
    "on_train_step_end": "on_accumulate_end",
    "on_val_step_start": "on_val_batch_start",
    "on_val_step_end": "on_val_batch_end",
    "after_aggregate_train_step_outputs": "after_average",
    "after_aggregate_val_step_outputs": "after_val_average",
    "before_zero_grad": "before_zero_grad",
    "after_zero_grad": "after_zero_grad",
    "before_sync_grad": "before_sync",
    "after_sync_grad": "after_sync",
    "before_gnorm_clip": "before_clip",
    "after_gnorm_clip": "after_clip",
    "before_optimizer_step": "before_optimizer_step",
    "after_optimizer_step": "after_optimizer_step",
    "before_log_train_metrics": "before_log",
    "before_log_val_metrics": "before_log_val",
    "on_load_checkpoint": "on_load_checkpoint",
    "after_load_checkpoint": "after_load_checkpoint",
    "on_save_checkpoint": "on_save_checkpoint",
}


def recorder():
    """A callback that writes down where it was called, and keeps a number in checkpoints."""
    seen: list[str] = []

    def at(name):
        return lambda self, trainer, *what: seen.append(name)

    return type("Recorder", (Callback,), {name: at(name) for name in PLACES})(), seen


def test_one_update_and_its_validation_go_through_all_places_in_order(tmp_path):
    callback, seen = recorder()
    training = trainer(tmp_path, max_steps=1, micro_batch_size=4, val_data=rows(4), val_every=1, callbacks=[callback])
    training.fit()
    assert seen == [
        "on_setup", "on_train_start", "on_epoch_start", "on_step_start", "before_zero_grad", "after_zero_grad",
        "on_accumulate_start", "on_batch_start", "on_batch_end", "on_batch_start", "before_sync", "after_sync",
        "on_batch_end", "on_accumulate_end", "after_average", "before_clip", "after_clip", "before_optimizer_step",
        "after_optimizer_step", "before_log", "on_step_end", "on_val_start", "on_val_batch_start", "on_val_batch_end",
        "after_val_average", "before_log_val", "on_val_end", "on_save_checkpoint", "on_train_end", "on_finish",
    ]  # fmt: skip


def test_a_run_that_goes_on_says_so_and_an_epoch_has_an_end(tmp_path):
    trainer(tmp_path, max_steps=2).fit()
    callback, seen = recorder()
    trainer(tmp_path, max_epochs=1, callbacks=[callback], resume="last").fit()
    assert seen[:5] == ["on_setup", "on_load_checkpoint", "after_load_checkpoint", "on_train_start", "on_epoch_start"]
    assert seen[-4:] == ["on_save_checkpoint", "on_epoch_end", "on_train_end", "on_finish"]


def test_every_place_of_the_peer_has_one_here():
    assert set(THEIRS.values()) <= set(PLACES)


def test_the_drawing_names_every_place():
    assert set(re.findall(r"\b(?:on|before|after)_\w+", callbacks.__doc__)) == set(PLACES)
    for name in PLACES:
        assert inspect.getdoc(getattr(Callback, name)), name


def test_what_callbacks_add_to_a_checkpoint_comes_back(tmp_path):
    class Counts(Callback):
        def __init__(self):
            self.steps, self.back = 0, None

        def on_step_end(self, trainer, step, metrics, outputs):
            self.steps += 1
            assert len(outputs) == 1

        def on_save_checkpoint(self, trainer, saved):
            saved["words"] = ["a", self.steps]

        def after_load_checkpoint(self, trainer, saved):
            self.back = saved

        def state_dict(self):
            return {"steps": self.steps}

        def load_state_dict(self, state):
            self.steps = state["steps"]

    trainer(tmp_path, max_steps=2, callbacks=[Counts(), Counts()]).fit()
    again = Counts()
    trainer(tmp_path, max_steps=3, callbacks=[Counts(), again], resume="last").fit()
    assert again.steps == 3
    assert again.back == {"words": ["a", 2]}


def test_an_error_in_a_step_still_ends_callbacks_and_loggers(tmp_path):
    ended = []

    class Breaks(Callback):
        def before_clip(self, trainer):
            raise ValueError("broken")

        def on_finish(self, trainer):
            ended.append(trainer.progress.step)

    training = trainer(tmp_path, max_steps=2, callbacks=[Breaks()])
    with pytest.raises(ValueError, match="broken"):
        training.fit()
    assert ended == [0]
    assert not (tmp_path / "run/finished").exists()

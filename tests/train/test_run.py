"""The folder of a run: everything is in it, and nothing is lost without a word."""

import gzip
import json

import pytest
import torch
import yaml

from shardwright.checkpoint import load_weights
from shardwright.errors import CaptureError, CheckpointError, InputError
from shardwright.train import Profile
from shardwright.train.meters import Meter
from shardwright.train.run import RunFolder

from .runs import Net, losses, net, rows, trainer


def test_a_run_leaves_config_plan_code_and_checkpoints(tmp_path):
    trainer(tmp_path, max_steps=1).fit()
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {
        "config.yaml", "plan.json", "report.html", "generated", "checkpoints", "started", "finished", ".lock"
    }  # fmt: skip
    config = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert (config["model"], config["seed"], config["plan"]) == ("tests.train.runs.Net", 4, "single")
    assert config["train_data"] == "22 of tuple"


def test_a_folder_with_a_run_is_not_written_to(tmp_path):
    trainer(tmp_path, max_steps=1).fit()
    with pytest.raises(InputError, match=r'contains a run that has ended: at step 1; resume it with resume="last"'):
        trainer(tmp_path, max_steps=1, plan="no plan at all").fit()  # before anything is compiled


class Broken(Net):
    def forward(self, x):
        raise ValueError("a fault of the model")


def test_a_run_that_failed_before_its_first_step_does_not_block_the_next(tmp_path):
    with pytest.raises(CaptureError):
        trainer(tmp_path, model=Broken(), max_steps=1).fit()
    RunFolder(tmp_path / "run").write_config("seed: 7\n", 0)  # as if it had failed later, in its first batch
    RunFolder(tmp_path / "run").write_plan("{}", 0)

    trainer(tmp_path, max_steps=1).fit()
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"config.yaml", "plan.json"} <= names and not {name for name in names if "-" in name}
    assert yaml.safe_load((tmp_path / "run/config.yaml").read_text())["seed"] == 4


def test_a_folder_whose_run_was_killed_before_it_was_saved_is_not_written_to(tmp_path):
    RunFolder(tmp_path / "run").begin()
    RunFolder(tmp_path / "run").write_config("seed: 1\n", 0)
    RunFolder(tmp_path / "run").mark_started()
    with pytest.raises(InputError, match="no checkpoint to resume from"):
        trainer(tmp_path, max_steps=1).fit()


def test_resume_last_in_an_empty_folder_begins_and_says_so(tmp_path):
    training = trainer(tmp_path, max_steps=1, resume="last")
    training.fit()
    assert list(losses(training)) == [1]
    assert any("no checkpoint yet" in message for message in training.loggers[0].words)


def test_a_run_goes_on_from_a_path_in_another_folder(tmp_path):
    trainer(tmp_path / "a", max_steps=2).fit()
    for number, path in enumerate(("a/run", "a/run/checkpoints", "a/run/checkpoints/step-000002")):
        training = trainer(tmp_path / str(number), max_steps=3, resume=tmp_path / path)
        training.fit()
        assert list(losses(training)) == [3]
    with pytest.raises(CheckpointError, match=r'there is no such checkpoint; pass "last", "best", or the path'):
        trainer(tmp_path / "b", max_steps=3, resume=tmp_path / "nowhere").fit()


def test_another_config_and_another_plan_do_not_take_the_place_of_the_first(tmp_path):
    folder = RunFolder(tmp_path)
    for step, text in ((0, "a"), (5, "a"), (5, "b"), (5, "c")):
        folder.write_config(text, step)
        folder.write_plan(text, step)
    assert (tmp_path / "config.yaml").read_text() == "a"
    assert (tmp_path / "config-from-000005.yaml").read_text() == "b"
    assert (tmp_path / "config-from-000005-2.yaml").read_text() == "c"
    assert (tmp_path / "plan.json").read_text() == "c"
    assert (tmp_path / "plan-until-000005.json").read_text() == "a"
    assert (tmp_path / "plan-until-000005-2.json").read_text() == "b"


def test_a_trace_has_the_steps_that_were_asked_for(tmp_path):
    training = trainer(tmp_path, max_steps=9, profile=Profile(start=2, steps=2))
    training.profile()
    assert training.progress.step == 3
    (path,) = (tmp_path / "run/profile").iterdir()
    assert path.name == "step-000003-rank-00000.json.gz"
    names = {event.get("name") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
    assert {"step 2", "step 3", "forward", "backward", "optimizer"} <= names
    assert not {"step 1", "step 4"} & names
    assert not (tmp_path / "run/checkpoints").exists()


def test_a_run_that_has_ended_can_be_traced(tmp_path):
    trainer(tmp_path, max_epochs=1).fit()
    trainer(tmp_path, max_epochs=1, profile=Profile(start=1, steps=1), resume="last").profile()
    assert [path.name for path in (tmp_path / "run/profile").iterdir()] == ["step-000004-rank-00000.json.gz"]


def test_the_last_step_is_known_also_after_a_stop_with_another_batch_size(tmp_path):
    trainer(tmp_path, max_steps=2).fit()
    training = trainer(tmp_path, max_epochs=2, batch_size=4, resume="last")  # 6 of 22 rows are left of the first epoch
    assert training.fit().step == training.last_step == 2 + 2 + 6


def test_the_speed_is_that_of_training_alone(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    meter = Meter(flops_per_row=100.0, peak=1000.0)
    for _ in range(4):
        clock[0] += 0.5
        meter.count(10, 50)
    with meter.paused():
        clock[0] += 100.0
    assert meter.read() == {
        "seconds_per_step": 0.5, "rows_per_second": 20.0, "tokens_per_second": 100.0, "mfu": 2.0,
    }  # fmt: skip
    assert meter.read() == {}


def test_the_arithmetic_of_a_model_is_that_of_its_products(tmp_path):
    training = trainer(tmp_path, max_steps=1)
    training.fit()
    first, second = 2 * 8 * 16, 2 * 16 * 8
    assert training.model.flops == 8 * (2 * first + 3 * second)  # the first layer's input has no gradient
    assert training.meter.flops_per_row == 2 * first + 3 * second


def test_a_trained_model_leaves_as_ordinary_weights(tmp_path):
    from shardwright.checkpoint import convert

    training = trainer(tmp_path, max_steps=2)
    training.fit()
    convert(tmp_path / "run/checkpoints", tmp_path / "end.safetensors")
    alone = Net().double()
    load_weights(tmp_path / "end.safetensors", alone)
    data = rows()[0]
    assert not torch.equal(alone(*data), net()(*data))
    assert all(torch.equal(value, training.model.full_state_dict()[key]) for key, value in alone.state_dict().items())

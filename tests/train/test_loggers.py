"""Numbers arrive where they are sent, and what is missing is said."""

import csv
import io
import re
import sys
import types
from pathlib import Path

import pytest
from rich.console import Console

from shardwright.errors import InputError
from shardwright.train import ConsoleLogger, CSVLogger, MLflowLogger, TensorBoardLogger, WandbLogger
from shardwright.train.loggers import RunFacts

from .runs import rows, trainer


def read(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def test_a_csv_has_a_row_for_each_step_and_new_numbers_as_new_columns(tmp_path):
    trainer(tmp_path, max_steps=3, val_data=rows(4), val_every=2, loggers=[CSVLogger()], log_every=2).fit()
    actual = read(tmp_path / "run/metrics.csv")
    assert [(row["step"], bool(row["loss"]), bool(row["val_loss"])) for row in actual] == [
        ("1", True, False), ("2", True, False), ("2", False, True), ("3", True, False), ("3", False, True),
    ]  # fmt: skip
    assert {"lr", "epoch", "seconds_per_step", "rows_per_second", "mfu", "memory_gib"} <= actual[0].keys()


def test_a_csv_of_a_run_that_goes_on_has_each_step_once(tmp_path):
    logger = CSVLogger()
    logger.start(RunFacts(folder=tmp_path))
    for step in (1, 2, 3):
        logger.log({"loss": 1.0 / step}, step)
    again = CSVLogger()
    again.start(RunFacts(folder=tmp_path, step=2))
    again.log({"loss": 0.25}, 3)
    again.log({"loss": 0.125, "more": 1.0}, 4)
    assert [row["loss"] for row in read(tmp_path / "metrics.csv")] == ["1.0", "0.5", "0.25", "0.125"]
    assert len(read(tmp_path / "metrics-until-000003.csv")) == 3


def test_tensorboard_reads_what_was_logged(tmp_path):
    logger = TensorBoardLogger()
    logger.start(RunFacts(folder=tmp_path))
    logger.log({"loss": 0.5, "lr": 1.0}, 7)
    logger.finish()
    (file,) = (tmp_path / "tensorboard").iterdir()
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    events = [Event.FromString(raw) for raw in RawEventFileLoader(str(file)).Load()]
    by_key = {value.tag: (event.step, value.simple_value) for event in events for value in event.summary.value}
    assert by_key == {"loss": (7, 0.5), "lr": (7, 1.0)}


@pytest.mark.parametrize(("logger", "package"), [(WandbLogger(), "wandb"), (MLflowLogger(), "mlflow")])
def test_a_package_that_is_not_there_is_named(logger, package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=rf"needs the package {package}.*pip install {package}"):
        logger.start(RunFacts(folder=tmp_path))


def test_wandb_is_given_the_config_and_the_numbers(tmp_path, monkeypatch):
    message = []
    stored = types.SimpleNamespace(
        log=lambda metrics, step: message.append((metrics, step)), finish=lambda: message.append("finished")
    )
    fake = types.SimpleNamespace(init=lambda **options: message.append(options) or stored)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    logger = WandbLogger(project="p", id="x")
    logger.start(RunFacts(folder=tmp_path, config={"seed": 1}))
    logger.log({"loss": 0.5}, 3)
    logger.finish()
    assert message == [
        {"dir": str(tmp_path), "config": {"seed": 1}, "resume": "allow", "project": "p", "id": "x"},
        ({"loss": 0.5}, 3),
        "finished",
    ]


def test_mlflow_is_given_the_config_and_the_numbers(tmp_path, monkeypatch):
    message = []
    names = ("set_tracking_uri", "set_experiment", "start_run", "log_params", "log_metrics", "end_run")

    def at(name):
        return lambda *args, **options: message.append((name, args, options))

    fake = types.SimpleNamespace(**{name: at(name) for name in names})
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    logger = MLflowLogger(experiment="e", name="n", uri="u")
    logger.start(RunFacts(folder=tmp_path, config={"seed": 1}))
    logger.log({"loss": 0.5}, 3)
    logger.finish()
    assert [name for name, _, _ in message] == list(names)
    assert message[4] == ("log_metrics", ({"loss": 0.5},), {"step": 3})


def test_the_console_says_a_line_a_step_where_there_is_no_terminal(tmp_path):
    text = io.StringIO()
    logger = ConsoleLogger(Console(file=text, width=200))
    trainer(tmp_path, max_steps=2, loggers=[logger], val_data=rows(4)).fit()
    lines = text.getvalue().splitlines()
    assert lines[0] == "compiling for 1 rank, plan single"
    assert lines[1].startswith("plan: single, one device") and lines[1].endswith("plan.json")
    assert lines[2].startswith("step 1 of 2  loss ")
    assert "rows/s" in lines[2] and "MFU" in lines[2] and "GiB" in lines[2]
    assert any(line.startswith("checkpoint: step 2 in ") for line in lines)
    assert any(line.startswith("step 2 of 2  val_loss ") for line in lines)


def test_the_bar_of_a_terminal_stays_below_the_lines(tmp_path):
    text = io.StringIO()
    logger = ConsoleLogger(Console(file=text, width=80, force_terminal=True, color_system=None))
    trainer(tmp_path, max_steps=2, loggers=[logger]).fit()
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text.getvalue())
    lines = [line for line in re.split(r"[\r\n]+", plain) if line.strip()]
    bars = [line for line in lines if "━" in line]
    assert "2/2" in bars[-1] and "left" in bars[-1] and "s/step" in bars[-1]
    assert any(line.startswith("step 2 of 2  loss ") for line in lines)
    assert all(len(line) <= 80 for line in lines if line.startswith("step") or "━" in line)


def test_a_missing_package_is_noticed_before_anything_is_compiled(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match="pip install wandb"):
        trainer(tmp_path, plan="no plan at all", max_steps=1, loggers=[WandbLogger()]).fit()
    trainer(tmp_path, max_steps=1).fit()  # and the folder is free

"""Config files: what they make, and what is said of faults in them."""

import textwrap

import pytest
import torch

from shardwright.cli import main
from shardwright.cli.train import run_train
from shardwright.errors import InputError
from shardwright.train.config import find, read_config

CONFIG = """\
model:
  class_path: tests.train.parts.Net
  init_args:
    wide: 16
optimizer:
  class_path: torch.optim.SGD
  init_args: {lr: 0.1}
train_data:
  class_path: tests.train.parts.Pairs
  init_args: {size: 16}
batch_size: 8
max_steps: 2
plan: single
logging: {loggers: [shardwright.train.CSVLogger]}
checkpoints:
  keep_last: 1
"""

# What is changed, to what, and what is said; a number is the line.
FAULTS = {
    "a misspelt key": ("max_steps", "maxsteps", "12: there is no setting maxsteps; did you mean 'max_steps'?"),
    "a misspelt key of a group": (
        "keep_last",
        "keeplast",
        "16: there is no setting checkpoints.keeplast; did you mean 'keep_last'?",
    ),
    "a misspelt argument": ("wide", "wid", "4: tests.train.parts.Net takes no 'wid'; did you mean 'wide'?"),
    "a misspelt init_args": (
        "  init_args:\n",
        "  initargs:\n",
        "3: beside class_path stands 'initargs'; did you mean 'init_args'?",
    ),
    "a wrong type": ("batch_size: 8", "batch_size: many", "11: batch_size: this must be int or null, and is many"),
    "a wrong type in a class": ("wide: 16", "wide: x", "4: model.wide: this must be int, and is x"),
    "a wrong type in a function's class": ("lr: 0.1", "lr: x", "7: optimizer.lr: this must be float"),
    "a wrong type in a group": (
        "keep_last: 1",
        "keep_last: x",
        "16: checkpoints.keep_last: this must be int or null, and is x",
    ),
    "a word that is not one of some": (
        "plan: single",
        "inputs: per_replic",
        "13: inputs: this must be one of ['global', 'per_replica'], and is per_replic; did you mean 'per_replica'?",
    ),
    "a class that is not there": (
        "optim.SGD",
        "optim.SGDD",
        "6: optimizer.class_path: 'torch.optim.SGDD' can't be imported: "
        "'torch.optim' has no 'SGDD'; did you mean 'SGD'?",
    ),
    "a module that is not there": (
        "parts.Net",
        "partz.Net",
        "2: model.class_path: 'tests.train.partz.Net' can't be imported: "
        "'tests.train' has no 'partz'; did you mean 'parts'?",
    ),
    "a package that is not there": (
        "tests.train.parts.Net",
        "torhc.Net",
        "there is no module 'torhc'; did you mean 'torch'?",
    ),
    "a module that breaks": (
        "parts.Net",
        "broken.Net",
        "'tests.train.broken.Net' can't be imported: ZeroDivisionError",
    ),
    "a class of another kind": (
        "tests.train.parts.Net\n  init_args:\n    wide: 16",
        "torch.optim.SGD",
        "1: model: Import path torch.optim.SGD does not correspond",
    ),
    "a key that stands twice": ("max_steps: 2", "max_steps: 2\nmax_steps: 3", "13: max_steps stands twice"),
    "text that is no YAML": ("plan: single", "plan: [single", "is not YAML"),
    "what is missing": (
        "train_data:\n  class_path: tests.train.parts.Pairs\n  init_args: {size: 16}\n",
        "",
        "these settings are missing: train_data",
    ),
    "an object in YAML": ("plan: single", "plan: !!python/object/apply:os.getcwd []", "is not YAML"),
}


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return path


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_with_its_line_and_what_was_meant(config, fault, capsys):
    old, new, message = FAULTS[fault]
    assert old in CONFIG
    config.write_text(CONFIG.replace(old, new, 1))
    assert main(["train", "config.yaml"]) == 2
    assert (f"config.yaml:{message}" if message[0].isdigit() else message) in capsys.readouterr().err
    assert not (config.parent / "run").exists()


def test_all_misspelt_keys_are_named_at_once(config, capsys):
    config.write_text(CONFIG.replace("batch_size", "batchsize").replace("max_steps", "maxsteps"))
    main(["train", "config.yaml"])
    err = capsys.readouterr().err
    assert "config.yaml:11:" in err and "config.yaml:12:" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max_step", "3"], "there is no setting --max_step; did you mean 'max_steps'?"),
        (["--model.init_args.wid", "3"], "on the command line: model: there is no 'wid'; did you mean 'wide'?"),
        (["--checkpoints.evry", "3"], "on the command line: checkpoints: there is no 'evry'; did you mean 'every'?"),
        (["--batch_size", "x"], "on the command line: batch_size: this must be int or null, and is x"),
        (["--checkpoints.every", "0"], "checkpoints.every=0 makes no sense"),
    ],
)
def test_a_fault_on_the_command_line_is_named(config, words, message, capsys):
    assert main(["train", "config.yaml", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_is_not_there_is_named(config, capsys):
    assert main(["train", "conf.yaml"]) == 2
    assert "there is no file conf.yaml" in capsys.readouterr().err


def test_a_run_from_a_file_writes_the_config_that_makes_it_again(config):
    changes = ["--model.init_args.wide", "24", "--seed=3", "--validation.every_epochs", "null"]
    assert main(["train", "config.yaml", *changes]) == 0
    first = (config.parent / "run/metrics.csv").read_text().splitlines()
    assert len(first) == 3
    kept = read_config(config.parent / "run/config.yaml").values
    assert kept["model"] == {"class_path": "tests.train.parts.Net", "init_args": {"wide": 24}}
    assert kept["validation"]["every_epochs"] is None

    assert main(["train", "run/config.yaml", "--directory", "again"]) == 0
    second = (config.parent / "again/metrics.csv").read_text().splitlines()
    assert [line.split(",")[:2] for line in second] == [line.split(",")[:2] for line in first]


def test_modules_beside_the_file_are_found(config, tmp_path):
    (tmp_path / "beside_the_file.py").write_text(
        textwrap.dedent("""\
        from tests.train.parts import Net as Other
        class Net(Other):
            pass
        """)
    )
    config.write_text(CONFIG.replace("tests.train.parts.Net", "beside_the_file.Net"))
    assert run_train(["config.yaml", "--mode", "compile"]) == 0
    assert (tmp_path / "run/plan.json").exists()
    assert not (tmp_path / "run/checkpoints").exists()


def test_a_sampler_a_function_and_groups_are_said_in_a_file(config, capsys):
    config.write_text(
        CONFIG.replace("max_steps: 2", "max_epochs: 2")
        + textwrap.dedent("""\
        loader:
          sampler: {class_path: torch.utils.data.RandomSampler, init_args: {replacement: true}}
          collate: torch.utils.data.default_collate
        optimization:
          parameter_groups:
          - {match: "*.bias", weight_decay: 0.0}
        """)
    )
    assert main(["train", "config.yaml", "--checkpoints", "false", "--logging.every", "3"]) == 0
    steps = [line.partition(",")[0] for line in (config.parent / "run/metrics.csv").read_text().splitlines()]
    assert steps == ["step", "1", "3", "4"]  # the first, every third, the last
    assert not (config.parent / "run/checkpoints").exists()


def test_a_path_that_leads_nowhere_is_explained():
    assert find("torch.optim.SGD") is torch.optim.SGD
    with pytest.raises(
        InputError, match=r"'torch.optm.SGD' can't be imported: 'torch' has no 'optm'; did you mean 'optim'"
    ):
        find("torch.optm.SGD")

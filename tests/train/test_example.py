"""examples/train_gpt.yaml, as it stands but small, on two ranks."""

import csv
import sys
from pathlib import Path

import pytest

from shardwright.cli import main
from tests.launched import launch

ROOT = Path(__file__).parents[2]
SMALL = [
    str(ROOT / "examples/train_gpt.yaml"), "--model.init_args.n_layer", "1", "--model.init_args.n_embd", "16",
    "--model.init_args.block_size", "16", "--train_data.init_args.block_size", "16",
    "--val_data.init_args.block_size", "16", "--batch_size", "4", "--max_steps", "4", "--validation.every", "2",
    "--validation.batches", "2", "--logging.every", "1", "--checkpoints.every", "2",
    "--logging.loggers=[shardwright.train.CSVLogger]",
]  # fmt: skip


def numbers(folder, name):
    rows = csv.DictReader((folder / "metrics.csv").read_text().splitlines())
    return {int(row["step"]): float(row[name]) for row in rows if row[name]}


def job(rank, words):
    before = list(sys.path)
    try:
        return main(["train", *words])
    finally:
        sys.path[:] = before


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone") / "run"
    assert job(0, [*SMALL, "--plan", "single", "--directory", str(folder)]) == 0
    return folder


def same(folder, alone):
    for name in ("loss", "val_loss", "lr", "grad_norm"):
        actual, wanted = numbers(folder, name), numbers(alone, name)
        assert actual.keys() == wanted.keys()
        assert all(abs(actual[step] - wanted[step]) < 1e-5 * max(1.0, abs(wanted[step])) for step in wanted), name


@pytest.mark.parametrize("plan", ["auto", "tp=2", "pp=2"])
def test_the_example_trains_on_two_ranks_as_on_one(plan, alone, tmp_path, pools):
    folder = tmp_path / "run"
    words = [*SMALL, "--plan", plan, "--directory", str(folder)]
    assert pools[2].run(job, words) == [0, 0]
    same(folder, alone)
    assert numbers(folder, "tokens_per_second") and numbers(folder, "mfu")
    assert {path.name for path in (folder / "checkpoints").glob("step-*")} == {"step-000002", "step-000004"}


def start(words):
    sys.exit(main(["train", *words]))


def test_the_example_joins_the_ranks_of_torchrun(alone, tmp_path):
    words = [*SMALL, "--plan", "dp=2", "--inputs", "per_replica", "--directory", str(tmp_path / "run")]
    for rank in launch(2, start, words, folder=tmp_path, timeout=200):
        assert rank.code == 0, rank.text
    same(tmp_path / "run", alone)

"""`shardwright checkpoint`: inspect, convert and verify."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

import shardwright as sw
from shardwright.checkpoint import CheckpointFolder, load_weights
from shardwright.cli import main

from .little import little, train
from .runs import make_run, steps


@pytest.fixture
def run(tmp_path):
    net, optimizer = little()
    train(net, optimizer, 1)
    folder = CheckpointFolder(tmp_path / "run")
    for step in (10, 20):
        folder.save(step, net, optimizer, data={"row": 5}, metrics={"loss": 0.25}, extra={"note": "x"})
    return tmp_path / "run", net


def test_inspect_shows_what_there_is(run, capsys):
    path, _ = run
    assert main(["checkpoint", "inspect", str(path)]) == 0  # of a folder, the latest
    shown = capsys.readouterr().out
    for words in (
        "step-000020",
        "by 1 rank",
        "AdamW: 6 at lr 0.05",
        "loss 0.25",
        '{"row": 5}',
        "note",
        torch.__version__,
    ):
        assert words in shown, words
    assert [line for line in shown.splitlines() if "up.weight" in line and "6 4" in line and "float64" in line]
    assert "tied to up.weight" in shown and "exp_avg" not in shown
    assert main(["checkpoint", "inspect", str(path / "step-000010"), "--full"]) == 0
    assert "optimizer/0/up.weight/exp_avg" in capsys.readouterr().out


def planned(rank, folder):
    run = make_run("gpt", "adamw", "pp=2", folder)
    steps(run, "gpt", 1)
    sw.save(f"{folder}/x", run[0], run[1])


def test_inspect_shows_the_plan(pools, tmp_path, capsys):
    pools[2].run(planned, str(tmp_path), timeout=120)
    assert main(["checkpoint", "inspect", str(tmp_path / "x")]) == 0
    shown = capsys.readouterr().out
    assert "pp=2" in shown and "by 2 ranks" in shown
    assert "AdamW: 10 at lr 0.01, 18 at lr 0.02" in shown  # all parameters, not those of the first stage


def test_there_and_back(run, tmp_path, capsys):
    path, net = run
    weights = {key: tensor for key, tensor in net.state_dict().items() if key != "head.weight"}
    assert main(["checkpoint", "convert", str(path), "--to", str(tmp_path / "w.safetensors")]) == 0
    assert "a safetensors file" in capsys.readouterr().out
    tensors = load_file(tmp_path / "w.safetensors")
    assert tensors.keys() == weights.keys() and all(
        torch.equal(tensors[key], weight) for key, weight in weights.items()
    )

    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "config.json").write_text("{}")
    wanted = ["--to", str(tmp_path / "hf"), "--config", str(tmp_path / "from"), "--shard-gb", "3e-7"]
    assert main(["checkpoint", "convert", str(path), *wanted]) == 0
    assert {"config.json", "model.safetensors.index.json"} < {path.name for path in (tmp_path / "hf").iterdir()}
    other, _ = little(1)
    load_weights(tmp_path / "hf", other)
    assert all(torch.equal(other.state_dict()[key], weight) for key, weight in weights.items())

    for source in ("w.safetensors", "hf"):
        assert main(["checkpoint", "convert", str(tmp_path / source), "--to", str(tmp_path / "back")]) == 0
        assert main(["checkpoint", "verify", str(tmp_path / "back")]) == 0
        other, _ = little(1)
        sw.load(tmp_path / "back", other)
        assert all(torch.equal(other.state_dict()[key], tensor) for key, tensor in net.state_dict().items())


def test_convert_to_another_dtype_and_form(run, tmp_path, capsys):
    path, _ = run
    wanted = ["--to", str(tmp_path / "c"), "--form", "checkpoint", "--dtype", "bfloat16"]
    assert main(["checkpoint", "convert", str(path), *wanted]) == 0
    assert main(["checkpoint", "inspect", str(tmp_path / "c")]) == 0
    assert "bfloat16" in capsys.readouterr().out
    assert main(["checkpoint", "convert", str(path), "--to", str(tmp_path / "d"), "--form", "file"]) == 2
    assert "a single file, and only that, is named x.safetensors" in capsys.readouterr().err


def test_verify_says_which_is_damaged(run, capsys):
    path, _ = run
    assert main(["checkpoint", "verify", str(path)]) == 0
    assert capsys.readouterr().out.count("is complete") == 2
    file = path / "step-000010" / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)
    assert main(["checkpoint", "verify", str(path)]) == 1
    shown = capsys.readouterr().out
    assert f"{file} is damaged" in shown and "step-000020 is complete: load that one" in shown
    assert main(["checkpoint", "convert", str(file.parent), "--to", str(path / "x.safetensors")]) == 2
    assert "is damaged" in capsys.readouterr().err


def test_what_is_no_checkpoint_is_said(tmp_path, capsys):
    for action in (["inspect"], ["verify"]):
        assert main(["checkpoint", *action, str(tmp_path)]) == 2
        assert "is neither a checkpoint nor a folder of checkpoints" in capsys.readouterr().err
    assert main(["checkpoint", "convert", str(tmp_path / "no"), "--to", str(tmp_path / "x.safetensors")]) == 2
    assert "does not exist" in capsys.readouterr().err

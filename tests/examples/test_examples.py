"""The examples run on two ranks, and do what they say."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.lightning.modules import quiet

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(rank, name, argv):
    """What main() of an example returns on this rank."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        with quiet(2):
            return importlib.import_module(name).main(argv)
    finally:
        sys.path.remove(str(EXAMPLES))


@pytest.mark.parametrize("plan", ["tp=2", "auto"])
def test_vit(pools, tmp_path, plan):
    argv = ["--plan", plan, "--steps", "3", "--code", str(tmp_path)]
    pairs = pools[2].run(run_example, "vit", argv, timeout=120)[0]
    assert len(pairs) == 3
    assert all(parallel == pytest.approx(alone, rel=1e-5) for parallel, alone in pairs)


def test_convnet(pools, tmp_path):
    argv = ["--plan", "dp=2", "--steps", "3", "--code", str(tmp_path)]
    pairs, apart = pools[2].run(run_example, "convnet", argv, timeout=120)[0]
    assert len(pairs) == 3
    assert all(parallel == pytest.approx(alone, rel=1e-5) for parallel, alone in pairs)
    assert apart < 1e-5


def tuned(pool, folder, plan, *options):
    """The losses of the example, and the weights that it started from and exported."""
    argv = [
        "--plan",
        plan,
        "--steps",
        "6",
        "--seq",
        "32",
        "--out",
        str(folder),
        "--code",
        str(folder / "code"),
        *options,
    ]
    found = (
        pool.run(run_example, "finetune_llama", argv, timeout=120) if pool else [run_example(0, "finetune_llama", argv)]
    )
    losses, said = found[0]
    assert all(others == losses for others, _ in found)
    assert losses[-1] < losses[0] - 0.05
    assert said.startswith("PARADISE LOST") and len(said) == 64
    before, after = (load_file(folder / name / "model.safetensors") for name in ("start", "tuned"))
    assert before.keys() == after.keys()
    return losses, before, after


def test_finetune_llama(pools, tmp_path):
    _, before, after = tuned(pools[2], tmp_path, "zero3=2")
    assert not any(torch.equal(held, after[key]) for key, held in before.items())


def test_finetune_llama_with_adapters(pools, tmp_path):
    """Under a plan they are trained and merged as on one device, and nothing else moves."""
    expected, before, alone = tuned(None, tmp_path / "alone", "single", "--lora", "4")
    moved = {key for key, held in alone.items() if not torch.equal(held, before[key])}
    assert {key.split(".")[-2] for key in moved} == {"q_proj", "v_proj"}
    for plan in ("tp=2", "pp=2"):
        losses, _, after = tuned(pools[2], tmp_path / plan, plan, "--lora", "4")
        assert losses == pytest.approx(expected, rel=1e-5)
        for key, held in alone.items():
            assert torch.allclose(after[key], held, rtol=0, atol=1e-5 if key in moved else 0), key


def test_lightning_gpt_and_its_checkpoint_under_another_plan(pools, tmp_path):
    common = ["--seq", "32", "--out", str(tmp_path / "run"), "--code", str(tmp_path / "code")]
    first = pools[2].run(run_example, "lightning_gpt", ["--plan", "tp=2", "--steps", "5", *common], timeout=120)
    more = ["--plan", "pp=2", "--steps", "10", "--resume", str(tmp_path / "run" / "last.ckpt")]
    second = pools[2].run(run_example, "lightning_gpt", [*more, *common], timeout=120)
    assert first[0] == first[1] and second[0] == second[1]
    assert second[0]["val_loss"] < first[0]["val_loss"]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["torchrun", "--standalone", "--nproc-per-node=2", "train_gpt.py", "--steps=3", "--compare=3"], "parity over"),
        (["python", "lightning_gpt.py", "--devices=2", "--plan=dp=2", "--steps=3"], "after 3 steps: loss"),
    ],
)
def test_a_script_starts_its_processes(tmp_path, command, said):
    program, *rest = command
    words = [str(EXAMPLES / word) if word.endswith(".py") else word for word in rest]
    small = ["--seq", "32", "--batch", "4"]
    found = subprocess.run(
        [Path(sys.executable).parent / program, *words, *small],
        cwd=tmp_path, capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
    assert said in found.stdout

"""The examples run on two ranks, and do what they say."""

import csv
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

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


@pytest.mark.parametrize("policy", ["tensor_parallel", "pipeline", "partial"])
def test_custom_policy(pools, tmp_path, policy):
    argv = ["--policy", policy, "--steps", "3", "--code", str(tmp_path)]
    pairs = pools[2].run(run_example, "custom_policy", argv, timeout=120)[0]
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
    actual = (
        pool.run(run_example, "finetune_llama", argv, timeout=120) if pool else [run_example(0, "finetune_llama", argv)]
    )
    losses, message = actual[0]
    assert all(others == losses for others, _ in actual)
    assert losses[-1] < losses[0] - 0.05
    assert message.startswith("PARADISE LOST") and len(message) == 64
    before, after = (load_file(folder / name / "model.safetensors") for name in ("start", "tuned"))
    assert before.keys() == after.keys()
    return losses, before, after


def test_finetune_llama(pools, tmp_path):
    _, before, after = tuned(pools[2], tmp_path, "zero3=2")
    assert not any(torch.equal(value, after[key]) for key, value in before.items())


def test_finetune_llama_with_adapters(pools, tmp_path):
    """Under a plan they are trained and merged as on one device, and nothing else moves."""
    expected, before, alone = tuned(None, tmp_path / "alone", "single", "--lora", "4")
    moved = {key for key, item in alone.items() if not torch.equal(item, before[key])}
    assert {key.split(".")[-2] for key in moved} == {"q_proj", "v_proj"}
    for plan in ("tp=2", "pp=2"):
        losses, _, after = tuned(pools[2], tmp_path / plan, plan, "--lora", "4")
        assert losses == pytest.approx(expected, rel=1e-5)
        for key, value in alone.items():
            assert torch.allclose(after[key], value, rtol=0, atol=1e-5 if key in moved else 0), key


def test_lightning_gpt_and_its_checkpoint_under_another_plan(pools, tmp_path):
    common = ["--seq", "32", "--out", str(tmp_path / "run"), "--code", str(tmp_path / "code")]
    first = pools[2].run(run_example, "lightning_gpt", ["--plan", "tp=2", "--steps", "5", *common], timeout=120)
    more = ["--plan", "pp=2", "--steps", "10", "--resume", str(tmp_path / "run" / "last.ckpt")]
    second = pools[2].run(run_example, "lightning_gpt", [*more, *common], timeout=120)
    assert first[0] == first[1] and second[0] == second[1]
    assert second[0]["val_loss"] < first[0]["val_loss"]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["torchrun", "--standalone", "--nproc-per-node=2", "train_gpt.py", "--steps=3", "--compare=3"], "parity over"),
        (["python", "lightning_gpt.py", "--devices=2", "--plan=dp=2", "--steps=3"], "after 3 steps: loss"),
    ],
)
def test_a_script_starts_its_processes(tmp_path, command, message):
    program, *rest = command
    words = [str(EXAMPLES / word) if word.endswith(".py") else word for word in rest]
    small = ["--seq", "32", "--batch", "4"]
    results = subprocess.run(
        [Path(sys.executable).parent / program, *words, *small],
        cwd=tmp_path, capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert results.returncode == 0, results.stdout + results.stderr
    assert message in results.stdout


NANOGPT = [
    "--layers", "2", "--heads", "2", "--width", "16", "--block-size", "16", "--batch", "4", "--steps", "6",
    "--warmup", "2", "--decay-steps", "5", "--eval-every", "2", "--eval-batches", "2",
]  # fmt: skip


def test_nanogpt_under_a_plan_and_resumed_under_another(pools, tmp_path):
    def argv(name, *options):
        return [*NANOGPT, "--out", str(tmp_path / name), "--code", str(tmp_path / "code"), *options]

    alone = run_example(0, "nanogpt", argv("alone", "--plan", "single"))
    assert sorted(alone) == list(range(6))
    first = pools[2].run(run_example, "nanogpt", argv("run", "--plan", "dp=2", "--steps", "4"), timeout=200)
    more = pools[2].run(run_example, "nanogpt", argv("run", "--plan", "zero3=2", "--resume"), timeout=200)
    assert [sorted(losses) for losses in (first[0], more[0])] == [[0, 1, 2, 3], [4, 5]]
    for losses in ({**first[0], **more[0]}, {**first[1], **more[1]}):
        assert losses == pytest.approx(alone, rel=1e-5)


def test_the_schedule_of_nanogpt(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    nanogpt = importlib.import_module("nanogpt")
    args = nanogpt.parse(["--lr", "1.0", "--min-lr", "0.1", "--warmup", "4", "--decay-steps", "14"])
    rates = [nanogpt.learning_rate(step, args) for step in (0, 3, 4, 9, 14, 100)]
    assert rates == pytest.approx([0.2, 0.8, 1.0, 0.55, 0.1, 0.1])


def demo(rank, argv):
    """The losses of the Llama demo, by step."""
    trainer = run_example(rank, "llama3_demo", argv)
    rows = list(csv.DictReader((trainer.run.path / "metrics.csv").read_text().splitlines()))
    return {name: [float(row[name]) for row in rows if row[name]] for name in ("loss", "val_loss")}


def test_llama3_demo_on_packed_documents(pools, tmp_path):
    small = ["--steps", "4", "--seq", "64", "--batch", "4", "--log-every", "1", "--warmup", "2"]
    alone = demo(0, [*small, "--plan", "single", "--out", str(tmp_path / "alone")])
    assert len(alone["loss"]) == 4
    assert alone["loss"][-1] < alone["loss"][0]
    for plan in ("zero3=2", "pp=2", "cp=2"):
        options = ["--plan", plan, "--accumulate", "2", "--out", str(tmp_path / plan)]
        losses = pools[2].run(demo, [*small, *options], timeout=200)[0]
        assert losses["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        assert losses["val_loss"] == pytest.approx(alone["val_loss"], rel=1e-5)
    stopped = [*small, "--steps", "2", "--plan", "dp=2", "--out", str(tmp_path / "stopped")]
    pools[2].run(demo, stopped, timeout=200)
    resumed = demo(0, [*small, "--plan", "single", "--resume", "last", "--out", str(tmp_path / "stopped")])
    assert resumed["loss"] == pytest.approx(alone["loss"], rel=1e-5)


def test_llama3_demo_from_a_folder(tmp_path):
    """Weights of a folder are used; those of a config alone are made."""
    config = LlamaConfig(
        vocab_size=65, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "full")
    config.save_pretrained(tmp_path / "config")
    small = ["--plan", "single", "--steps", "1", "--seq", "32", "--batch", "2"]
    losses = [
        demo(0, [*small, "--model", str(tmp_path / name), "--out", str(tmp_path / f"{name}-run")])["loss"]
        for name in ("full", "config")
    ]
    assert losses[0] != losses[1]


def test_llama3_at_128k_has_a_plan_that_fits(capsys):
    plan = run_example(0, "llama3_128k", ["--plan-only", "--cluster", "8xH100"])
    printed = capsys.readouterr().out
    predicted = plan.predicted["train"]
    assert plan.mesh.size == 8
    assert predicted["memory"]["peak"] <= predicted["limit"]
    assert "predicted memory" in printed


@pytest.mark.parametrize(("plan", "ranks"), [("auto", 2), ("cp=2", 2), ("ulysses=2", 2), ("cp=2,tp=2", 4)])
def test_llama3_at_a_long_sequence(pools, tmp_path, plan, ranks):
    small = ["--seq", "512", "--steps", "3", "--layers", "1", "--code", str(tmp_path)]
    alone = run_example(0, "llama3_128k", [*small, "--plan", "single"])
    assert alone[-1] < alone[0]
    for losses in pools[ranks].run(run_example, "llama3_128k", [*small, "--plan", plan], timeout=200):
        assert losses == pytest.approx(alone, rel=1e-5)

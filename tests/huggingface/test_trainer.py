"""`shardwright.huggingface.Trainer`: what transformers.Trainer computes on one device, on two gloo ranks."""

import warnings

import pytest
import torch
import transformers
from transformers import GPT2LMHeadModel

from shardwright.errors import CheckpointError
from shardwright.huggingface import Trainer, empty_model
from tests.huggingface.little import (
    MARKS,
    arguments,
    config,
    in_float64,
    logs_of,
    make,
    model,
    results_of,
    same,
    same_weights,
    samples,
    trained,
)
from tests.parity.conftest import pools

__all__ = ["pools"]

pytestmark = MARKS
PLANS = ["dp=2", "tp=2", "zero3=2", "pp=2"]


# -- parity ------------------------------------------------------------------------------------

EVALUATING = {"eval_strategy": "epoch"}
SAVING = {"save_strategy": "steps", "save_steps": 2}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return trained(transformers.Trainer, tmp_path_factory.mktemp("alone"), model(), **EVALUATING)


def on_plans(rank, plans, folder):
    return {plan: trained(Trainer, f"{folder}/{plan}", model(), plan=plan, **EVALUATING, **SAVING) for plan in plans}


@pytest.fixture(scope="module")
def runs(pools, tmp_path_factory):
    """What both ranks got from a run under each plan, and the folder with the runs."""
    folder = tmp_path_factory.mktemp("plans")
    return pools[2].run(on_plans, PLANS, str(folder), timeout=800), folder


@pytest.mark.parametrize("plan", PLANS)
def test_losses_metrics_predictions_and_weights_are_those_of_one_device(runs, expected, plan):
    assert len(expected["logs"]) == 6  # steps of four, four, four and one row, an evaluation, the end
    for results in runs[0]:
        same(results[plan], expected)


# -- checkpoints -------------------------------------------------------------------------------


def rest_of(results):
    """What a run that was resumed after step 2 has of another's results: its mean loss is of the steps that it made."""
    return {**results, "steps": results["steps"][2:], "logs": results["logs"][:-1]}


def resumed(folder, original, resume, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = make(Trainer, folder, original, **EVALUATING, **settings)
        trainer.train(resume_from_checkpoint=resume)
        results = results_of(trainer)
    return trainer, {**results, "logs": results["logs"][:-1]}


def resume_and_export(rank, folder):
    """Resumes a run of zero3 under another plan, from weights on meta, and exports."""
    empty = in_float64(empty_model(config(), dtype=torch.float64))
    trainer, results = resumed(folder, empty, True, plan="tp=2")
    trainer.save_model(f"{folder}/exported")
    return results, trainer.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=4, do_sample=False)


def test_a_checkpoint_resumes_under_another_plan_and_is_exported(runs, expected, pools):
    folder, wanted = runs[1] / "zero3=2", rest_of(expected)
    (folder / "checkpoint-4" / "trainer_state.json").unlink()  # of a run that was killed while it saved
    for results, tokens in pools[2].run(resume_and_export, str(folder), timeout=800):
        same(results, wanted)
        exported = GPT2LMHeadModel.from_pretrained(folder / "exported", dtype=torch.float64)
        assert torch.equal(exported.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=4, do_sample=False), tokens)
        same_weights(exported.state_dict(), results["weights"])
    same(resumed(folder, model(), str(folder / "checkpoint-2"), plan="single")[1], wanted)


def with_dropout(rank, folder):
    undisturbed = trained(Trainer, folder, model(0.1), plan="dp=2", **EVALUATING, **SAVING)
    return undisturbed, resumed(folder, model(0.1), f"{folder}/checkpoint-2", plan="dp=2")[1]


def test_a_resumed_run_draws_the_dropout_of_the_undisturbed_one(pools, tmp_path):
    for undisturbed, results in pools[2].run(with_dropout, str(tmp_path), timeout=800):
        same(results, rest_of(undisturbed), tolerance=1e-12)


def best_and_last(rank, folder):
    """Evaluates at every step and keeps the best, which is not the last with this learning rate."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = make(
            Trainer, folder, model(), plan="tp=2", eval_strategy="steps", eval_steps=1, save_strategy="steps",
            save_steps=1, save_total_limit=1, load_best_model_at_end=True, metric_for_best_model="largest",
            greater_is_better=False, learning_rate=0.5,
        )  # fmt: skip
        trainer.train()
        return trainer.state.best_model_checkpoint, trainer.evaluate()["eval_largest"], logs_of(trainer)


def test_the_best_model_is_loaded_at_the_end(pools, tmp_path):
    for best, value, logs in pools[2].run(best_and_last, str(tmp_path), timeout=800):
        values = [entry["eval_largest"] for entry in logs if "eval_largest" in entry][:4]
        assert values.index(min(values)) == 0  # or this shows nothing
        assert value == pytest.approx(values[0], rel=1e-10)
        assert best == str(tmp_path / "checkpoint-1")
        assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]


def evaluated(rank, folder):
    """Without training data: losses and predictions of samples with and without labels."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(model(), arguments(folder), eval_dataset=samples(4), plan="tp=2")
        unlabelled = [{name: row[name] for name in ("input_ids", "attention_mask")} for row in samples(4)]
        return trainer.evaluate()["eval_loss"], torch.from_numpy(trainer.predict(unlabelled).predictions)


def test_a_model_is_evaluated_without_training_data(pools, tmp_path):
    alone = transformers.Trainer(model(), arguments(tmp_path), eval_dataset=samples(4))
    loss, logits = alone.evaluate()["eval_loss"], alone.predict(samples(4)).predictions
    for ours, predictions in pools[2].run(evaluated, str(tmp_path), timeout=800):
        assert ours == pytest.approx(loss, rel=1e-10)
        assert (predictions - torch.from_numpy(logits)).abs().max() <= 1e-10


def test_a_folder_that_is_no_checkpoint_of_ours_is_refused(tmp_path):
    trainer = make(Trainer, tmp_path, model(), plan="single")
    with pytest.raises(CheckpointError, match="there is no complete checkpoint"):
        trainer.train(resume_from_checkpoint=True)
    (tmp_path / "checkpoint-1").mkdir()
    with pytest.raises(CheckpointError, match=r"not a checkpoint of shardwright\.huggingface\.Trainer"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    (tmp_path / "checkpoint-1" / "shardwright").mkdir()
    with pytest.raises(CheckpointError, match="was not written to its end"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))

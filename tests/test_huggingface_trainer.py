"""`shardwright.huggingface.Trainer`: what transformers.Trainer computes on one device, on two gloo ranks."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from torch.utils.data import IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments, default_data_collator

from shardwright.errors import CheckpointError, InputError
from shardwright.huggingface import Trainer, empty_model
from tests.parity.conftest import pools

__all__ = ["pools"]

pytestmark = [pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]  # of transformers and peft
PLANS = ["dp=2", "tp=2", "zero3=2", "pp=2"]
LENGTH = 8


def config(dropout=0.0):
    return GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=4, bos_token_id=1, eos_token_id=1, pad_token_id=0,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=0.0,
    )  # fmt: skip


def loss_in_full_precision(logits, labels, vocab_size, num_items_in_batch=None, **_):
    """That of transformers, which casts logits to float32."""
    logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    total = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    return total / (labels != -100).sum() if num_items_in_batch is None else total / num_items_in_batch


def model(dropout=0.0):
    torch.manual_seed(0)
    return in_float64(GPT2LMHeadModel(config(dropout)))


def in_float64(original):
    original.loss_function = loss_in_full_precision
    return original.double()


def samples(count=13):
    """Rows with padding of different lengths, so that labels are spread unevenly over ranks."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for number in range(count):
        ids = torch.randint(2, 64, (LENGTH,), generator=generator)
        mask = torch.arange(LENGTH) < 4 + number % 5
        labels = ids.masked_fill(~mask, -100)
        rows.append({"input_ids": ids.masked_fill(~mask, 0), "attention_mask": mask.long(), "labels": labels})
    return rows


def with_noise(rows):
    """A collator that draws random numbers, as those do that mask tokens."""
    batch = default_data_collator(rows)
    drawn = torch.rand(batch["input_ids"].shape) < 0.2
    return {**batch, "input_ids": batch["input_ids"].masked_fill(drawn, 2)}


def arguments(folder, **options):
    settings = {
        "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "gradient_accumulation_steps": 2,
        "num_train_epochs": 1, "learning_rate": 0.01, "warmup_steps": 1, "max_grad_norm": 0.5, "logging_steps": 1,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True,
        "dataloader_pin_memory": False,
    }  # fmt: skip
    return TrainingArguments(output_dir=str(folder), **(settings | options))


class Steps(TrainerCallback):
    """The steps and learning rates that callbacks see."""

    def __init__(self):
        self.steps = []

    def on_step_end(self, args, state, control, lr_scheduler, **kwargs):
        self.steps.append((state.global_step, lr_scheduler.get_last_lr()))


def largest(prediction):
    return {"largest": float(prediction.predictions[prediction.label_ids >= 0].max())}


def make(kind, folder, original, *, options=None, **settings):
    """A Trainer, of transformers or ours."""
    own = {name: settings.pop(name) for name in ("plan", "weights", "data_collator") if name in settings}
    if kind is Trainer:
        own["options"] = {"compile": {"directory": f"{folder}/generated"}, **(options or {})}
    return kind(
        original, arguments(folder, **settings), train_dataset=samples(), eval_dataset=samples(4),
        compute_metrics=largest, callbacks=[Steps()], **own,
    )  # fmt: skip


def logs_of(trainer):
    kept = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_largest", "total_flos")
    return [{name: entry[name] for name in kept if name in entry} for entry in trainer.state.log_history]


def results_of(trainer):
    """Logs, predictions, steps as callbacks have seen them, and weights."""
    steps = next(callback.steps for callback in trainer.callback_handler.callbacks if isinstance(callback, Steps))
    compiled = hasattr(trainer.model, "full_state_dict")
    return {
        "logs": logs_of(trainer), "steps": steps,
        "predictions": torch.from_numpy(trainer.predict(samples(4)).predictions),
        "weights": trainer.model.full_state_dict() if compiled else trainer.model.state_dict(),
    }  # fmt: skip


def same(results, expected, tolerance=1e-10):
    same_logs(results["logs"], expected["logs"], tolerance)
    assert results["steps"] == expected["steps"]
    assert (results["predictions"] - expected["predictions"]).abs().max() <= tolerance * 10
    same_weights(results["weights"], expected["weights"], tolerance)


def same_logs(logs, expected, tolerance=1e-10):
    """Losses to the tolerance of float32, in which transformers adds them up, also those of a model in float64."""
    for entry, wanted in zip(logs, expected, strict=True):
        assert entry.keys() == wanted.keys()
        for name, value in wanted.items():
            assert entry[name] == pytest.approx(value, rel=1e-5 if "loss" in name else tolerance), name


def same_weights(values, expected, tolerance=1e-10):
    assert values.keys() == expected.keys()
    for key, value in expected.items():
        assert (values[key] - value).abs().max() <= tolerance * value.abs().max(), key


def trained(kind, folder, original, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = make(kind, folder, original, **settings)
        trainer.train()
        return results_of(trainer)


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


# -- adapters ----------------------------------------------------------------------------------


def adapters(kind="lora"):
    torch.manual_seed(0)
    settings = {"fan_in_fan_out": True, "target_modules": ["c_attn", "c_fc"], "init_lora_weights": False}
    if kind == "prompt":
        return get_peft_model(model(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)).double()
    return get_peft_model(model(), LoraConfig(r=4, lora_alpha=8, **settings))


SMOOTHED = {"label_smoothing_factor": 0.1, "data_collator": with_noise}
"""Labels are shifted for it, since the model is causal: the Trainer asks for its class. The collator draws numbers."""


def train_adapters(rank, plans, folder):
    results = {}
    for plan in plans:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = make(Trainer, f"{folder}/{plan}", adapters(), plan=plan, **SMOOTHED)
            trainer.train()
            trainer.save_model(f"{folder}/{plan}/adapters")
            merged = trainer.full_model().merge_and_unload().state_dict()
            results[plan] = results_of(trainer), merged
    return results


def test_adapters_of_peft_are_trained_saved_and_merged_as_on_one_device(pools, tmp_path):
    plans = ["dp=2", "tp=2", "zero3=2"]
    alone = make(transformers.Trainer, tmp_path / "one", adapters(), **SMOOTHED)
    alone.train()
    expected = results_of(alone)
    merged = copy.deepcopy(alone.model).merge_and_unload().state_dict()
    for results in pools[2].run(train_adapters, plans, str(tmp_path), timeout=800):
        for plan in plans:
            same(results[plan][0], expected)
            same_weights(results[plan][1], merged)
    for plan in plans:
        loaded = PeftModel.from_pretrained(model(), tmp_path / plan / "adapters").merge_and_unload()
        same_weights(loaded.state_dict(), merged)
        assert not (tmp_path / plan / "adapters" / "model.safetensors").exists()


# -- refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"activation_checkpointing": True}, "activation_checkpointing=True: add recompute to the plan"),
        ({"torch_compile": True}, "torch_compile=True: the model is compiled already"),
        ({"neftune_noise_alpha": 0.1}, "neftune_noise_alpha"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"bf16_full_eval": True}, "use bf16=True"),
        ({"optim": "galore_adamw"}, r"optim=.*use one of torch\.optim"),
        ({"save_on_each_node": True}, "save_on_each_node=True: ranks write one checkpoint together"),
        ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches=True: every rank loads the batch"),
        ({"options": {"inputs": "per_replica", "accumulate": 2}}, r"options\['inputs'\](.|\n)*options\['accumulate'\]"),
        ({"push_to_hub": True}, 'use hub_strategy="end"'),
    ],
)
def test_arguments_that_cannot_be_followed_are_refused_by_name(tmp_path, settings, message):
    with pytest.raises(InputError, match=message):
        make(Trainer, tmp_path, model(), plan="single", **settings)


@pytest.mark.parametrize(("name", "remedy"), [("deepspeed", "zero3=N"), ("fsdp", "zero3=N")])
def test_other_backends_are_refused_by_name(tmp_path, name, remedy):
    args = arguments(tmp_path)
    setattr(args, name, {"zero_optimization": {"stage": 3}})  # what their packages would have been needed for
    with pytest.raises(InputError, match=f"{name}=.*{remedy}"):
        Trainer(model(), args, train_dataset=samples(), plan="single")


class Stream(IterableDataset):
    """Samples that can be read again, or only once."""

    def __init__(self, once):
        self.rows = iter(samples(8)) if once else samples(8)

    def __iter__(self):
        return self if isinstance(self.rows, type(iter([]))) else iter(self.rows)

    def __next__(self):
        return next(self.rows)


def stream(rank, kind, folder, once, example=None):
    own = {} if kind is transformers.Trainer else {"plan": "dp=2" if rank >= 0 else "single", "example": example}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = kind(model(), arguments(folder, max_steps=2), train_dataset=Stream(once), **own)
        trainer.train()
    return logs_of(trainer)


def test_an_iterable_dataset_is_read_by_every_rank_from_its_beginning(pools, tmp_path):
    expected = stream(-1, transformers.Trainer, tmp_path, once=False)
    for logs in pools[2].run(stream, Trainer, str(tmp_path), False, timeout=800):
        same_logs(logs, expected)


def test_one_that_can_be_read_once_needs_an_example(tmp_path):
    with pytest.raises(InputError, match=r"can be read only once.*pass example= to the Trainer"):
        stream(-1, Trainer, tmp_path, once=True)
    batch = default_data_collator(samples(2))
    same_logs(stream(-1, Trainer, tmp_path, True, example=batch), stream(-1, transformers.Trainer, tmp_path, once=True))

"""`shardwright.huggingface.Trainer`: what transformers.Trainer computes on one device, on two gloo ranks."""

import os
import warnings

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

from shardwright.errors import CheckpointError, InputError
from shardwright.huggingface import Trainer, empty_model
from tests.runtime.ranks import run_processes

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, pad_token_id=0, attention_dropout=0.0,
)  # fmt: skip
pytestmark = pytest.mark.timeout(900)
PLANS = ["dp=2", "tp=2", "zero3=2", "pp=2", "auto"]


def samples(count=14):
    """Rows with padding of different lengths, so that labels are spread unevenly over ranks."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for number in range(count):
        ids = torch.randint(1, 64, (8,), generator=generator)
        mask = torch.arange(8) < 4 + number % 5
        rows.append(
            {
                "input_ids": ids.masked_fill(~mask, 0),
                "attention_mask": mask.long(),
                "labels": ids.masked_fill(~mask, -100),
            }
        )
    return rows


def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG).double()


def arguments(folder, **options):
    settings = {
        "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "gradient_accumulation_steps": 2,
        "num_train_epochs": 1, "learning_rate": 0.01, "warmup_steps": 1, "max_grad_norm": 0.5, "logging_steps": 1,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True,
        "dataloader_pin_memory": False,
    }  # fmt: skip
    return TrainingArguments(output_dir=str(folder), **(settings | options))


class Quiet(TrainerCallback):
    """Counts steps, and stops at one of them."""

    def __init__(self, stop=None):
        self.stop, self.steps = stop, 0

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1
        control.should_training_stop = self.steps == self.stop


def logs_of(trainer):
    kept = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy")
    return [{name: entry[name] for name in kept if name in entry} for entry in trainer.state.log_history]


def accuracy(prediction):
    guesses = prediction.predictions.argmax(-1)[:, :-1]
    return {"accuracy": float((guesses == prediction.label_ids[:, 1:]).mean())}


def one_device(folder, kind=transformers.Trainer, original=None, **options):
    trainer = kind(
        original or model(), arguments(folder, **options), train_dataset=samples(), eval_dataset=samples(4),
        compute_metrics=accuracy,
    )  # fmt: skip
    trainer.train()
    return logs_of(trainer), trainer.model.state_dict()


def many(folder, plan, original=None, stop=None, resume=None, weights=None, **options):
    trainer = Trainer(
        original or model(), arguments(folder, **options), train_dataset=samples(), eval_dataset=samples(4),
        compute_metrics=accuracy, callbacks=[Quiet(stop)], plan=plan, weights=weights,
        options={"compile": {"directory": f"{folder}/generated"}},
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def same(found, expected, tolerance=1e-10):
    """Losses to the tolerance of float32, in which transformers adds them up, also those of a model in float64."""
    for entry, wanted in zip(found[0], expected[0], strict=True):
        assert entry.keys() == wanted.keys()
        for name, value in wanted.items():
            assert entry[name] == pytest.approx(value, rel=1e-5 if "loss" in name else tolerance), name
    for key, value in expected[1].items():
        assert (found[1][key] - value).abs().max() <= tolerance * value.abs().max(), key


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return one_device(tmp_path_factory.mktemp("one"), eval_strategy="epoch")


def without_evaluation(expected):
    return [entry for entry in expected[0] if "eval_loss" not in entry], expected[1]


def on_rank(rank, plans, folder):
    warnings.simplefilter("ignore")
    results = {}
    for plan in plans:
        trainer = many(f"{folder}/{plan}", plan, eval_strategy="epoch" if plan == "tp=2" else "no")
        results[plan] = logs_of(trainer), trainer.model.full_state_dict()
    return results


def test_losses_metrics_and_weights_are_those_of_one_device(expected, tmp_path):
    assert len(expected[0]) == 6  # four steps of four and two rows, an evaluation, the end
    for results in run_processes(2, on_rank, PLANS, str(tmp_path), timeout=800):
        for plan in PLANS:
            same(results[plan], expected if plan == "tp=2" else without_evaluation(expected))


def save_and_resume(rank, folder):
    """Saves in the middle of an epoch under one plan, resumes under another from weights on meta, and exports."""
    warnings.simplefilter("ignore")
    many(folder, "zero3=2", stop=2, save_strategy="steps", save_steps=2)
    os.makedirs(f"{folder}/checkpoint-3", exist_ok=True)  # of a run that was killed while it saved
    resumed = many(folder, "tp=2", original=empty_model(CONFIG, dtype=torch.float64), resume=True)
    resumed.save_model(f"{folder}/exported")
    tokens = resumed.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False)
    return logs_of(resumed), resumed.model.full_state_dict(), tokens


def test_a_checkpoint_is_resumed_under_another_plan_on_another_number_of_ranks_and_exported(expected, tmp_path):
    wanted = without_evaluation(expected)
    wanted[0].pop()  # the mean loss, which a resumed run has of its own steps
    for logs, state, tokens in run_processes(2, save_and_resume, str(tmp_path), timeout=800):
        same((logs[:-1], state), wanted)
        exported = LlamaForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float64)
        assert torch.equal(exported.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False), tokens)
        same((logs[:-1], exported.state_dict()), wanted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = many(tmp_path, "single", resume=str(tmp_path / "checkpoint-2"))
    same((logs_of(alone)[:-1], alone.model.full_state_dict()), wanted)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation_checkpointing": True}, "activation_checkpointing=True: add recompute to the plan"),
        ({"torch_compile": True}, "torch_compile=True: the model is compiled already"),
        ({"neftune_noise_alpha": 0.1}, "neftune_noise_alpha"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"bf16_full_eval": True}, "use bf16=True"),
        ({"optim": "galore_adamw"}, "optim=.*use one of torch.optim"),
    ],
)
def test_arguments_that_cannot_be_followed_are_refused_by_name(tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        Trainer(model(), arguments(tmp_path, **options), train_dataset=samples(), plan="single")


@pytest.mark.parametrize(("name", "remedy"), [("deepspeed", "zero3=N"), ("fsdp", "zero3=N")])
def test_other_backends_are_refused_by_name(tmp_path, name, remedy):
    args = arguments(tmp_path)
    setattr(args, name, {"zero_optimization": {"stage": 3}})  # what their packages would have been needed for
    with pytest.raises(InputError, match=f"{name}=.*{remedy}"):
        Trainer(model(), args, train_dataset=samples(), plan="single")


def test_a_folder_that_is_no_checkpoint_of_ours_is_refused(tmp_path):
    trainer = Trainer(model(), arguments(tmp_path), train_dataset=samples(), plan="single")
    with pytest.raises(CheckpointError, match="there is no complete checkpoint"):
        trainer.train(resume_from_checkpoint=True)


def adapters():
    torch.manual_seed(0)
    kind = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(model(), kind)


def train_adapters(rank, plans, folder):
    warnings.simplefilter("ignore")
    results = {}
    for plan in plans:
        trainer = many(f"{folder}/{plan}", plan, original=adapters())
        trainer.save_model(f"{folder}/{plan}/adapters")
        results[plan] = logs_of(trainer), trainer.model.full_state_dict(), trainer.full_model().merge_and_unload()
    return results


def test_adapters_of_peft_are_trained_saved_and_merged_as_on_one_device(tmp_path):
    plans = ["dp=2", "tp=2", "zero3=2"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = one_device(tmp_path / "one", original=adapters())
        for results in run_processes(2, train_adapters, plans, str(tmp_path), timeout=800):
            for plan in plans:
                same(results[plan][:2], expected)
                saved = PeftModel.from_pretrained(model(), tmp_path / plan / "adapters").merge_and_unload()
                same((expected[0], saved.state_dict()), (expected[0], results[plan][2].state_dict()))
        assert {path.name for path in (tmp_path / "tp=2/adapters").iterdir()} >= {"adapter_model.safetensors"}

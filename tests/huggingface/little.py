"""A little GPT-2 in float64 and runs of it, with the Trainer of transformers and with ours."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments, default_data_collator

from shardwright.huggingface import Trainer

MARKS = [pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]  # those of transformers, accelerate and peft
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

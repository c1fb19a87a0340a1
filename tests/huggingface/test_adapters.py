"""Adapters of PEFT: trained, saved and merged as on one device."""

import copy
import warnings

import torch
import transformers
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file

from shardwright.huggingface import Trainer
from tests.huggingface.little import MARKS, make, model, results_of, same, same_weights, with_noise
from tests.parity.conftest import pools

__all__ = ["pools"]

pytestmark = MARKS


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
    plans = ["dp=2", "tp=2", "zero3=2", "pp=2"]
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


def test_prompts_are_saved_as_peft_computes_them(tmp_path):
    values = []
    for kind, own in ((transformers.Trainer, {}), (Trainer, {"plan": "single"})):
        folder = tmp_path / kind.__name__
        trainer = make(kind, folder, adapters("prompt"), max_steps=1, **own)
        trainer.train()
        trainer.save_model(str(folder))
        values.append(load_file(folder / "adapter_model.safetensors"))
    same_weights(values[1], values[0])

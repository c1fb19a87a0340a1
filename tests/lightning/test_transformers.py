"""A model of transformers inside of a LightningModule, made empty and filled shard by shard."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from .jobs import tune


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)
    return str(directory)


@pytest.mark.parametrize("plan", ["zero3=2", "tp=2"])
def test_fit_predict_and_fit_again(pools, folder, plan):
    loss, message, later = tune(0, "", folder, 1)
    for mine, words, after in pools[2].run(tune, plan, folder, 2, timeout=120):
        assert mine == pytest.approx(loss, rel=1e-5)
        assert torch.equal(words, message)
        assert after == pytest.approx(later, rel=1e-4)

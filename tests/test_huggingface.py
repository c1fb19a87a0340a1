"""Models of transformers: made without values, filled shard by shard, trained with labels and masks."""

import gc

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import shardwright as sw
from shardwright.checkpoint import load_weights
from shardwright.huggingface import empty_model
from tests.parity.conftest import pools

__all__ = ["pools"]

IDS = torch.randint(96, (4, 12), generator=torch.Generator().manual_seed(0))
MASK = torch.arange(12) < torch.tensor([[12], [7], [9], [3]])
BATCH = {"input_ids": IDS, "attention_mask": MASK.long(), "labels": IDS.masked_fill(~MASK, -100)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=160, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory / "model")
    return directory


def steps(model, optimizer):
    losses = []
    for _ in range(2):
        loss = model(**BATCH).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def most(events):
    """The largest sum of bytes that was held at a time, beyond what there was at the beginning."""
    stored = highest = 0
    for _, change in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        stored += change
        highest = max(highest, stored)
    return highest


def fill(rank, plan, folder):
    """How much memory a rank takes to make and fill its part of a model, and how the model then trains."""
    gc.collect()  # what is let go of in between would count as room that was there before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        model = empty_model(f"{folder}/model")
        assert all(parameter.is_meta for parameter in model.parameters())
        assert not any(buffer.is_meta for buffer in model.buffers())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer = sw.parallelize(
            model, optimizer, plan=plan, example=BATCH, compile={"directory": f"{folder}/generated"}
        )
        load_weights(f"{folder}/model", model)
    return most(seen.profiler.kineto_results.events()), steps(model, optimizer)


@pytest.mark.parametrize("plan", ["zero3=2", "tp=2", "pp=2"])
def test_no_rank_ever_holds_the_whole_model(pools, folder, plan):
    whole = AutoModelForCausalLM.from_pretrained(folder / "model")
    size = sum(parameter.nbytes for parameter in whole.parameters())
    expected = steps(whole.train(), torch.optim.AdamW(whole.parameters(), lr=0.01))
    for peak, losses in pools[2].run(fill, plan, str(folder), timeout=120):
        assert 0.4 * size < peak < 0.7 * size
        assert losses == pytest.approx(expected, rel=1e-5)

"""Context parallelism: the sequence is split through the whole model, and attention goes over all of it.

Every model under every algorithm, ranks as threads; `test_gloo.py` has some of it on processes.
"""

import copy
import functools
import math
import re

import pytest
import torch
import transformers
from torch import nn

import shardwright as sw
from shardwright.errors import PlanError
from shardwright.verify.ranks import run_threads
from tests.models.transformer import Transformer, TransformerConfig
from tests.verified import referred, verified

WORDS, BATCH, LENGTH = 64, 4, 12
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
ALGORITHMS = ("cp", "cp_all_gather", "ulysses")
MIXED = (
    "cp=2,dp=2", "cp=2,tp=2", "cp=2,sp=2", "ulysses=2,tp=2", "cp_all_gather=2,zero3=2", "pp=2,cp=2", "pp=2,ulysses=2"
)  # fmt: skip


def planned(model_and_example, plan: str):
    model, example = model_and_example
    return sw.plan(model, example=example, plan=plan, cluster=math.prod(map(int, re.findall("=([0-9]+)", plan))))


def tokens(length: int = LENGTH) -> torch.Tensor:
    return torch.randint(0, WORDS, (BATCH, length), generator=torch.Generator().manual_seed(1))


def causal(kind: type, config: type, length: int = LENGTH, **options):
    model = kind(config(vocab_size=WORDS, **SIZES, num_key_value_heads=2, use_cache=False, **options))
    return model, {"input_ids": tokens(length), "labels": tokens(length)}


def gpt(length: int = LENGTH, **options):
    model = Transformer(TransformerConfig(vocab=WORDS, seq=length, d=32, **options))
    return model, (tokens(length), tokens(length))


def bert():
    config = transformers.BertConfig(
        vocab_size=WORDS, **SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    padding = (torch.arange(LENGTH) < torch.tensor([[12], [7], [3], [1]])).long()
    return transformers.BertForMaskedLM(config), {
        "input_ids": tokens(), "labels": tokens(), "attention_mask": padding
    }  # fmt: skip


def t5():
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=32, d_ff=48, num_layers=2, num_heads=4, d_kv=8, dropout_rate=0.0,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config), {"input_ids": tokens(), "labels": tokens(8)}


MODELS = {
    "gpt": gpt,
    "llama": lambda: causal(transformers.LlamaForCausalLM, transformers.LlamaConfig),
    "mistral": lambda: causal(transformers.MistralForCausalLM, transformers.MistralConfig, sliding_window=5),
    "bert": bert,
    "t5": t5,
}


@functools.cache
def reference(name: str):
    torch.manual_seed(0)
    return referred(*MODELS[name]())


@pytest.mark.parametrize("plan", [f"{algorithm}=2" for algorithm in ALGORITHMS] + ["cp=4", "ulysses=4"])
@pytest.mark.parametrize("model", MODELS)
def test_trains_as_on_one_device(model, plan):
    verified(reference(model), plan).raise_on_failure()


@pytest.mark.parametrize("plan", MIXED)
@pytest.mark.parametrize("model", ["llama", "mistral"])
def test_mixed_with_other_parallelism(model, plan):
    verified(reference(model), plan).raise_on_failure()


@pytest.mark.parametrize("plan", ["cp=2", "cp_all_gather=2", "ulysses=2"])
def test_dropout_draws_the_masks_of_one_device(plan):
    torch.manual_seed(0)
    model, example = gpt(dropout=0.2)
    sw.verify(model, plan, example=example, method="threads").raise_on_failure()


@pytest.mark.parametrize("plan", ["cp=2", "cp=3", "cp_all_gather=2", "ulysses=2", "cp=4"])
def test_lengths_that_do_not_divide(plan):
    torch.manual_seed(0)
    for model, example in (gpt(length=13), causal(transformers.LlamaForCausalLM, transformers.LlamaConfig, 13)):
        sw.verify(model, plan, example=example, method="threads", steps=1).raise_on_failure()


def test_sequences_of_causal_attention_are_striped():
    plan = planned(MODELS["llama"](), plan="cp=2")
    roles = {choice.get("cp") for choice in plan.stages[0].choices.values()} - {None}
    assert roles
    assert all(role.startswith("striped:") for role in roles if not role.startswith(("partial:", "fan")))


def test_a_window_needs_no_stripes_and_neither_do_bidirectional_models():
    for name in ("mistral", "bert"):
        plan = planned(MODELS[name](), plan="cp=2")
        roles = {choice.get("cp") for choice in plan.stages[0].choices.values()} - {None}
        assert roles
        assert not any(role.startswith("striped:") for role in roles)


def test_a_length_that_does_not_divide_is_a_note():
    plan = planned(gpt(length=13), plan="cp=2")
    assert any("does not divide by cp=2" in note for note in plan.notes)


def test_a_sequence_shorter_than_the_axis_is_refused():
    with pytest.raises(PlanError, match="4 places or more"):
        planned(gpt(length=3), plan="cp=4")


def test_a_model_without_a_sequence_is_refused():
    with pytest.raises(PlanError, match="cp=2 splits the sequence"):
        sw.plan(nn.Linear(4, 4), example=(torch.randn(4, 4),), plan="cp=2", cluster=2)


def test_a_ring_over_nodes_is_noted_and_priced():
    model, example = MODELS["llama"]()
    plan = sw.plan(model, example=example, plan="cp=4", cluster="2x2xH100")
    assert any("around cp=4, which spans 2 nodes" in note for note in plan.notes)
    inside = sw.plan(model, example=example, plan="cp=4", cluster="4xH100")
    assert not any("which spans" in note for note in inside.notes)
    assert plan.predicted["train"]["seconds"] > inside.predicted["train"]["seconds"]


def test_evaluation_with_another_length_keeps_the_plan():
    torch.manual_seed(0)
    original, (x, y) = gpt()
    expected = [original(x[:, :n], y[:, :n]).item() for n in (12, 7, 1)]

    def work(rank):
        model = copy.deepcopy(original)
        compiled, _ = sw.parallelize(model, torch.optim.SGD(model.parameters()), example=(x, y), plan="cp=2")
        with torch.no_grad():
            return [compiled(x[:, :n], y[:, :n]).item() for n in (12, 7, 1)]

    for losses in run_threads(2, work):
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)


def _passed(mode, rank, ranks, x):
    """What a rank passes of the global batch; with 4 ranks, two of them share a replica."""
    if mode == "per_rank":
        return x.chunk(ranks)[rank]
    return x.chunk(2)[rank // 2]


@pytest.mark.parametrize(
    ("plan", "ranks", "mode"),
    [("cp=2", 2, "per_rank"), ("cp=2,dp=2", 4, "per_replica"), ("ulysses=2,dp=2", 4, "per_rank")],
)
def test_ranks_that_pass_their_own_samples(plan, ranks, mode):
    torch.manual_seed(0)
    original, batch = gpt()
    expected = original.double()(*batch).item()

    def work(rank):
        model = copy.deepcopy(original)
        own = tuple(_passed(mode, rank, ranks, x) for x in batch)
        optimizer = torch.optim.SGD(model.parameters())
        compiled, _ = sw.parallelize(model, optimizer, example=own, plan=plan, inputs=mode)
        return compiled(*own).item()

    for loss in run_threads(ranks, work):
        assert loss == pytest.approx(expected, rel=1e-12)

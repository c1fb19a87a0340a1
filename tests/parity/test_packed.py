"""Packed documents train as the documents one by one: loss sums and gradients, under every kind of plan."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, LlamaConfig, MistralConfig
from transformers.models.auto import AutoConfig, AutoModelForCausalLM

from shardwright.capture import capture, run
from shardwright.data import PackedDocuments, Packing, loader
from shardwright.errors import CaptureError
from tests.models.packed_gpt import PackedGPT
from tests.verified import referred, verified

from . import single
from .threaded import apart, assert_close, ranks_of

LENGTH, VOCABULARY = PackedGPT.length, PackedGPT.vocabulary
PLANS = [
    "dp=2", "tp=2", "sp=2", "zero3=2", "pp=2", "dp=2,tp=2", "cp=2", "cp_all_gather=2", "ulysses=2", "cp=2,tp=2",
    "cp=2,pp=2", "zero3=2,cp=2",
]  # fmt: skip
PROCESSES = {"dp=2": 2, "cp=2": 2, "cp_all_gather=2": 2, "ulysses=2": 2, "cp=2,tp=2": 4, "zero3=2,cp=2": 4}
LIMIT = 200.0  # seconds for one model under one plan, on a busy machine
Gradients = dict[str, Tensor]


def documents() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    lengths = (5, 12, 2, 7, 3, 9, 4, 12, 6, 5, 2)
    return [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def packed(count: int, *, shift_labels: bool) -> dict[str, Tensor]:
    packing = Packing(length=LENGTH, shift_labels=shift_labels, vocab_size=VOCABULARY)
    (batch,) = loader(PackedDocuments(documents(), packing, shuffle=True, seed=2), count)
    assert isinstance(batch, dict)
    assert bool((batch["document_ids"].amax(1) > 0).any())
    return batch


def alone(document: list[int], *, shift_labels: bool) -> dict[str, Tensor]:
    """A batch of one document: nothing of packing in it."""
    ids = torch.tensor([document])
    labels = torch.cat([ids[:, 1:], torch.tensor([[-100]])], 1) if shift_labels else ids
    return {
        "input_ids": ids, "labels": labels, "position_ids": torch.arange(len(document))[None],
        "document_ids": torch.zeros_like(ids),
    }  # fmt: skip


def mean_of(parts: Iterable[tuple[Tensor, Gradients, int]]) -> tuple[Tensor, Gradients]:
    """The loss over all labels and its gradients, from the means of each document and their labels."""
    loss, gradients, total = torch.zeros((), dtype=torch.float64), dict[str, Tensor](), 0
    for mean, derivatives, count in parts:
        loss, total = loss + mean.detach() * count, total + count
        for key, gradient in derivatives.items():
            gradients[key] = gradients.get(key, torch.zeros_like(gradient)) + gradient * count
    return loss / total, {key: gradient / total for key, gradient in gradients.items()}


def step(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Gradients]:
    model = copy.deepcopy(model)
    loss = model(**batch)
    loss.backward()
    return loss.detach(), {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module")
def one_by_one() -> tuple[PackedGPT, Tensor, Gradients]:
    torch.manual_seed(0)
    model = PackedGPT().double()
    batches = [alone(document, shift_labels=True) for document in documents()]
    loss, gradients = mean_of((*step(model, batch), batch["input_ids"].shape[1] - 1) for batch in batches)
    return model, loss, gradients


def test_a_mask_that_crosses_documents_would_show(one_by_one):
    model, loss, _ = one_by_one
    crossing = PackedGPT(crossing=True).double()
    crossing.load_state_dict(model.state_dict())
    assert apart(step(crossing, packed(8, shift_labels=True))[0], loss)


@pytest.mark.parametrize("plan", ["single", *PLANS])
def test_a_packed_batch_trains_as_its_documents_one_by_one(one_by_one, plan):
    model, loss, gradients = one_by_one
    batch = packed(8, shift_labels=True)
    scale = max(float(gradient.abs().max()) for gradient in gradients.values())
    options = {"microbatches": 2} if "pp" in plan else {}
    for rank in ranks_of(lambda rank: copy.deepcopy(model), tuple(batch.values()), plan, **options):
        assert_close(rank.outputs, loss, scale, "the loss")
        for key, gradient in rank.gradients.items():
            if gradient is not None:  # a rank of a pipeline has those of its stages
                assert_close(gradient, gradients[key], scale, key)


def test_a_batch_that_replicas_share_and_one_that_they_cannot(one_by_one):
    """Replicas have unequally many labels."""
    model, loss, _ = one_by_one
    batch = packed(8, shift_labels=True)
    assert len(batch["labels"]) == 6
    counts = [int((half != -100).sum()) for half in batch["labels"].chunk(2)]
    assert counts[0] != counts[1]
    for plan, options in (("dp=2", {}), ("pp=2", {"microbatches": 6}), ("pp=2", {"microbatches": 3})):
        for rank in ranks_of(lambda rank: copy.deepcopy(model), tuple(batch.values()), plan, **options):
            assert_close(rank.outputs, loss, 1.0, "the loss")


@pytest.mark.parametrize("plan", PROCESSES)
@pytest.mark.parametrize("model", ["gpt_packed", "hf_llama_packed"])
def test_packed_documents_on_processes_train_as_on_one_device(pools, tmp_path, model, plan):
    wanted, captured = {"adamw": single.reference(model, "float64", "adamw")}, single.sendable(model, "float64")
    arguments = (model, plan, "float64", wanted, captured, str(tmp_path))
    ranks = pools[PROCESSES[plan]].run(single.parity, *arguments, timeout=LIMIT)
    assert [fault for rank in ranks for fault in rank] == []


# -- transformers


def configured(kind: type, **options: object) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    if kind is GPT2Config:
        sizes |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    else:
        sizes |= {"intermediate_size": 32, "num_key_value_heads": 2, "max_position_embeddings": 64}
    model = AutoModelForCausalLM.from_config(kind(**{**sizes, "use_cache": False, **options}))
    return model.double().train()


CONFIGS = {
    "llama": (LlamaConfig, {}),
    "llama-eager": (LlamaConfig, {"attn_implementation": "eager"}),
    "mistral": (MistralConfig, {"sliding_window": 4}),
    "gpt2": (GPT2Config, {}),
}


def promoted_step(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Gradients]:
    """A step of the graph, in which casts to float32 that transformers writes are to float64."""
    captured = capture(model, (), batch, promote=True)
    parameters = {key: value.detach().clone().requires_grad_() for key, value in model.named_parameters()}
    outputs, _, _ = run(captured, list(batch.values()), parameters, dict(model.named_buffers()))
    loss = outputs[0]
    assert loss is not None
    loss.backward()
    return loss.detach(), {key: p.grad for key, p in parameters.items() if p.grad is not None}


@pytest.mark.parametrize("name", CONFIGS)
def test_models_of_transformers_train_as_on_their_documents_one_by_one(name):
    kind, options = CONFIGS[name]
    model = configured(kind, **options)
    actual = promoted_step(model, packed(8, shift_labels=False))
    batches = [alone(document, shift_labels=False) for document in documents()]
    loss, gradients = mean_of((*promoted_step(model, batch), batch["input_ids"].shape[1] - 1) for batch in batches)
    scale = max(float(gradient.abs().max()) for gradient in gradients.values())
    assert_close(actual[0], loss, scale, "the loss")
    for key, gradient in actual[1].items():
        assert_close(gradient, gradients[key], scale, key)


@pytest.fixture(scope="module")
def llama():
    return referred(configured(LlamaConfig), packed(8, shift_labels=False))


@pytest.mark.parametrize("plan", PLANS)
def test_a_packed_llama_trains_under_every_plan(llama, plan):
    assert verified(llama, plan)


# -- what would cross documents is refused


def test_a_model_of_transformers_with_a_cache_would_cross_documents_and_is_refused():
    batch = packed(8, shift_labels=False)
    for options in ({}, {"attn_implementation": "eager"}):
        with pytest.raises(CaptureError, match=r"set model\.config\.use_cache = False"):
            capture(configured(LlamaConfig, use_cache=True, **options), (), batch)
    with pytest.raises(CaptureError, match="attention crosses documents"):
        capture(configured(LlamaConfig), (), {**batch, "attention_mask": torch.ones_like(batch["labels"])})


@pytest.mark.parametrize("kind", ["opt", "falcon", "mamba", "recurrent_gemma"])
def test_models_that_make_no_mask_of_positions_are_refused(kind):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "ffn_dim": 32, "word_embed_proj_dim": 16}
    layers = {"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "lru_width": 16}
    config = AutoConfig.for_model(kind, vocab_size=VOCABULARY, use_cache=False, pad_token_id=0, **sizes, **layers)
    batch = packed(8, shift_labels=False)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        logits = model(**batch).logits[0]
        first = batch["document_ids"][0] == 1
        assert apart(logits[first], model(input_ids=batch["input_ids"][:1, first]).logits[0])  # it does cross
    with pytest.raises(CaptureError, match="The call passes document_ids, but"):
        capture(model, (), batch)


def test_a_plain_model_that_ignores_documents_is_refused_with_its_line():
    with pytest.raises(CaptureError, match="attention crosses documents: its mask is not made of them") as caught:
        capture(PackedGPT(crossing=True), (), packed(8, shift_labels=True))
    assert "packed_gpt.py:" in str(caught.value)

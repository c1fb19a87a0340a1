"""The list that must pass: every model under every plan, on real gloo processes, against one device."""

import pytest

from tests.models.zoo import CASTS_TO_FLOAT32

from . import single

MODELS = (
    "mlp", "gpt", "gpt_ignore", "gpt_odd_vocab", "repeated", "contrastive", "resnet", "unet",
    "hf_llama", "hf_gpt2", "hf_bert_pretraining", "hf_t5", "hf_vit",
)  # fmt: skip
PLANS = {"dp=2": 2, "tp=2": 2, "sp=2": 2, "zero3=2": 2, "dp=2,tp=2": 4}
SEQUENCES = {
    "gpt": ("cp=2", "cp=4"), "hf_llama": ("cp=2,tp=2", "cp=2,zero3=2", "pp=2,cp=2"), "hf_t5": ("ulysses=2", "cp=2"),
    "hf_bert_pretraining": ("cp_all_gather=2",),
}  # fmt: skip
RANKS = {**PLANS, "tp=4": 4, "ulysses=2": 2, "cp=2": 2, "cp_all_gather=2": 2}
LIMIT = 120.0  # seconds for one model under one plan, on a busy machine


def faults(pools, tmp_path, model, plan, dtype, kinds):
    wanted = {kind: single.reference(model, dtype, kind) for kind in kinds}
    payload = single.sendable(model, dtype)
    count = RANKS.get(plan, 4)
    ranks = pools[count].run(single.parity, model, plan, dtype, wanted, payload, str(tmp_path), timeout=LIMIT)
    assert len(ranks) == count
    return [fault for rank in ranks for fault in rank]


@pytest.mark.parametrize("plan", PLANS)  # the top varies fastest: a model is captured once for all its plans
@pytest.mark.parametrize("model", MODELS)
def test_trains_as_on_one_device(pools, tmp_path, model, plan):
    assert faults(pools, tmp_path, model, plan, "float64", ("sgd", "adamw")) == []


def test_two_heads_of_keys_on_four_processes(pools, tmp_path):
    assert faults(pools, tmp_path, "hf_llama", "tp=4", "float64", ("sgd",)) == []


@pytest.mark.parametrize(("model", "plan"), [(model, plan) for model, plans in SEQUENCES.items() for plan in plans])
def test_trains_as_on_one_device_with_its_sequence_split(pools, tmp_path, model, plan):
    assert faults(pools, tmp_path, model, plan, "float64", ("adamw",)) == []


@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
@pytest.mark.parametrize("model", ["mlp", "gpt_ignore", "resnet", "hf_gpt2"])
def test_trains_as_on_one_device_in_float32(pools, tmp_path, model, plan):
    assert faults(pools, tmp_path, model, plan, "float32", ("sgd",)) == []


@pytest.mark.parametrize("model", sorted(CASTS_TO_FLOAT32))
def test_the_promoted_graph_is_the_model_as_far_as_its_casts_allow(model):
    assert single.graph_apart(model) < 1e-5

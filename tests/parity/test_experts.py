"""Mixtures of experts, split over an axis `ep`, against one device: real layers of transformers and an own one."""

from __future__ import annotations

import weakref
from functools import cache

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM

import shardwright as sw
from shardwright.capture import capture
from shardwright.capture.user_calls.opaque_call import OpaqueBody, OpaqueModule
from shardwright.errors import CaptureError
from shardwright.plan.request import PlanRequest
from shardwright.verify.program import compile_program
from tests.verified import referred, verified

SMALL = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "use_cache": False, "output_router_logits": True,
}  # fmt: skip


def mixtral(implementation: str = "eager", experts: int = 4) -> nn.Module:
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=experts, num_experts_per_tok=2))
    model.set_experts_implementation(implementation)
    return model


def qwen(implementation: str = "eager") -> nn.Module:
    torch.manual_seed(0)
    sizes = {"num_experts": 5, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 12}
    model = Qwen2MoeForCausalLM(Qwen2MoeConfig(**SMALL, **sizes, num_experts_per_tok=2))
    model.set_experts_implementation(implementation)
    return model


def example(rows: int = 8) -> tuple[tuple, dict]:
    torch.manual_seed(1)
    ids = torch.randint(64, (rows, 6))
    return (), {"input_ids": ids, "labels": ids}


def starved() -> nn.Module:
    """Six experts of which the last two are never chosen: two of the first four always have positive scores."""
    model = mixtral(experts=6)
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            with torch.no_grad():
                parameter[1], parameter[3], parameter[4:] = -parameter[0], -parameter[2], 0.0
    return model


@cache
def original(make):
    return referred(make(), example(), steps=2)


@pytest.mark.parametrize("plan", ["ep=2", "dp=2", "tp=2", "dp=2,ep=2", "ep=2,tp=2", "zero3=2,ep=2"])
@pytest.mark.parametrize("make", [mixtral, qwen])
def test_experts_are_exact_under(make, plan):
    report = verified(original(make), plan)
    assert report.passed, str(report)


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
def test_the_implementation_that_is_set_is_the_one_that_runs(implementation):
    dtype = torch.float32 if implementation == "grouped_mm" else torch.float64  # doubles have no grouped product
    report = sw.verify(mixtral(implementation), "ep=2", example=example(), method="threads", dtype=dtype, steps=1)
    assert report.passed, str(report)


def test_experts_that_get_no_token():
    """With three ranks of two experts each the last rank gets none at all."""
    chosen = []
    model = starved()
    for module in model.modules():
        if type(module).__name__ == "MixtralExperts":
            module.register_forward_pre_hook(lambda _, value: chosen.append(value[1]))
    model(**example(6)[1])
    counts = torch.bincount(torch.cat([index.reshape(-1) for index in chosen]), minlength=6)
    assert counts[4:].sum() == 0
    assert len(set(counts[:4].tolist())) > 1

    report = sw.verify(starved(), "ep=3", example=example(6), method="threads", steps=1)

    assert report.passed, str(report)


def on_this_rank(rank: int) -> tuple[bool, str]:
    report = sw.verify(mixtral(), "ep=2", example=example(), method="world", steps=1, compile={"timeout": 120})
    return report.passed, str(report)


def test_on_real_processes(pools):
    for passed, message in pools[2].run(on_this_rank, timeout=120):
        assert passed, message


def test_tokens_travel_by_all_to_all_and_experts_are_not_gathered():
    program = compile_program(mixtral().train(), *example(), PlanRequest.read("ep=2"), 2).program
    kinds = [op.target for op in program.body]
    assert kinds.count("runtime.experts") == 2
    by_key = {parameter.name: parameter.layout for parameter in program.parameters if ".experts." in parameter.name}
    assert all(layout.shard_of("ep") is not None for layout in by_key.values())


def test_weights_that_were_gathered_for_a_call_do_not_outlive_it():
    """Else ZeRO-3 would keep the experts of all layers whole."""
    model = mixtral()
    call = next(iter(capture(model, *example()).opaques.values()))
    layer = model.get_submodule(call.path)
    part = OpaqueModule(call, OpaqueBody(layer), [module.training for module in layer.modules()])
    state = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
    alive = [weakref.ref(value) for value in state.values()]
    tokens, chosen = torch.randn(48, 16), torch.randint(4, (48, 2))
    part([tokens, chosen, torch.ones(48, 2)], state)
    del state
    assert alive and not any(value() is not None for value in alive)


class Experts(nn.Module):
    """An own layer: one product and a nonlinearity for each expert, and a scale that all share."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(count, width, width) / width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, hidden, index, weights):
        zeros = torch.zeros_like(hidden)
        for expert in range(self.weight.shape[0]):
            token, which = torch.where(index == expert)
            if len(token):
                first = torch.tanh(hidden[token] @ self.weight[expert]) * self.scale
                zeros = zeros.index_add(0, token, first * weights[token, which, None])
        return zeros


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.router = nn.Linear(8, 4)
        self.experts = sw.experts(Experts(4, 8))

    def forward(self, x):
        x = self.first(x)
        weights, index = self.router(x).softmax(-1).topk(2)
        return (x + self.experts(x, index, weights)).square().mean()


@pytest.mark.parametrize("plan", ["ep=2", "dp=2"])
def test_an_own_layer_of_experts(plan):
    torch.manual_seed(0)
    report = sw.verify(Mixture(), plan, example=(torch.randn(12, 6),), method="threads")
    assert report.passed, str(report)


def test_a_layer_that_takes_something_else_is_refused():
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = sw.experts(nn.Linear(6, 6))

        def forward(self, x):
            return self.experts(x).sum()

    with pytest.raises(CaptureError, match=r"experts is no layer of experts: its forward does not take tokens"):
        sw.plan(Wrong(), example=(torch.randn(4, 6),), plan="ep=2")


def test_a_model_without_experts_is_data_parallel_and_the_plan_says_so():
    net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    plan = sw.plan(net, example=(torch.randn(4, 6),), plan="ep=2")
    assert any("no layer of experts can be split" in note for note in plan.notes)

"""Optimizers whose updates look at whole matrices or tensors, under plans, against one device."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from examples.muon import BatchedMuon
from torch import optim
from transformers import MixtralConfig, MixtralForCausalLM

import shardwright as sw
from shardwright.errors import InputError
from shardwright.runtime.optimizer import owners
from tests.models.zoo import ZOO

from .looped import both, on_ranks, parameters
from .test_experts import SMALL, example

PLANS = ("dp=2", "tp=2", "zero1=2", "zero2=2,tp=2", "zero3=2", "pp=2,dp=2")


class Lamb(optim.Optimizer):
    """LAMB as a user writes it: Adam's update, scaled by norms of the tensor; it counts steps in the group."""

    update_needs = "tensor"

    def __init__(self, params, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.01):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            (b1, b2), count = group["betas"], group["step"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"], state["v"], state["count"] = torch.zeros_like(p), torch.zeros_like(p), 0
                state["count"] += 1
                assert state["count"] == count == self.calls
                state["m"] = state["m"].lerp(p.grad, 1 - b1)
                state["v"].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                update = state["m"] / (1 - b1**count) / ((state["v"] / (1 - b2**count)).sqrt() + 1e-6)
                update = update + group["weight_decay"] * p
                norms = p.norm(), update.norm()
                ratio = norms[0] / norms[1] if norms[0] > 0 and norms[1] > 0 else 1.0
                p.sub_(group["lr"] * ratio * update)


class Lars(optim.Optimizer):
    """LARS: momentum of gradients that are scaled by the norms of tensor and gradient."""

    update_needs = "tensor"

    def __init__(self, params, lr=0.1, momentum=0.9, trust=0.02):
        super().__init__(params, {"lr": lr, "momentum": momentum, "trust": trust})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    average = self.state[p].setdefault("average", torch.zeros(p.shape, dtype=p.dtype))
                    ratio = group["trust"] * p.norm() / (p.grad.norm() + 1e-9) if p.dim() > 1 else 1.0
                    average.mul_(group["momentum"]).add_(p.grad * ratio)
                    p.add_(average, alpha=-group["lr"])


KINDS = {"Lamb": Lamb, "Lars": Lars, "Muon": partial(BatchedMuon, lr=1e-2)}


def train(model, optimizer, case):
    for _ in range(4):
        model(*case.args).backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(parameters(model))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", KINDS)
def test_parity(kind, plan):
    both("mlp", plan, train, KINDS[kind], example=True)


def train_once(model, optimizer, case):
    model(*case.args).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_matrix_is_updated_by_one_rank(monkeypatch):
    updated, inner = [], owners._update

    def update(stepping, item, full, news):
        updated.append(item.leaf.spec.name)
        return inner(stepping, item, full, news)

    monkeypatch.setattr(owners, "_update", update)
    on_ranks("mlp", "dp=2,tp=2", train, KINDS["Muon"], example=True)

    names = [name for name, _ in ZOO["mlp"]().module.named_parameters()]
    assert sorted(updated) == sorted(3 * names)  # of four steps the first shows what the state is


def test_sharded_experts_are_not_gathered_for_their_matrices(monkeypatch):
    shapes, inner = [], owners._update

    def update(stepping, item, full, news):
        shapes.append(tuple(full[0].shape))
        return inner(stepping, item, full, news)

    monkeypatch.setattr(owners, "_update", update)
    config = {**SMALL, "num_hidden_layers": 1, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = MixtralForCausalLM(MixtralConfig(**config))
    model.set_experts_implementation("eager")
    report = sw.verify(model, "ep=2", example=example(), method="threads", steps=3, optimizer=KINDS["Muon"])
    assert report.passed, str(report)
    assert {shape for shape in shapes if len(shape) == 3} == {(2, 48, 16), (2, 16, 24)}  # of four experts


def test_hooks_run_once_for_a_step():
    def loop(model, optimizer, case):
        calls = []
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        train(model, optimizer, case)
        return calls

    assert on_ranks("mlp", "dp=2", loop, Lars, example=True) == [["before", "after"] * 4] * 2


def test_state_that_comes_later_is_refused_on_all_ranks():
    class Late(Lars):
        @torch.no_grad()
        def step(self, closure=None):
            super().step()
            for p in self.param_groups[0]["params"]:
                if "average" in self.state[p] and self.state[p].get("calls"):
                    self.state[p]["second"] = torch.zeros_like(p)
                self.state[p]["calls"] = True

    def loop(model, optimizer, case):
        train_once(model, optimizer, case)
        with pytest.raises(InputError, match=r"update_needs = \"everything\"[\s\S]*'second' came"):
            train_once(model, optimizer, case)
        return [torch.zeros(1)]

    on_ranks("mlp", "tp=2", loop, Late, example=True)


def test_an_unknown_need_is_refused():
    class Vague(Lars):
        update_needs = "rows"

    def loop(model, optimizer, case):
        return []

    with pytest.raises(InputError, match="update_needs is 'rows'"):
        on_ranks("mlp", "tp=2", loop, Vague, example=True)


def test_a_norm_in_a_step_that_is_declared_elementwise_is_refused():
    class Claimed(Lars):
        update_needs = None
        elementwise = True

    def loop(model, optimizer, case):
        with pytest.raises(InputError, match=r"declared elementwise, and its step calls norm.*update_needs"):
            train_once(model, optimizer, case)
        return []

    on_ranks("mlp", "tp=2", loop, Claimed, example=True)


def test_a_step_that_is_elementwise_runs_on_shards_with_hooks_and_a_closure():
    class Scaled(optim.SGD):
        elementwise = True

        @torch.no_grad()
        def step(self, closure=None):
            with torch.enable_grad():
                loss = closure()
            for p in self.param_groups[0]["params"]:
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                average.view(-1).lerp_(p.grad.reshape(-1), 0.5)
                p.addcdiv_(average, average.abs().sqrt() + 1e-3, value=-0.01)
            return loss

    def loop(model, optimizer, case):
        optimizer.register_step_post_hook(lambda *_: torch.nn.utils.get_total_norm(model.parameters()).item())

        def closure():
            optimizer.zero_grad()
            loss = model(*case.args)
            loss.backward()
            return loss

        losses = [optimizer.step(closure).detach() for _ in range(3)]
        return [*losses, *parameters(model)]

    both("mlp", "zero1=2", loop, Scaled, example=True)

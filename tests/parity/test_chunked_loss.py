"""Losses whose logits are made in chunks: the same loss, gradients and three AdamW steps, under every kind of plan."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwright as sw
from shardwright.runtime.model.access import state_of
from shardwright.runtime.parameters.sharded import raw_gradient
from tests.models.zoo import ZOO
from tests.runtime.ranks import run_ranks
from tests.verified import referred, verified

CLASSES, WIDTH, LENGTH, BATCH = 66, 16, 6, 8
PLANS = ("single", "dp=2", "tp=2", "sp=2", "cp=2", "zero3=2", "dp=2,tp=2", "pp=2")


@lru_cache(maxsize=2)
def zoo_reference(name: str) -> Any:
    case = ZOO[name](dtype=torch.float64)
    return referred(case.module, (case.args, case.kwargs), optimizer="adamw", outputs="scalars")


@pytest.mark.parametrize("name", ["gpt", "gpt_ignore", "hf_llama", "hf_gpt2"])
@pytest.mark.parametrize("plan", PLANS)
def test_models_compute_the_same(name: str, plan: str) -> None:
    report = verified(zoo_reference(name), f"{plan},chunked_loss=5")

    assert report, report


@pytest.mark.parametrize("plan", ["pp=2,zb", "pp=2,dp=2", "zero3=2,recompute", "zero2=2,tp=2"])
def test_schedules_and_recomputed_layers_go_with_it(plan: str) -> None:
    report = verified(zoo_reference("gpt_ignore"), f"{plan},chunked_loss=2")

    assert report, report


@pytest.mark.parametrize(("precision", "plan"), [("bf16-mixed", "tp=2"), ("bf16", "dp=2"), ("fp16-mixed", "dp=2")])
def test_narrow_dtypes_are_as_close_as_without_it(precision: str, plan: str) -> None:
    case = ZOO["gpt_ignore"](dtype=torch.float32)
    report = sw.verify(
        case.module, f"{plan},chunked_loss=5", example=(case.args, case.kwargs), precision=precision,
        method="threads", steps=2,
    )  # fmt: skip

    assert report, report


class Head(nn.Module):
    """An embedding, a norm and a head, with the loss as `kind` writes it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("weight", torch.linspace(0.5, 2.0, CLASSES))

    def forward(self, idx: Tensor, target: Tensor) -> Tensor:
        x = self.norm(self.embed(idx) + torch.tanh(self.mix(self.embed(idx))))
        loss: Tensor = getattr(self, self.kind)(x, target)
        return loss

    def plain(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).view(-1, CLASSES), target.view(-1))

    def shifted(self, x: Tensor, target: Tensor) -> Tensor:
        logits = self.head(x)[:, :-1].contiguous()
        labels = target[:, 1:].clamp(min=-1).reshape(-1)
        return F.cross_entropy(logits.view(-1, CLASSES), labels, ignore_index=-1)

    def smoothed(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).flatten(0, 1), target.flatten(), label_smoothing=0.1)

    def z_loss(self, x: Tensor, target: Tensor) -> Tensor:
        logits = self.head(x)
        z = torch.logsumexp(logits, -1)
        counts = (target != -100).to(z.dtype)
        ce = F.cross_entropy(logits.view(-1, CLASSES), target.view(-1), label_smoothing=0.05)
        return ce + 1e-2 * (z.square() * counts).sum() / counts.sum()

    def flat_z_loss(self, x: Tensor, target: Tensor) -> Tensor:
        logits = self.head(x).view(-1, CLASSES)
        return F.cross_entropy(logits, target.view(-1)) + 1e-2 * torch.logsumexp(logits, dim=-1).square().mean()

    def tied(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy((x @ self.embed.weight.t()).transpose(1, 2), target)

    def weighted(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).view(-1, CLASSES), target.view(-1), weight=self.weight)

    def summed(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).view(-1, CLASSES), target.view(-1), reduction="sum") / 7

    def by_row(self, x: Tensor, target: Tensor) -> Tensor:
        each = F.cross_entropy(self.head(x).transpose(1, 2), target, reduction="none")
        return (each * torch.linspace(0, 1, LENGTH, dtype=each.dtype)).mean()

    def capped(self, x: Tensor, target: Tensor) -> Tensor:
        logits = torch.tanh(self.head(x).float() / 3.0) * 3.0
        return F.cross_entropy(logits.view(-1, CLASSES), target.view(-1))


KINDS = (
    "plain", "shifted", "smoothed", "z_loss", "flat_z_loss", "tied", "weighted", "summed", "by_row", "capped",
)  # fmt: skip


@lru_cache(maxsize=2)
def head_reference(kind: str) -> Any:
    torch.manual_seed(0)
    idx, target = torch.randint(CLASSES, (BATCH, LENGTH)), torch.randint(CLASSES, (BATCH, LENGTH))
    target[1, 2:] = target[4] = -100
    return referred(Head(kind), (idx, target), optimizer="adamw")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plan", ["single", "dp=2", "tp=2", "sp=2", "dp=2,tp=2"])
def test_losses_as_people_write_them(kind: str, plan: str) -> None:
    """7 chunks: the rows of no plan divide by them."""
    report = verified(head_reference(kind), f"{plan},chunked_loss=7")

    assert report, report


@pytest.mark.parametrize("kind", ["z_loss", "tied", "by_row"])
def test_without_chunks_too(kind: str) -> None:
    """A logsumexp over split classes is the same whether or not it is joined with the loss."""
    assert verified(head_reference(kind), "tp=2")


def test_processes_of_gloo_compute_the_same() -> None:
    case = ZOO["hf_llama"](dtype=torch.float64)
    report = sw.verify(
        case.module, "dp=2,tp=2,chunked_loss=5", example=(case.args, case.kwargs), optimizer="adamw",
        method="processes", compile=sw.CompileOptions(outputs="scalars", timeout=300.0),
    )  # fmt: skip

    assert report, report


def accumulated(rank: int, plan: str, module: nn.Module, batches: list[Tensor]) -> dict[str, Tensor]:
    """The gradients of two backwards with loss scales, and an evaluation between them."""
    model = sw.parallelize(copy.deepcopy(module), example=tuple(batches[0]), plan=plan)
    for scale, (idx, target) in zip((1024.0, 0.5), batches, strict=True):
        (scale * model(idx, target)).backward()
        with torch.no_grad():
            model.eval()(idx[:2], target[:2])
            model.train()
    gradients = {}
    for name, parameter in state_of(model).parameters.items():
        own = raw_gradient(parameter)
        gradients[name] = raw_gradient(parameter.shard) if own is None else own  # ZeRO-3 has the gradient of its shard
    return gradients


@pytest.mark.parametrize("plan", ["dp=2,tp=2", "zero3=2"])
def test_scaled_losses_accumulate(plan: str) -> None:
    torch.manual_seed(0)
    module = Head("z_loss").double()
    batches = [torch.randint(CLASSES, (2, BATCH, LENGTH)) for _ in range(2)]
    size = 4 if "," in plan else 2
    both = [run_ranks(size, accumulated, name, module, batches) for name in (f"{plan},chunked_loss=3", plan)]
    for chunked, whole in zip(*both, strict=True):
        assert chunked.keys() == whole.keys() == dict(module.named_parameters()).keys()
        for name, gradient in whole.items():
            torch.testing.assert_close(chunked[name], gradient, rtol=1e-10, atol=1e-10)

"""Models with ops that nobody wrote a rule for: probed when they are planned, split, and right."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwright as sw
from shardwright.capture import capture
from shardwright.verify import verify


@torch.library.custom_op("shardwright_probe::heads", mutates_args=())
def heads(x: Tensor, count: int) -> Tensor:
    """Every head of a row normalised by itself."""
    rows = x.view(*x.shape[:-1], count, -1)
    return F.normalize(rows, dim=-1).view(x.shape).clone()


@heads.register_fake
def _(x, count):
    return torch.empty_like(x)


def heads_back(ctx, g):
    x = ctx.saved_tensors[0]
    x, g = (value.view(*value.shape[:-1], ctx.count, -1) for value in (x, g))
    y = F.normalize(x, dim=-1)
    return ((g - y * (y * g).sum(-1, keepdim=True)) / x.norm(dim=-1, keepdim=True)).flatten(-2), None


heads.register_autograd(
    heads_back,
    setup_context=lambda ctx, inputs, output: (ctx.save_for_backward(inputs[0]), setattr(ctx, "count", inputs[1])),
)


@torch.library.custom_op("shardwright_probe::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    return x + torch.rand(())


noisy.register_fake(torch.empty_like)
noisy.register_autograd(lambda ctx, g: g)


@torch.library.custom_op("shardwright_probe::mixed", mutates_args=())
def mixed(x: Tensor) -> Tensor:
    return x / x.abs().sum()


mixed.register_fake(torch.empty_like)
mixed.register_autograd(lambda ctx, g: g.sin())


class Headed(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 5)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.function(self.up(x))).square().mean()


def example() -> tuple[Tensor]:
    torch.manual_seed(0)
    return (torch.randn(4, 6),)


def headed() -> nn.Module:
    return Headed(lambda x: heads(x, 4))


def test_the_plan_says_which_rules_were_found():
    plan = sw.plan(headed(), example=example(), plan="tp=2")
    assert "1 op has a rule found by probing: shardwright_probe.heads.default: a (b c^) -> a (b c^)" in plan.notes
    assert plan.choices("train")["/ heads"] == {"tp": "b"}


def test_the_plan_says_why_there_is_none():
    plan = sw.plan(Headed(lambda x: noisy(x)), example=example(), plan="dp=2")
    (note,) = (note for note in plan.notes if "noisy" in note)
    assert note.endswith(
        "has no rule and runs replicated on every device: it could not be probed: it returns another result each time"
    )


def test_the_plan_says_what_can_not_be_split():
    plan = sw.plan(Headed(lambda x: mixed(x)), example=example(), plan="dp=2")
    (note,) = (note for note in plan.notes if "mixed" in note)
    assert note.endswith("runs replicated on every device: it was probed, and no split of it recombines")


def test_a_plan_with_probed_rules_can_be_explained():
    plan = sw.plan(headed(), example=example(), plan="tp=2")
    assert "heads" in str(sw.explain(plan, capture(headed(), example()).graph))


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "dp=2,tp=2"])
def test_what_was_found_is_right(plan):
    report = verify(headed(), plan, example=example(), method="threads")
    assert report.passed, str(report)

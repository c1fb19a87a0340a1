"""Tables that renormalize the rows that are looked up: a forward that writes to a parameter."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.errors import CaptureError, LoweringError
from shardwright.parallelize import parallelize
from tests.options import grouped
from tests.parity.threaded import apart, assert_close, world_of
from tests.runtime.ranks import run_ranks

STEPS = 3


class Classifier(nn.Module):
    """A table with long rows; some are never looked up and stay long."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8, max_norm=1.5, **options)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.table(ids)))).square().mean()


class Direct(nn.Module):
    """A parameter that is looked up twice by a function, and is the head as well."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(12, 8))
        self.mix = nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        first = F.embedding(ids, self.table, max_norm=2.0)
        second = F.embedding(ids.flip(1) // 2, self.table, padding_idx=0, max_norm=1.0, norm_type=1.0)
        return F.linear(torch.tanh(self.mix(first + second)), self.table).square().mean()


class Clamped(nn.Module):
    """Writes to its weight by hand, as the critic of a WGAN does."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)
        self.table = nn.Embedding(12, 8)

    def forward(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            self.up.weight.clamp_(-0.2, 0.2)
        return self.down(torch.tanh(self.up(self.table(ids)))).square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> list[Tensor]:
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    return losses


def batches_of(rows: int = 8, seed: int = 1) -> list[Tensor]:
    """The halves of a batch look up other rows, some of them several times; no batch has the last one."""
    generator = torch.Generator().manual_seed(seed)
    low = [torch.randint(0, 6, (rows // 2, 3), generator=generator) for _ in range(STEPS)]
    high = [torch.randint(4, 11, (rows - rows // 2, 3), generator=generator) for _ in range(STEPS)]
    return [torch.cat(pair) for pair in zip(low, high, strict=True)]


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)


def check(module: nn.Module, plan: str, **options) -> None:
    """Losses, gradients of the last step and parameters after all steps are those of one device."""
    module = module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2)
    original, batches = copy.deepcopy(module), batches_of()
    expected = train(original, sgd(original), batches)
    wanted = {key: parameter.detach() for key, parameter in original.named_parameters()}
    gradients = {key: parameter.grad for key, parameter in original.named_parameters()}

    def rank(_: int):
        mine = copy.deepcopy(module)
        model, optimizer = parallelize(mine, sgd(mine), plan=plan, example=(batches[0],), **grouped(**options))
        losses = train(model, optimizer, batches)
        full = {key: p.full_grad() for key, p in model.named_parameters()}
        return losses, model.full_state_dict(), full

    scale = max(float(gradient.abs().max()) for gradient in gradients.values())
    for losses, result, full in run_ranks(world_of(plan), rank):
        for mine, theirs in zip(losses, expected, strict=True):
            assert_close(mine, theirs, scale, "the loss")
        for key, gradient in full.items():
            assert_close(gradient, gradients[key], scale, f"the gradient of {key}")
        for key, parameter in wanted.items():
            assert_close(result[key], parameter, scale, key)


@pytest.mark.parametrize("plan", ["single", "dp=2", "zero1=2", "zero2=2", "zero3=2", "tp=2", "dp=2,tp=2", "pp=2"])
def test_used_rows_are_renormalized_over_the_whole_batch(plan):
    torch.manual_seed(0)
    check(Classifier(padding_idx=2), plan)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero3=2"])
@pytest.mark.parametrize("make", [lambda: Classifier(norm_type=1.0), Direct, Clamped])
def test_other_norms_repeated_lookups_and_writes_by_hand(make, plan):
    torch.manual_seed(0)
    check(make(), plan)


def test_the_norm_changes_what_is_trained():
    torch.manual_seed(0)
    renormalized = Classifier().double()
    plain = copy.deepcopy(renormalized)
    plain.table.max_norm = None
    for model in (renormalized, plain):
        with torch.no_grad():
            model.table.weight.mul_(2)
        train(model, sgd(model), batches_of())
    assert apart(renormalized.table.weight, plain.table.weight)


def test_a_float32_master_would_not_follow():
    torch.manual_seed(0)
    model = Classifier()
    with pytest.raises(LoweringError, match=r"table.weight.*master.*training\s+loop"):
        parallelize(model, sgd(model), plan="single", precision="bf16", example=(batches_of()[0],))


class ReadBefore(Classifier):
    def forward(self, ids: Tensor) -> Tensor:
        before = F.linear(torch.ones(1, 8, dtype=self.table.weight.dtype), self.table.weight).sum()
        return super().forward(ids) + before


def test_what_backward_needs_must_not_be_written_to():
    with pytest.raises(CaptureError, match=r"(?s)test_max_norm.py.*before forward writes to it.*training loop"):
        parallelize(ReadBefore(), plan="single", example=(batches_of()[0],))

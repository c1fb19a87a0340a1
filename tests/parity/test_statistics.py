"""Layers that change buffers in a step: spectral norm, running statistics, averages kept by hand."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from shardwright.errors import LoweringError
from tests.parity.threaded import assert_close, compare, ranks_of


class Loss(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).square().mean()


def spectral_hooks() -> Loss:
    layers = (nn.utils.spectral_norm(nn.Linear(8, 6)), nn.ReLU(), nn.utils.spectral_norm(nn.Linear(6, 8)))
    return Loss(*layers)


def spectral_parametrizations() -> Loss:
    return Loss(parametrizations.spectral_norm(nn.Linear(8, 6)), nn.ReLU(), nn.Linear(6, 8))


def averaged_over_all_batches() -> Loss:
    norm = nn.BatchNorm1d(6, momentum=None)
    norm.num_batches_tracked.fill_(3)
    norm.running_mean.normal_()
    return Loss(nn.Linear(8, 6), norm, nn.Linear(6, 3))


class NormedTwice(Loss):
    """One norm, called twice in a step: its counter goes up twice."""

    def forward(self, x: Tensor) -> Tensor:
        first, norm, last = self.net
        return last(norm(first(norm(first(x))))).square().mean()


def averaged_twice() -> Loss:
    return NormedTwice(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 2))


class ByHand(nn.Module):
    """Keeps averages through .data and assigns to it, as older code does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("average", torch.zeros(8))
        self.register_buffer("last", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.average.data.mul_(0.9).add_(y.data.mean(0), alpha=0.1)
        self.last.data = y.data.sum(0)
        return (y / y.data.abs().mean() + self.average).square().mean()


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero3=2"])
@pytest.mark.parametrize(
    "make", [spectral_hooks, spectral_parametrizations, averaged_over_all_batches, averaged_twice, ByHand]
)
def test_buffers_are_those_of_one_device(make, plan):
    torch.manual_seed(0)
    compare(make(), (torch.randn(4, 8),), plan)


class WrittenUnseen(Loss):
    """Writes in place where autograd does not look; the gradient is that of what was there before."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.net[0](x)
        with torch.no_grad():
            y.clamp_(-0.5, 0.5)
            y[:, 1:3].mul_(2)
        y[:, 2:].detach().mul_(3)
        return self.net[1](y).square().mean()


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero3=2", "pp=2"])
def test_a_write_in_place_that_autograd_does_not_see(plan):
    torch.manual_seed(0)
    compare(WrittenUnseen(nn.Linear(8, 8), nn.Linear(8, 4)), (torch.randn(4, 8),), plan)


@pytest.mark.parametrize("plan", ["single", "dp=2", "tp=2", "zero3=2"])
def test_batch_norm_without_running_statistics(plan):
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4, track_running_stats=False)
    compare(Loss(nn.Conv2d(3, 4, 3), norm, nn.Conv2d(4, 2, 3)), (torch.randn(4, 3, 7, 7),), plan)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero3=2"])
def test_instance_norm_with_running_statistics(plan):
    torch.manual_seed(0)
    norm = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
    compare(Loss(nn.Conv2d(3, 4, 3), norm), (torch.randn(4, 3, 7, 7),), plan)
    compare(Loss(nn.Conv2d(3, 4, 3), norm).eval(), (torch.randn(4, 3, 7, 7),), plan)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero3=2", "pp=2"])
def test_weight_norm_in_both_forms(plan):
    torch.manual_seed(0)
    x = torch.randn(4, 8, dtype=torch.float64)
    compare(Loss(parametrizations.weight_norm(nn.Linear(8, 6)), nn.Linear(6, 8)), (x,), plan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        old, *ranks = (Loss(nn.utils.weight_norm(nn.Linear(8, 6)), nn.Linear(6, 8)).double() for _ in range(3))
    for rank in ranks:  # torch can't copy such a module
        rank.load_state_dict(old.state_dict())
    loss = old(x)
    loss.backward()
    for result in ranks_of(lambda rank: ranks[rank], (x,), plan):
        assert_close(result.outputs, loss.detach(), 0.0, "the loss")
        for key, gradient in result.gradients.items():
            assert_close(gradient, old.get_parameter(key).grad, 1.0, key)


class Centred(nn.Module):
    """A buffer that has the mean of the inputs; in a pipeline each microbatch sees a part of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        self.mean.copy_(x.mean(0))
        return self.last(y).square().mean()


def test_a_buffer_is_updated_with_the_whole_batch_in_a_pipeline():
    torch.manual_seed(0)
    compare(Centred(), (torch.randn(4, 8),), "pp=2")


def test_what_would_need_other_microbatches_is_refused_in_a_pipeline():
    with pytest.raises(LoweringError, match="microbatches=1"):
        compare(ByHand(), (torch.randn(4, 8),), "pp=2")

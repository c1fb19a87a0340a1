"""Sizes that tensors say: fixed where the tensor depends on no input; and ops that look at values to check them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.capture import capture
from shardwright.errors import CaptureError
from tests.capture.agreement import agree
from tests.parity.threaded import compare

KEEP = torch.tensor([True, False, True, True, False, False])


class Does(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6, dtype=torch.float64))
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x * self.weight)


FIXED = {
    "columns by a mask": lambda y: torch.cat([y[:, KEEP], y[..., ~KEEP] * 2], 1),
    "places": lambda y: y[:, torch.nonzero(KEEP).squeeze(1)] * torch.argwhere(KEEP).sum(),
    "off the diagonal": lambda y: (y[:, :4] @ y[:, 2:])[~torch.eye(4, dtype=torch.bool)] + 1,
    "masked_select": lambda y: torch.masked_select(y, KEEP.expand(4, 6)).square(),
    "where": lambda y: y[torch.where(torch.tril(torch.ones(4, 6)) == 1)],
    "counts": lambda y: torch.repeat_interleave(y, torch.tensor([1, 0, 2, 3]), dim=0),
    "ends": lambda y: torch.tensor_split(y, torch.tensor([1, 4]), dim=1)[1] * 3,
    "classes": lambda y: y @ F.one_hot(torch.tensor([0, 2, 1, 1, 0, 2])).to(y.dtype),
    "unique": lambda y: y[:, torch.unique(torch.tensor([3, 1, 3]))],
}


@pytest.mark.parametrize("what", FIXED)
def test_a_size_that_is_known_is_fixed(what):
    torch.manual_seed(0)
    agree(Does(FIXED[what]), torch.randn(4, 6, dtype=torch.float64))


def test_a_slice_may_start_at_a_tensor():
    net = Does(lambda y: y.narrow(1, (y > 0).sum() * 0 + 2, 3) + y.narrow(1, torch.tensor(-3), 3))
    agree(net, torch.randn(4, 6, dtype=torch.float64))


def test_covariances():
    def function(y: Tensor) -> Any:
        counted = torch.cov(y, correction=0, fweights=torch.arange(6))
        return torch.cov(y), torch.corrcoef(y), counted, torch.cov(y[0]), torch.corrcoef(y[0])

    torch.manual_seed(0)
    agree(Does(function), torch.randn(4, 6, dtype=torch.float64))


class Speech(nn.Module):
    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.net = nn.Linear(6, 7)
        self.loss = nn.CTCLoss(reduction=reduction, zero_infinity=True)

    def forward(self, x: Tensor, labels: Tensor, lengths: Tensor, label_lengths: Tensor) -> Tensor:
        return self.loss(self.net(x).log_softmax(-1).transpose(0, 1), labels, lengths, label_lengths).sum()


def speech() -> tuple[Tensor, ...]:
    lengths = torch.tensor([9, 8, 2, 7]), torch.tensor([3, 2, 3, 1])  # of the third there is no alignment
    return torch.randn(4, 9, 6), torch.randint(1, 7, (4, 3)), *lengths


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "pp=2"])
def test_the_ctc_loss_is_split_on_its_samples(plan):
    torch.manual_seed(0)
    comparison = compare(Speech("sum"), speech(), plan)
    assert comparison.sent("all_gather", "dp") == (0, 0)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_reductions_of_the_ctc_loss(reduction):
    torch.manual_seed(0)
    compare(Speech(reduction), speech(), "dp=2")


def test_a_size_that_depends_on_data_is_refused():
    with pytest.raises(CaptureError, match="values of a tensor"):
        capture(Does(lambda y: y[:, y[0] > 0]), (torch.randn(4, 6, dtype=torch.float64),))

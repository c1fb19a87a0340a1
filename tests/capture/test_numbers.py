"""Numbers that a model takes out of its tensors: in the dtype that torch computes in, and returned as numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.capture import capture, run
from shardwright.errors import CaptureError
from tests.capture.agreement import agree, tensors_of


class Does(nn.Module):
    def __init__(self, function: Any, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6, dtype=dtype))
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x * self.weight)


def arithmetic(y: Tensor) -> Tensor:
    v, n = y.std().item(), (y > 0).sum().item()
    return (y - v) / (v + 1e-5) * n + (3 - v) + y**n / (n + 1) + (1 / v) * -v


def filled(y: Tensor) -> Tensor:
    v = y.mean().item()
    built = y + torch.full_like(y, v) + torch.full((6,), v, dtype=y.dtype) + torch.tensor(v)
    return built.masked_fill(y > v, v / 2) + torch.where(y < v, y, v)


def bounded(y: Tensor) -> Tensor:
    v = y.abs().max().item()
    return y.clamp(-v / 2, 0.75) + y.clamp(max=v / 3) + y.clamp_min(-v / 4)


def without_dims(y: Tensor) -> Tensor:
    return y.sum() * y.max().item() / max(int((y > 0).sum()), 1)


def written(y: Tensor) -> Tensor:
    v = y.min().item()
    y = y * 2
    y.add_(v).mul_(v)
    y[0].fill_(v)
    return y


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("function", [arithmetic, filled, bounded, without_dims, written])
def test_numbers_meet_tensors_in_the_dtype_that_torch_computes_in(function, dtype):
    torch.manual_seed(0)
    agree(Does(function, dtype), torch.randn(4, 6, dtype=dtype), tolerance=1e-12 if dtype is torch.float64 else 1e-5)


def returned(y: Tensor) -> Any:
    return {"y": y, "mean": y.mean().item(), "positive": (y > 0).sum().item(), "any": (y > 9).any().item(),
            "row": y[0].tolist(), "same": torch.equal(y, y + 1)}  # fmt: skip


def test_numbers_that_are_returned_are_numbers():
    torch.manual_seed(0)
    net, x = Does(returned), torch.randn(4, 6, dtype=torch.float64)
    captured = capture(net, (x,))
    outputs, _, _ = run(captured, captured.flatten((x,), {}), *tensors_of(net))
    actual, wanted = captured.unflatten(outputs), net(x)
    assert {key: type(value) for key, value in actual.items()} == {key: type(value) for key, value in wanted.items()}
    assert actual["mean"] == pytest.approx(wanted["mean"], abs=1e-14)
    assert actual["row"] == pytest.approx(wanted["row"], abs=1e-14)
    assert [actual[key] for key in ("positive", "any", "same")] == [wanted[key] for key in ("positive", "any", "same")]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda y: torch.roll(y, (y > 0).sum().item()), "with a number that was taken out of a tensor"),
        (lambda y: y.new_zeros((y > 0).sum().item()), "depends on the values of a tensor"),
        (lambda y: y * 2 if y.sum().item() > 0 else y, "decides by the values of a tensor"),
    ],
)
def test_a_number_that_decides_is_refused(function, reason):
    with pytest.raises(CaptureError, match=reason) as caught:
        capture(Does(function), (torch.randn(4, 6, dtype=torch.float64),))
    assert f"{__file__}:" in str(caught.value)

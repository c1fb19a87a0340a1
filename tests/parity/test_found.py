"""What coverage of transformers and torch's own samples found wrong, each in a model as small as it gets."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.verify import verify


class Einsum(nn.Module):
    """A product that is written as an einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8, 6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bsd,hdk->bhsk", x, self.weight).tanh()


class Resized(nn.Module):
    """A parameter that goes through an op that has no rule, before it meets the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, 8, 4))
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        table = F.interpolate(self.table, size=6, mode="linear")
        return self.linear(x + table.transpose(1, 2))


class ConvolvedRow(nn.Module):
    """A depthwise convolution over queries, keys and values side by side: its groups are a row of sections."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 64, bias=False)
        self.conv = nn.Conv1d(64, 64, 4, groups=64, padding=3, bias=False)
        self.out = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        y = F.silu(self.conv(self.qkv(x).transpose(1, 2))[:, :, :s]).transpose(1, 2)
        q, k, v = y.split([16, 16, 32], -1)
        q, k = (value.view(b, s, 2, 8).repeat_interleave(2, 2).transpose(1, 2) for value in (q, k))
        y = F.scaled_dot_product_attention(q, k, v.view(b, s, 4, 8).transpose(1, 2))
        return self.out(y.transpose(1, 2).flatten(2))


class NormedAndCast(nn.Module):
    """A cast to float32 makes the reference a graph, whose batch norm must not write what its backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 6)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.linear(x).transpose(1, 2))
        return y.float().softmax(1).to(y.dtype)


class Rotated(nn.Module):
    """Heads that are rotated whole, so that what is left alone is empty; repeated with a hint of the size."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(8, 32)
        self.k = nn.Linear(8, 16)
        self.out = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k = (value(x).view(b, s, -1, 8).transpose(1, 2) for value in (self.q, self.k))
        q = torch.cat([q[..., :8].cos(), q[..., 8:]], -1)
        k = k.repeat_interleave(2, 1, output_size=4)
        q, k = q.reshape(b * 4, s, 8), k.reshape(b * 4, s, 8)
        return self.out((q @ k.transpose(1, 2) @ q).view(b, 4, s, 8).transpose(1, 2).reshape(b, s, 32))


class TakenApart(nn.Module):
    """What a flip makes whole is taken apart again and seen in another shape: a share has strides of the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 32)
        self.mix = nn.Linear(8, 8)
        self.down = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        y = self.up(x).view(b, s, 4, 8).flip(2).view(b, s * 4, 8)
        return self.down(self.mix(y).reshape(b, s, 32))


class LogSumExpOfScalar(nn.Module):
    """A number has an empty list of dims."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.shift = nn.Parameter(torch.randn(8)), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).tanh() + torch.logsumexp(self.shift, ())


MODELS = {
    "logsumexp of a scalar": (LogSumExpOfScalar, (4, 6, 8)),
    "rotated": (Rotated, (4, 6, 8)),
    "taken": (TakenApart, (4, 6, 8)),
    "einsum": (Einsum, (4, 6, 8)),
    "resized": (Resized, (4, 6, 8)),
    "convolved row": (ConvolvedRow, (4, 6, 8)),
    "normed and cast": (NormedAndCast, (4, 6, 8)),
}


@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
@pytest.mark.parametrize("name", MODELS)
def test_it_does_what_the_original_does(name, plan):
    torch.manual_seed(0)
    make, shape = MODELS[name]
    verify(make(), plan, example=(torch.randn(shape),), method="threads").raise_on_failure()

"""Models that keep functions of their submodules among their attributes."""

from __future__ import annotations

import functools
import types

import torch
import torch.nn.functional as F
from torch import nn


class ClosureBlock(nn.Module):
    """A block whose MLP is a lambda over a submodule, in the way of small GPTs."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(width, 4 * width), "c_proj": nn.Linear(4 * width, width)})
        m = self.mlp
        self.mlpf = lambda x: m.c_proj(F.gelu(m.c_fc(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlpf(self.norm(x))


class ClosureNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([ClosureBlock() for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class TwoLayers(nn.Module):
    """Two layers that `shaped` reaches in ways of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x))).square().mean()


def _scaled(module: nn.Module, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    return factor * F.linear(x, module.weight, module.bias)


def replaced_forward(how: str) -> TwoLayers:
    """A model of which a submodule's forward was replaced on the object."""
    model = TwoLayers()
    first = model.first
    inner = first.forward
    ways = {
        "closure": lambda x: 3 * F.linear(x, first.weight, first.bias),
        "wrapped": lambda x: 3 * inner(x),
        "default": lambda x, layer=first: 3 * F.linear(x, layer.weight, layer.bias),
        "partial": functools.partial(_scaled, first, factor=3.0),
        "method": types.MethodType(lambda self, x: _scaled(self, x, 3.0), first),
        "list": (lambda layers: lambda x: 3 * F.linear(x, layers[0].weight, layers[0].bias))([first]),
        "function": (lambda weigh: lambda x: 3 * F.linear(x, weigh(), first.bias))(lambda: first.weight),
    }
    first.forward = ways[how]  # type: ignore[method-assign,assignment]
    return model


WAYS = ("closure", "wrapped", "default", "partial", "method", "list", "function")

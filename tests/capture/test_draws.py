"""A draw that can't change anything does not stop a trace; one that can does."""

import pytest
import torch
from torch import Tensor, nn

from shardwright.capture import capture
from shardwright.errors import CaptureError


class Skipping(nn.Module):
    """Layers that are skipped at random, as transformers writes it."""

    def __init__(self, chance: float) -> None:
        super().__init__()
        self.chance = chance
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            drawn = torch.rand([])
            if self.training and drawn < self.chance:
                continue
            x = layer(x)
        return x


def targets(chance: float) -> list[str]:
    graph = capture(Skipping(chance), (torch.randn(2, 4),), {}).graph
    return [op.target for op in graph.ops]


def test_a_layer_that_is_never_skipped_is_in_the_graph():
    assert targets(0.0).count("aten.linear.default") == 2
    assert not any("rand" in target for target in targets(0.0))


def test_a_layer_that_is_always_skipped_is_not():
    assert targets(1.0).count("aten.linear.default") == 0


def test_a_layer_that_may_be_skipped_is_an_error_that_names_the_line():
    with pytest.raises(CaptureError, match=r"drawn < self\.chance"):
        targets(0.5)

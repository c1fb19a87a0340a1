"""Which ops draw random numbers: torch's own tag says it, and arguments say when they don't."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.capture import capture
from shardwright.rules import is_random


class Calls(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x)


def drawing(call, x):
    return [op for op in capture(Calls(call), (x,)).graph.ops if op.draws]


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.rrelu(x, training=True),
        lambda x: F.alpha_dropout(x, 0.5, training=True),
        lambda x: F.dropout2d(x, 0.5),
        lambda x: torch.rand_like(x),
        lambda x: torch.bernoulli(x.sigmoid()),
        lambda x: F.fractional_max_pool2d(x, 2, output_size=2),
        lambda x: x.clone().exponential_(),
    ],
)
def test_an_op_that_torch_tags_is_drawn_replicated_by_its_key(call):
    (op,) = drawing(call, torch.randn(2, 3, 4, 4))
    assert is_random(op)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.rrelu(x, training=False),
        lambda x: F.dropout(x, 0.0),
        lambda x: F.scaled_dot_product_attention(x, x, x),
        lambda x: F.normalize(x),  # its name has "normal" in it
    ],
)
def test_what_draws_nothing_is_not_random(call):
    assert not drawing(call, torch.randn(2, 3, 4, 4))


def test_dropout_is_drawn_by_position():
    (op,) = drawing(lambda x: F.dropout(x, 0.5), torch.randn(2, 3))
    assert not is_random(op)


def test_recurrent_layers_draw_where_they_drop():
    x = torch.randn(2, 3, 4)
    for dropout, training, random in ((0.5, True, True), (0.0, True, False), (0.5, False, False)):
        layer = nn.LSTM(4, 4, 2, dropout=dropout).train(training)
        assert any(op.draws for op in capture(layer, (x,)).graph.ops) is random


def test_a_custom_op_with_the_tag_draws():
    @torch.library.custom_op("shardwright_tests::noisy", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
    def noisy(x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    noisy.register_fake(torch.empty_like)
    (op,) = drawing(noisy, torch.randn(3))
    assert is_random(op)

"""What attention masks mean: proved on the ops that make them, or left as they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.capture import capture, run
from shardwright.ir import MaskStructure

from .masked_attention import CAUSAL, LENGTH, NONE, Attention, attention_of, mask_of, structured

# -- spellings of one and the same mask


def tril_ones(m, n):
    return torch.ones(n, n, dtype=torch.bool).tril()


def not_triu(m, n):
    return ~torch.triu(torch.ones(n, n), diagonal=1).bool()


def compared_positions(m, n):
    return torch.arange(n)[None, :] <= torch.arange(n)[:, None]


def differences(m, n):
    i = torch.arange(n)
    return (i.unsqueeze(1) - i.unsqueeze(0)) >= 0


def masked_fill_infinity(m, n):
    return torch.zeros(n, n, dtype=torch.float64).masked_fill(torch.ones(n, n).triu(1) == 1, NONE)


def where_infinity(m, n):
    return torch.where(tril_ones(m, n), 0.0, NONE).double()


def full_of_infinity(m, n):
    return torch.full((n, n), NONE, dtype=torch.float64).triu(1)


def smallest_number(m, n):
    mask = torch.full((n, n), torch.finfo(torch.float64).min, dtype=torch.float64)
    return torch.triu(mask, diagonal=1)[None, None].expand(2, 1, n, n)


def one_minus(m, n):
    return (1.0 - torch.ones(n, n, dtype=torch.float64).tril()) * torch.finfo(torch.float64).min


def smallest_number_written_in_place(m, n):
    """As the first versions of transformers did it."""
    mask, places = torch.full((n, n), torch.finfo(torch.float64).min, dtype=torch.float64), torch.arange(n)
    mask.masked_fill_(places < (places + 1).view(n, 1), 0)
    return mask[None, None].expand(2, 1, n, n)


def sum_of_two(m, n):
    return full_of_infinity(m, n) + torch.zeros(1, n, dtype=torch.float64)


def logarithm(m, n):
    return torch.log(torch.tril(torch.ones(n, n, dtype=torch.float64)))


def subsequent(m, n):
    return nn.Transformer.generate_square_subsequent_mask(n, dtype=torch.float64)


def buffer_slice(m, n):
    return m.bias[:, :, :n, :n] == 1


def held_constant(m, n):
    return m.constant


def vectorized(m, n):
    i = torch.arange(n)
    return torch.vmap(lambda q: torch.vmap(lambda k: k <= q)(i))(i)


def running_sum(m, n):
    i = torch.ones(n, dtype=torch.int64).cumsum(0) - 1
    return i[None] <= i[:, None]


def double_negation(m, n):
    return torch.logical_not(torch.logical_or(torch.ones(n, n).triu(1).bool(), torch.zeros(n, n).bool()))


def window_larger_than_the_sequence(m, n):
    i = torch.arange(n)
    return (i[None] <= i[:, None]) & (i[None] > i[:, None] - 100)


def eye_and_below(m, n):
    return torch.eye(n, dtype=torch.bool) | torch.ones(n, n, dtype=torch.bool).tril(-1)


def floats_of_positions(m, n):
    i = torch.arange(n, dtype=torch.float32)
    return i.view(1, 1, 1, n) <= i.view(1, 1, n, 1)


def joined_columns(m, n):
    """An op that the proof does not know, on constants: by value."""
    return torch.stack([torch.arange(n) >= k for k in range(n)], dim=1)


SPELLINGS = [
    tril_ones, not_triu, compared_positions, differences, masked_fill_infinity, where_infinity, full_of_infinity,
    smallest_number, one_minus, smallest_number_written_in_place, sum_of_two, logarithm, subsequent, buffer_slice,
    held_constant, vectorized, running_sum, double_negation, window_larger_than_the_sequence, eye_and_below,
    floats_of_positions, joined_columns,
]  # fmt: skip


@pytest.mark.parametrize("make_mask", SPELLINGS)
def test_causal_in_any_spelling_needs_no_mask(make_mask):
    op, graph = structured(make_mask)
    assert (op.mask, mask_of(op), op.argument("is_causal")) == (CAUSAL, None, True)
    assert not [value for value in graph.values.values() if value.shape[-2:] == (LENGTH, LENGTH)]
    assert not graph.notes


# -- near misses


def strictly_below(m, n):
    mask = torch.ones(n, n, dtype=torch.bool).tril(-1)
    mask[0, 0] = True  # a row that is masked entirely has no softmax
    return mask


def one_element_more(m, n):
    mask = torch.ones(n, n, dtype=torch.bool).tril()
    mask[2, 5] = True
    return mask


def a_bias(m, n):
    return torch.ones(n, n, dtype=torch.float64).tril()


def a_small_penalty(m, n):
    return torch.full((n, n), -10000.0, dtype=torch.float64).triu(1)


def distances(m, n):
    i = torch.arange(n)
    return -(i[:, None] - i[None]).abs().double()


def another_in_each_sample(m, n):
    return torch.arange(n)[None, None, None] <= torch.arange(n)[None, None, :, None] + torch.arange(2).view(2, 1, 1, 1)


@pytest.mark.parametrize(
    "make_mask",
    [strictly_below, one_element_more, a_bias, a_small_penalty, distances, another_in_each_sample],
)
def test_what_is_almost_causal_keeps_its_mask(make_mask):
    op, graph = structured(make_mask)
    assert op.mask != CAUSAL
    assert mask_of(op) is not None
    assert not op.argument("is_causal")
    (note,) = graph.notes
    assert "dense mask" in note


def test_a_window_that_depends_on_data_is_data():
    def make_mask(m, n, width):
        i = torch.arange(n)
        return (i[None] <= i[:, None]) & (i[None] > i[:, None] - width)

    op, graph = structured(make_mask, torch.tensor(4))
    assert op.mask is None
    assert mask_of(op) is not None
    assert "condition" in graph.notes[0]


# -- nothing is hidden


def test_a_mask_of_ones_is_dropped():
    for make_mask in (
        lambda m, n: torch.ones(2, 1, 1, n, dtype=torch.bool),
        lambda m, n: torch.zeros(n, n, dtype=torch.float64),
        lambda m, n: torch.arange(n)[None] >= 0,
        lambda m, n: (1.0 - torch.ones(2, n, dtype=torch.float64))[:, None, None, :] * torch.finfo(torch.float64).min,
    ):
        op, _ = structured(make_mask)
        assert (op.mask, mask_of(op), op.argument("is_causal")) == (MaskStructure(), None, None)


def test_the_proof_does_not_depend_on_the_length():
    """No tensor of this length is made: a mask of 65,536 by 65,536 would be 4 GiB."""
    model = Attention(compared_positions)
    for make_mask in (compared_positions, tril_ones, smallest_number):
        model.make_mask = make_mask
        graph = capture(model.double().to("meta"), (torch.randn(2, 1 << 16, 8, device="meta").double(),)).graph
        assert attention_of(graph).argument("is_causal")


# -- grouped heads


class Grouped(nn.Module):
    def __init__(self, repeat: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.q, self.kv, self.repeat = nn.Linear(8, 16), nn.Linear(8, 8), repeat

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (4, 4)).transpose(1, 2)
        k = self.kv(x).unflatten(-1, (2, 4))
        k = self.repeat(k)
        return F.scaled_dot_product_attention(q, k, k, is_causal=True).square().mean()


def expanded(k):
    k = k.transpose(1, 2)
    return k[:, :, None].expand(2, 2, 2, k.shape[2], 4).reshape(2, 4, k.shape[2], 4)


def interleaved(k):
    return k.transpose(1, 2).repeat_interleave(2, dim=1)


def before_the_transpose(k):
    return k[:, :, :, None, :].expand(2, k.shape[1], 2, 2, 4).reshape(2, k.shape[1], 4, 4).transpose(1, 2)


def tiled(k):
    return k.transpose(1, 2).repeat(1, 2, 1, 1)


@pytest.mark.parametrize(
    ("repeat", "folds"), [(expanded, True), (interleaved, True), (before_the_transpose, True), (tiled, False)]
)
def test_repeated_heads_fold_into_grouped_attention(repeat, folds):
    torch.manual_seed(0)
    model, x = Grouped(repeat).double(), torch.randn(2, 6, 8, dtype=torch.float64)
    captured = capture(model, (x,))
    op = attention_of(captured.graph)
    assert bool(op.argument("enable_gqa")) is folds
    assert captured.graph.values[op.inputs[1]].shape == ((2, 2, 6, 4) if folds else (2, 4, 6, 4))
    outputs, _, _ = run(captured, (x,), dict(model.named_parameters()), {})
    torch.testing.assert_close(outputs[0], model(x), rtol=1e-12, atol=1e-12)

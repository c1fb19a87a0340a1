"""Attention that runs by what its mask means: windows, offsets, prefixes, documents, padding. No mask is made."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.capture import capture, run
from shardwright.ir import MaskStructure
from shardwright.ops.attention import STRUCTURED

from .masked_attention import LENGTH, NONE, attention_of, mask_of, structured

SMALLEST = torch.finfo(torch.float64).min
IDS = torch.tensor([[1] * 3 + [2] * 7, [1] * 6 + [2] * 4])
UNSORTED = torch.tensor([[2, 2, 1, 1, 1, 2, 0, 0, 2, 1], [5, 5, 5, 3, 3, 3, 5, 5, 3, 3]])
PADDED = torch.tensor([[1] * 10, [1] * 5 + [0] * 5])
PADDED_LEFT = torch.tensor([[1] * 10, [0] * 5 + [1] * 5])


def causal(n):
    return torch.ones(n, n, dtype=torch.bool).tril()


def off_by_one(m, n):
    return torch.ones(n, n, dtype=torch.bool).tril(1)


def below(m, n):
    """The first query sees nothing."""
    return torch.ones(n, n, dtype=torch.bool).tril(-1)


def below_infinity(m, n):
    return torch.zeros(n, n, dtype=torch.float64).masked_fill(~below(m, n), NONE)


def upside_down(m, n):
    return torch.ones(n, n, dtype=torch.bool).triu()


def window(m, n):
    i = torch.arange(n)
    return (i[None] <= i[:, None]) & (i[None] > i[:, None] - 3)


def window_by_triangles(m, n):
    ones = torch.ones(n, n, dtype=torch.bool)
    return ones.tril() & ~ones.tril(-3)


def window_by_the_smallest_number(m, n):
    return torch.zeros(n, n, dtype=torch.float64).masked_fill(~window(m, n), SMALLEST)


def both_sides(m, n):
    i = torch.arange(n)
    return ((i[None] - i[:, None]) <= 2) & ((i[:, None] - i[None]) <= 2)


def prefix(m, n):
    i = torch.arange(n)
    return (i[None] <= i[:, None]) | (i[None] < 3)


def prefix_by_value(m, n):
    mask = causal(n)
    mask[:, :3] = True
    return mask


@pytest.mark.parametrize(
    ("make_mask", "structure"),
    [
        (off_by_one, MaskStructure(after=1)),
        (below, MaskStructure(after=-1)),
        (below_infinity, MaskStructure(after=-1)),
        (upside_down, MaskStructure(before=0)),
        (window, MaskStructure(after=0, before=2)),
        (window_by_triangles, MaskStructure(after=0, before=2)),
        (window_by_the_smallest_number, MaskStructure(after=0, before=2)),
        (both_sides, MaskStructure(after=2, before=2)),
        (prefix, MaskStructure(after=0, prefix=3)),
        (prefix_by_value, MaskStructure(after=0, prefix=3)),
    ],
)
def test_what_positions_decide_is_a_few_numbers(make_mask, structure):
    op, graph = structured(make_mask)
    assert (op.target, op.mask, len(op.inputs)) == (STRUCTURED, structure, 3)
    numbers = {name: op.argument(name) for name in ("before", "after", "prefix")}
    assert numbers == {"before": structure.before, "after": structure.after, "prefix": structure.prefix or None}
    assert not [value for value in graph.values.values() if value.shape[-2:] == (LENGTH, LENGTH)]
    assert not graph.notes


def causal_and_keys(m, n, padding):
    return causal(n) & padding[:, None, None, :].bool()


def causal_and_not_keys(m, n, padding):
    return causal(n) & ~(padding == 0)[:, None, None, :]


def added_causal_and_keys(m, n, padding):
    keys = torch.zeros(2, 1, 1, n, dtype=torch.float64).masked_fill(padding[:, None, None, :] == 0, NONE)
    return torch.full((n, n), NONE, dtype=torch.float64).triu(1) + keys


def two_paddings(m, n, padding):
    return causal(n) & padding[:, None, None, :].bool() & ~(padding == 7)[:, None, None, :]


def documents(m, n, ids):
    return (ids[:, None, :, None] == ids[:, None, None, :]) & causal(n)


def documents_both_ways(m, n, ids):
    return ids[:, None, :, None] == ids[:, None, None, :]


def documents_by_the_smallest_number(m, n, ids):
    return torch.zeros(2, 1, n, n, dtype=torch.float64).masked_fill(~documents(m, n, ids), SMALLEST)


def documents_and_keys(m, n, ids):
    return documents(m, n, ids) & (ids != 0)[:, None, None, :]


def positions_that_start_anew(m, n, ids):
    """As transformers finds packed documents."""
    starts = (ids[:, 1:] != ids[:, :-1]).cumsum(-1)
    ids = F.pad(starts, (1, 0))
    return documents(m, n, ids)


def chunks(m, n):
    chunk = torch.arange(n) // 4
    return (chunk[None] == chunk[:, None]) & causal(n)


@pytest.mark.parametrize(
    ("make_mask", "data", "said", "rows"),
    [
        (causal_and_keys, PADDED, "causal, padded keys", {"padding": (2, LENGTH)}),
        (causal_and_keys, PADDED_LEFT, "causal, padded keys", {"padding": (2, LENGTH)}),
        (causal_and_not_keys, PADDED_LEFT, "causal, padded keys", {"padding": (2, LENGTH)}),
        (added_causal_and_keys, PADDED_LEFT, "causal, padded keys", {"padding": (2, LENGTH)}),
        (two_paddings, PADDED_LEFT * 7 - torch.arange(10), "causal, padded keys", {"padding": (2, LENGTH)}),
        (documents, IDS, "causal, documents", {"documents": (2, LENGTH)}),
        (documents, UNSORTED, "causal, documents", {"documents": (2, LENGTH)}),
        (documents_both_ways, UNSORTED, "documents", {"documents": (2, LENGTH)}),
        (documents_by_the_smallest_number, UNSORTED, "causal, documents", {"documents": (2, LENGTH)}),
        (documents_and_keys, UNSORTED, "causal, documents", {"documents": (2, LENGTH), "padding": (2, LENGTH)}),
        (positions_that_start_anew, UNSORTED, "causal, documents", {"documents": (2, LENGTH)}),
        (chunks, None, "causal, documents", {"documents": (1, LENGTH)}),
    ],
)
def test_what_data_decides_is_a_row_for_each_sample(make_mask, data, said, rows):
    op, graph = structured(make_mask, *([] if data is None else [data]))
    assert op.target == STRUCTURED
    assert str(op.mask).startswith(said)
    arguments = {"documents": ("query_documents", "key_documents"), "padding": ("padding",)}
    for name, shape in rows.items():
        for argument in arguments[name]:
            value = op.tensor(argument)
            assert value is not None
            assert graph.values[value].shape == shape
    assert not [value for value in graph.values.values() if value.shape[-2:] == (LENGTH, LENGTH)]
    assert not graph.notes


def test_padding_alone_is_a_mask_of_keys():
    for make_mask in (
        lambda m, n, keys: keys[:, None, None, :].bool().expand(2, 1, n, n),
        lambda m, n, keys: keys[:, None, None, :].bool() & torch.ones(n, n, dtype=torch.bool),
    ):
        op, graph = structured(make_mask, PADDED_LEFT)
        mask = mask_of(op)
        assert mask is not None
        assert graph.values[mask].shape == (2, 1, 1, LENGTH)
        assert not [value for value in graph.values.values() if value.shape[-2:] == (LENGTH, LENGTH)]
        assert not graph.notes


# -- what keeps its mask


def padded_by_the_smallest_number(m, n, padding):
    """A query of the first keys sees nothing, and has uniform weights over all."""
    seen = causal_and_keys(m, n, padding)
    return torch.zeros(2, 1, n, n, dtype=torch.float64).masked_fill(~seen, SMALLEST)


def below_by_the_smallest_number(m, n):
    return torch.zeros(n, n, dtype=torch.float64).masked_fill(~below(m, n), SMALLEST)


@pytest.mark.parametrize(
    ("make_mask", "data"), [(padded_by_the_smallest_number, (PADDED_LEFT,)), (below_by_the_smallest_number, ())]
)
def test_a_query_that_may_see_nothing_keeps_uniform_weights(make_mask, data):
    op, graph = structured(make_mask, *data)
    assert mask_of(op) is not None
    assert "uniform weights" in graph.notes[0]


def test_padding_by_head_keeps_its_mask():
    def make_mask(m, n, flags):
        return flags[None, :, None, :].bool() & causal(n)

    op, graph = structured(make_mask, PADDED)  # two rows, and as many heads as samples
    assert mask_of(op) is not None
    assert "not one row for each sample" in graph.notes[0]


class Dropped(nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            q, q, q, window(self, q.shape[-2]), dropout_p=0.5 if self.training else 0.0
        )


def test_dropout_keeps_its_mask():
    q = torch.randn(2, 2, LENGTH, 4)
    dropped = capture(Dropped(), (q,))
    assert mask_of(attention_of(dropped.graph)) is not None
    assert "attention has dropout" in dropped.graph.notes[0]
    assert attention_of(capture(Dropped().eval(), (q,)).graph).target == STRUCTURED


class Cross(nn.Module):
    """Another number of keys than of queries."""

    def __init__(self, offset: int) -> None:
        super().__init__()
        self.offset = offset

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(self.offset)
        return F.scaled_dot_product_attention(q, k, k, mask).square().mean()


@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("lengths", [(5, 8), (8, 5)])
def test_causal_with_another_number_of_keys(lengths, offset):
    q, k = (torch.randn(2, 2, length, 4, dtype=torch.float64) for length in lengths)
    captured = capture(Cross(offset), (q, k))
    op = attention_of(captured.graph)
    assert (op.target, op.mask) == (STRUCTURED, MaskStructure(after=offset))
    outputs, _, _ = run(captured, (q, k), {}, {})
    torch.testing.assert_close(outputs[0], Cross(offset)(q, k), rtol=1e-12, atol=1e-12)


def test_attention_of_three_dims_keeps_its_mask():
    q = torch.randn(2, LENGTH, 4)
    captured = capture(Cross(1), (q, q))
    assert mask_of(attention_of(captured.graph)) is not None
    assert "[batch, heads, length, width]" in captured.graph.notes[0]


def test_the_proof_does_not_depend_on_the_length():
    """No tensor of this length is made: a mask of 65,536 by 65,536 would be 4 GiB."""
    q = torch.randn(2, 2, 1 << 16, 4, device="meta")
    op = attention_of(capture(Cross(1), (q, q)).graph)
    assert (op.target, op.argument("after")) == (STRUCTURED, 1)

"""Packed documents that are told by positions which start anew, as transformers writes them, and near misses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardwright.ir import MaskStructure
from shardwright.ops.attention import STRUCTURED

from .masked_attention import mask_of, structured

POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 0, 1], [5, 6, 3, 4, 5, 6, 7, 0, 0, 1]])


def breaks(positions: Tensor, step: int = 1, **options: Tensor) -> Tensor:
    first = options.get("prepend", positions[:, :1] - 1)
    return torch.diff(positions, prepend=first, dim=-1) != step


def packed(positions: Tensor, ids: Tensor, window: int | None = None) -> Tensor:
    q, k = positions[:, None, :, None], positions[:, None, None, :]
    mask = (ids[:, None, :, None] == ids[:, None, None, :]) & (k <= q)
    return mask if window is None else mask & (k > q - window)


def causal(m, n, positions):
    return packed(positions, breaks(positions).cumsum(-1))


def window(m, n, positions):
    return packed(positions, breaks(positions).cumsum(-1), 3)


def window_on_the_other_side(m, n, positions):
    ids = breaks(positions).cumsum(-1)
    q, k = positions[:, None, :, None], positions[:, None, None, :]
    return (ids[:, None, :, None] == ids[:, None, None, :]) & (q >= k) & (q < k + 3)


def not_later(m, n, positions):
    ids = breaks(positions).cumsum(-1)
    q, k = positions[:, None, :, None], positions[:, None, None, :]
    return (ids[:, None, :, None] == ids[:, None, None, :]) & ~(q < k)


def one_row_for_all(m, n, positions):
    positions = positions[:1].expand(2, -1)
    return packed(positions, breaks(positions).cumsum(-1))


@pytest.mark.parametrize(
    ("make_mask", "before"),
    [(causal, None), (window, 2), (window_on_the_other_side, 2), (not_later, None), (one_row_for_all, None)],
)
def test_conditions_on_positions_of_one_document_are_conditions_on_places(make_mask, before):
    op, graph = structured(make_mask, POSITIONS)
    assert op.target == STRUCTURED
    assert op.mask == MaskStructure(before=before, after=0, documents=op.tensor("key_documents"))
    assert not graph.notes


def starts(m, n, positions):
    """Within such a document positions may jump."""
    return packed(positions, (positions == 0).cumsum(-1))


def steps_of_two(m, n, positions):
    return packed(positions, breaks(positions, 2).cumsum(-1))


def along_samples(m, n, positions):
    return packed(positions, breaks(positions).cumsum(0))


def later_ids(m, n, positions):
    """Ids of the place before: with two elements in front there is one more."""
    front = torch.cat([positions[:, :1], positions[:, :1]], 1)
    return packed(positions, breaks(positions, prepend=front)[:, :-1].cumsum(-1))


def other_positions(m, n, positions):
    return packed(positions.flip(-1), breaks(positions).cumsum(-1))


def across_samples(m, n, positions):
    ids = breaks(positions).cumsum(-1)
    q, k = positions[:1, None, :, None], positions[:, None, None, :]
    return (ids[:1, None, :, None] == ids[:, None, None, :]) & (k <= q)


def of_another_sample(m, n, positions):
    ids = breaks(positions).cumsum(-1)
    row = positions[:1].expand(2, -1)
    return packed(row, ids)


def without_documents(m, n, positions):
    return positions[:, None, None, :] <= positions[:, None, :, None]


def by_absolute_position(m, n, positions):
    ids = breaks(positions).cumsum(-1)
    return packed(positions, ids) & (positions[:, None, None, :] >= positions[:1, :1, None, None])


@pytest.mark.parametrize(
    "make_mask",
    [starts, steps_of_two, along_samples, later_ids, other_positions, across_samples, of_another_sample,
     without_documents, by_absolute_position],
)  # fmt: skip
def test_what_is_not_proved_keeps_its_mask(make_mask):
    op, graph = structured(make_mask, POSITIONS)
    assert mask_of(op) is not None
    assert "dense mask" in graph.notes[0]

"""Looking up rows in a table that is split on its rows.

Every rank looks up the ids whose rows it holds and gives zeros for the others, so that
the result is a partial sum, and each rank's gradient goes to its own rows only. The
caller sums (or sums and scatters) as its plan says.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.errors import LayoutError
from shardwright.layout import Shard

from ..collectives import blocks
from ..world import Group


def embedding_rows(
    ids: Tensor,
    weight: Tensor,
    group: Group,
    sharding: Shard | None = None,
    *,
    rows: int | None = None,
    padding_idx: int | None = None,
) -> Tensor:
    """`F.embedding` with this rank's rows of the table: a partial sum over the group."""
    if group.process_group is None:
        return F.embedding(ids, weight, padding_idx)
    sharding = sharding or blocks.plain(weight.shape[0] * group.size)
    if rows is not None and rows != sharding.elements:
        raise LayoutError(
            f"a table of {rows} rows over {' '.join(group.axes)} is sharded as if it had {sharding.elements}"
        )
    if weight.shape[0] != sharding.local(group.size, group.index):
        raise LayoutError(
            f"rank {group.index} of {' '.join(group.axes)} holds {weight.shape[0]} rows of a table of "
            f"{sharding.elements}, and should hold {sharding.local(group.size, group.index)}; pass the sharding of an "
            "uneven table"
        )
    torch._assert_async(
        ((ids >= 0) & (ids < sharding.elements)).all(), f"an id is not in a table of {sharding.elements} rows"
    )
    place, own = blocks.locate(ids, sharding, group.size, group.index)
    if padding_idx is not None:  # its row is read, and gets no gradient
        padding_idx = _local_row(padding_idx % sharding.elements, sharding, group)
    if weight.shape[0] == 0:  # a row of zeros to read, so that backward runs here as on the other ranks
        weight = F.pad(weight, (0, 0, 0, 1))
    return F.embedding(place, weight, padding_idx).masked_fill(~own.unsqueeze(-1), 0.0)


def _local_row(row: int, sharding: Shard, group: Group) -> int | None:
    at = 0
    for start, length in sharding.spans(group.size, group.index):
        if start <= row < start + length:
            return at + row - start
        at += length
    return None

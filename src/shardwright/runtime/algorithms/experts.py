"""A layer of experts that is split on its experts: tokens travel to where their experts are, and back.

    this rank's tokens, each with k experts
        │  sorted by the rank that holds the expert         all_to_all: how many
        ▼
    tokens, weights, local expert indices                   all_to_all: the tokens
        │  the layer itself, on this rank's experts, one expert a row
        ▼
    results, back to the rank they came from                all_to_all: the results
        │  put in order, summed over the k experts
        ▼
    this rank's tokens

The layer runs as the user wrote it: `layer(tokens, index, weights)`. Loads may be as uneven as they
like, and a rank that gets no token still takes part (its experts have gradients of zero).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.layout import Shard

from ..collectives import comm, process_group
from ..faults import flight_recorder
from ..world import Group

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(tokens [t, d], experts of each [t, k], their weights [t, k]) -> [t, d]"""


def experts(layer: Layer, hidden: Tensor, index: Tensor, weights: Tensor, group: Group, sharding: Shard) -> Tensor:
    """The output of `layer` for this rank's tokens, where every rank of the group has its shard of the experts."""
    if group.process_group is None:
        return layer(hidden, index, weights)
    k = index.shape[-1]
    owner, place = _owners(sharding, group.size, index.device)
    flat = index.reshape(-1)
    torch._assert_async(
        ((flat >= 0) & (flat < sharding.elements)).all(), f"an expert is not one of {sharding.elements}"
    )
    order = torch.argsort(owner[flat], stable=True)
    send_counts = torch.bincount(owner[flat], minlength=group.size)
    recv_counts = _send(send_counts, None, None, group)
    out, back = send_counts.tolist(), recv_counts.tolist()
    tokens = _travel(hidden[order // k], out, back, group)
    shares = _travel(weights.reshape(-1)[order], out, back, group)
    numbers = _send(place[flat[order]], out, back, group)
    results = _travel(_local(layer, tokens, numbers, shares), back, out, group)
    ordered = torch.zeros_like(results).index_copy(0, order, results)
    return ordered.view(hidden.shape[0], k, -1).sum(1)


def _local(layer: Layer, tokens: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
    """The layer on tokens that have one expert each. Without tokens it runs on a dummy one, so that backward runs."""
    count = tokens.shape[0]
    if count == 0:
        tokens = torch.cat([tokens, tokens.new_zeros(1, *tokens.shape[1:])])
        numbers, weights = numbers.new_zeros(1), torch.cat([weights, weights.new_zeros(1)])
    return layer(tokens, numbers[:, None], weights[:, None])[:count]


@lru_cache(maxsize=256)
def _owners(sharding: Shard, ranks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """For each expert the rank that holds it, and its number there."""
    owner = torch.empty(sharding.elements, dtype=torch.long)
    place = torch.empty(sharding.elements, dtype=torch.long)
    for rank in range(ranks):
        at = 0
        for start, length in sharding.spans(ranks, rank):
            owner[start : start + length] = rank
            place[start : start + length] = torch.arange(at, at + length)
            at += length
    return owner.to(device), place.to(device)


def _travel(x: Tensor, out: list[int], back: list[int], group: Group) -> Tensor:
    """Send tokens to other ranks; backward sends their gradients back."""
    return comm.reshard(x, lambda x: _send(x, out, back, group), lambda g: _send(g, back, out, group))


def _send(x: Tensor, out: list[int] | None, back: list[int] | None, group: Group) -> Tensor:
    """all_to_all of dim 0 with these counts for each rank; the counts themselves go evenly."""
    comm.note("all_to_all", group, tuple(x.shape))
    flight_recorder.enter("all_to_all", group.process_group, x.shape)
    got = x.new_empty(sum(back) if back is not None else x.shape[0], *x.shape[1:])
    if out is None:
        process_group.all_to_all(got, x.contiguous(), group.process_group).wait()
    else:  # uneven counts, which shared memory does not support
        dist.all_to_all_single(got, x.contiguous(), back, out, group=group.process_group)
    return got

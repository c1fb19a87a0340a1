"""Attention on shards of a sequence (context parallelism): each rank has the queries of its places.

Keys are either all there, gathered before, or sharded as well and sent from rank to rank. This is ring attention: at
step i a rank has the keys of the rank i before it, while those of the next step are on their way.

    step          0         1         2         3          what rank r reads
    rank 0      k0 ████   k3 ░░░░   k2 ░░░░   k1 ░░░░      causal attention of contiguous shards: ░ sees nothing, and
    rank 1      k1 ████   k0 ████   k3 ░░░░   k2 ░░░░      the last rank does all the work. Striped shards (rank r of n
    rank 2      k2 ████   k1 ████   k0 ████   k3 ░░░░      has the places r, r + n, ...) see half of the pairs
    rank 3      k3 ████   k2 ████   k1 ████   k0 ████      everywhere.

Each block gives a result with the log-sum-exp of its scores, by which results are joined (`attention_blocks.py`).
Backward goes around once more; the gradients of keys go straight back to the rank that has the keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from shardwright.errors import InputError, LayoutError
from shardwright.layout import Shard

from ..collectives import blocks, comm
from ..world import Group
from .attention_blocks import Places, Visibility, attend, attend_backward, merge
from .random import Splits


def context_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    ring: Group | None = None,
    sharding: Shard | None = None,
    splits: Splits | None = None,
) -> Tensor:
    """`F.scaled_dot_product_attention` of this rank's queries.

    ring       the ranks that share keys and values by `sharding`; None if this rank has all of them
    splits     what shards the queries, if not the same
    attn_mask  its rows are this rank's queries, its columns all keys
    """
    keys = _key_places(key.shape[-2], ring, sharding)
    if splits is None:
        assert ring is not None
        splits = [(-2, ring, sharding)]
    queries = _query_places(query.shape[-2], splits)
    call = _Call(queries, keys, Visibility(after=0 if is_causal else None), attn_mask, scale, ring)
    return _attention(query, key, value, call)


def _attention(query: Tensor, key: Tensor, value: Tensor, call: _Call) -> Tensor:
    out: Tensor = _ContextAttention.apply(query, key, value, call)  # type: ignore[no-untyped-call]
    return out


# -- places


def _query_places(count: int, splits: Splits) -> Places:
    sizes = tuple((group.size, group.index, sharding) for _, group, sharding in splits)
    return _places(count, sizes)


def _key_places(count: int, ring: Group | None, sharding: Shard | None) -> tuple[Places, ...]:
    """The places of the keys of each rank of a ring."""
    if ring is None:
        return (Places(0, 1, count),)
    total = sharding.elements if sharding else count * ring.size
    shard = sharding or blocks.plain(total)
    lengths = [shard.local(ring.size, index) for index in range(ring.size)]
    return tuple(_places(length, ((ring.size, index, shard),)) for index, length in enumerate(lengths))


@lru_cache(maxsize=4096)
def _places(count: int, sizes: tuple[tuple[int, int, Shard | None], ...]) -> Places:
    """The positions of one shard of a sequence, which are evenly spaced whether it is contiguous or striped."""
    total = count
    for parts, _, sharding in reversed(sizes):
        total = total * parts if sharding is None else sharding.elements
    at = torch.arange(total)
    for parts, index, sharding in sizes:
        at = blocks.shard(at, 0, sharding or blocks.plain(len(at)), parts, index)
    step = int(at[1] - at[0]) if len(at) > 1 else 1
    start = int(at[0]) if len(at) else 0
    if not torch.equal(at, start + step * torch.arange(count)):
        raise LayoutError(f"attention knows contiguous and striped shards of a sequence, not {sizes}")
    return Places(start, step, count)


# -- the blocks of keys that a rank goes through


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """One call: where its queries are, where the keys of each rank are, and who sees what."""

    queries: Places
    keys: tuple[Places, ...]
    visible: Visibility
    mask: Tensor | None
    scale: float | None
    ring: Group | None

    @property
    def index(self) -> int:
        return self.ring.index if self.ring else 0

    @property
    def largest(self) -> int:
        """How many keys the rank with the most has: all send as many."""
        return max(places.count for places in self.keys)


class _Block(NamedTuple):
    """Keys and values of one rank, which is `step` ranks away."""

    step: int
    key: Tensor
    value: Tensor
    keys: Places


def _steps(call: _Call) -> list[int]:
    """The steps at which some rank sees something; all ranks find the same, as they must."""
    ring = call.ring
    if ring is None or call.mask is not None:
        return list(range(len(call.keys)))
    window = call.visible.before
    if window is None:
        return list(range(ring.size))
    return [
        step
        for step in range(ring.size)
        if any(_in_reach(call.keys[rank], call.keys[rank - step], window) for rank in range(ring.size))
    ]


def _in_reach(queries: Places, keys: Places, window: int) -> bool:
    """Whether a query of some places may see a key of others that are before it."""
    last_key = keys.start + keys.step * (keys.count - 1)
    return keys.count > 0 and queries.count > 0 and last_key >= queries.start - window


def _blocks(key: Tensor, value: Tensor, call: _Call) -> Iterator[_Block]:
    """The keys and values that this rank looks at, own ones first; the next are sent while these are used."""
    if call.ring is None:
        yield _Block(0, key, value, call.keys[0])
        return
    packed = _packed(key, value, call.largest)
    steps = _steps(call)
    arriving: Callable[[], Tensor] = lambda: packed  # noqa: E731
    for step, following in zip(steps, (*steps[1:], None), strict=True):
        received = arriving()
        if following is not None:
            arriving = comm.shift_async(packed, following, call.ring)
        keys = call.keys[(call.index - step) % call.ring.size]
        block = (key, value) if step == 0 else _unpacked(received, key, value, call.largest, keys.count)
        yield _Block(step, *block, keys)


def _packed(key: Tensor, value: Tensor, largest: int) -> Tensor:
    """Keys and values, or their gradients, as one message."""
    return torch.cat([pad(x, (0, 0, 0, largest - x.shape[-2])).flatten() for x in (key, value)])


def _unpacked(packed: Tensor, key: Tensor, value: Tensor, largest: int, count: int) -> tuple[Tensor, Tensor]:
    shapes = [(*x.shape[:-2], largest, x.shape[-1]) for x in (key, value)]
    parts = torch.split(packed, [math.prod(shape) for shape in shapes])
    k, v = (part.view(shape).narrow(-2, 0, count) for part, shape in zip(parts, shapes, strict=True))
    return k, v


def _seen(call: _Call, keys: Places) -> Visibility:
    """Who sees what of a block."""
    if call.mask is None:
        return call.visible
    columns = slice(keys.start, keys.start + keys.step * keys.count, keys.step)
    return replace(call.visible, dense=call.mask[..., columns])


class _ContextAttention(torch.autograd.Function):
    """Attention over the blocks of keys of all ranks."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: _Call) -> Tensor:
        result: tuple[Tensor, Tensor] | None = None
        for block in _blocks(key, value, call):
            visible = _seen(call, block.keys)
            part = attend(query, block.key, block.value, call.queries, block.keys, visible, call.scale)
            result = part if result is None else merge(*result, *part)
        assert result is not None
        out, lse = result[0].to(query.dtype), result[1]
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True: what is made here would have no gradient
            raise InputError(
                "gradients of gradients don't go through attention that is split on the sequence; use a plan without cp, "
                "or compute the penalty without create_graph=True"
            )
        query, key, value, out, lse = ctx.saved_tensors
        call: _Call = ctx.call
        totals = [torch.zeros_like(x, dtype=lse.dtype) for x in (query, key, value)]
        returning: list[Callable[[], Tensor]] = []
        for block in _blocks(key, value, call):
            visible = _seen(call, block.keys)
            dq, dk, dv = attend_backward(
                grad_out, query, block.key, block.value, out, lse, call.queries, block.keys, visible, call.scale
            )
            totals[0] += dq
            if block.step == 0:
                totals[1] += dk
                totals[2] += dv
                continue
            assert call.ring is not None
            returning.append(comm.shift_async(_packed(dk, dv, call.largest), -block.step, call.ring))
        for arrived in returning:
            parts = _unpacked(arrived(), key, value, call.largest, key.shape[-2])
            for total, part in zip(totals[1:], parts, strict=True):
                total += part
        return *(total.to(x.dtype) for total, x in zip(totals, (query, key, value), strict=True)), None


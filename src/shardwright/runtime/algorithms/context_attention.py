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

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from shardwright.errors import InputError, LayoutError
from shardwright.layout import Shard

from ..collectives import blocks
from ..collectives.ring import shift_async
from ..world import Group
from .attention_blocks import Places, Visibility, attend, attend_backward, dense_mask, merge
from .random import Splits


def context_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    before: int | None = None,
    after: int | None = None,
    prefix: int = 0,
    documents: Documents | None = None,
    padding: Tensor | None = None,
    scale: float | None = None,
    ring: Group | None = None,
    sharding: Shard | tuple[Shard, ...] | None = None,
    splits: Splits | None = None,
) -> Tensor:
    """Attention of this rank's queries: `F.scaled_dot_product_attention`, or with a structure `runtime.attention`.

    ring       the ranks that share keys and values by `sharding`; None if this rank has all of them. Over several axes
               it may be a shard for each, major to minor, of a size that divides
    splits     what shards the queries, if not the same
    attn_mask  its rows are this rank's queries, its columns all keys; padding and ids of documents are of all keys too
    """
    aligned = splits is None
    keys = _key_places(key.shape[-2], ring, sharding)
    queries = keys[_known(ring).index] if splits is None else _query_places(query.shape[-2], splits)
    of_queries, of_keys = documents if isinstance(documents, tuple) else (documents, documents)
    visible = Visibility(before, 0 if is_causal else after, prefix, of_queries, of_keys, padding, attn_mask)
    return attend_blocks(query, key, value, AttentionCall(queries, keys, visible, scale, ring, aligned=aligned))


def _known(ring: Group | None) -> Group:
    assert ring is not None  # queries that nothing shards need no algorithm
    return ring


def attend_blocks(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
    """Attention with its gradients, in the dtypes that torch's own has under autocast."""
    if query.dim() != 4:
        return _in_four_dims(query, key, value, call)
    device = query.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return _applied(query, key, value, call)
    dtype = torch.get_autocast_dtype(device)
    query, key, value = (x if x.dtype is torch.float64 else x.to(dtype) for x in (query, key, value))
    with torch.autocast(device, enabled=False):  # inputs are cast, as torch casts those of attention, and no more
        return _applied(query, key, value, call)


def _in_four_dims(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
    """Attention without a batch or heads, or with more dims before them: kernels take [B, heads, S, E]."""
    if query.dim() < 3:
        return _in_four_dims(query[None], key[None], value[None], call)[0]
    batch = torch.broadcast_shapes(*(x.shape[:-3] for x in (query, key, value)))

    def flat(x: Tensor) -> Tensor:
        return x.expand(*batch, *x.shape[-3:]).reshape(-1, *x.shape[-3:])

    dense = call.visible.dense
    if dense is not None and dense.dim() > 3:
        call = replace(call, visible=replace(call.visible, dense=flat(dense)))
    out = attend_blocks(flat(query), flat(key), flat(value), call)
    return out.reshape(*batch, *out.shape[-3:])


def _applied(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
    visible = call.visible
    if call.ring is None and not torch._C._get_flash_sdp_enabled():  # of all devices: `sdpa_kernel(SDPBackend.MATH)`
        mask = dense_mask(call.queries, call.keys[0], visible, query.device)
        return scaled_dot_product_attention(query, key, value, mask, scale=call.scale, enable_gqa=True)
    data = (visible.query_documents, visible.key_documents, visible.padding, visible.dense)
    out: Tensor = _Attention.apply(query, key, value, *data, call)  # type: ignore[no-untyped-call]
    return out


Documents = Tensor | tuple[Tensor, Tensor]
"""Ids of documents [B, S], or a pair of them for queries and for keys."""


# -- places


def _query_places(count: int, splits: Splits) -> Places:
    sizes = tuple((group.size, group.index, sharding) for _, group, sharding in splits)
    return _places(count, sizes)


def _key_places(count: int, ring: Group | None, sharding: Shard | tuple[Shard, ...] | None) -> tuple[Places, ...]:
    """The places of the keys of each rank of a ring."""
    if ring is None:
        return (Places(0, 1, count),)
    if isinstance(sharding, tuple):  # even ones, whose blocks have as many units as there are ranks
        sizes = [shard.blocks[0].size for shard in sharding]
        every = itertools.product(*map(range, sizes))  # the order of the ranks of a group
        return tuple(_places(count, tuple(zip(sizes, index, sharding, strict=True))) for index in every)
    shard = sharding or blocks.plain(count * ring.size)
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
class AttentionCall:
    """One call: where its queries are, where the keys of each rank are, and who sees what.

    aligned    the queries of each rank of the ring are where its keys are
    """

    queries: Places
    keys: tuple[Places, ...]
    visible: Visibility
    scale: float | None
    ring: Group | None = None
    aligned: bool = False

    @property
    def index(self) -> int:
        return self.ring.index if self.ring else 0

    @property
    def largest(self) -> int:
        """How many keys the rank with the most has: all send as many."""
        return max(places.count for places in self.keys)


class _KeyBlock(NamedTuple):
    """Keys and values of one rank, which is `step` ranks away."""

    step: int
    key: Tensor
    value: Tensor
    keys: Places


def _steps(call: AttentionCall) -> list[int]:
    """The steps at which some rank sees something, and the first, which needs no message; the same on all ranks."""
    visible, ranks = call.visible, range(len(call.keys))
    if not call.aligned or visible.dense is not None or visible.prefix:
        return list(ranks)
    reached = [any(_in_reach(call.keys[r], call.keys[r - step], visible) for r in ranks) for step in ranks]
    return [step for step in ranks if step == 0 or reached[step]]


def _in_reach(queries: Places, keys: Places, visible: Visibility) -> bool:
    """Whether a query of some places may see a key of others."""
    if not queries.count or not keys.count:
        return False
    last_query, last_key = (places.start + places.step * (places.count - 1) for places in (queries, keys))
    near = visible.before is None or last_key >= queries.start - visible.before
    return near and (visible.after is None or keys.start <= last_query + visible.after)


def _blocks(key: Tensor, value: Tensor, call: AttentionCall) -> Iterator[_KeyBlock]:
    """The keys and values that this rank looks at, own ones first; the next are sent while these are used."""
    if call.ring is None:
        yield _KeyBlock(0, key, value, call.keys[0])
        return
    if call.ring.process_group is None and call.ring.size > 1:
        raise LayoutError(f"keys can't travel over {' '.join(call.ring.axes)}, which is no axis of ranks")
    packed = _packed(key, value, call.largest)
    steps = _steps(call)
    arriving: Callable[[], Tensor] = lambda: packed  # noqa: E731
    for step, following in zip(steps, (*steps[1:], None), strict=True):
        received = arriving()
        if following is not None:
            arriving = shift_async(packed, following, call.ring)
        keys = call.keys[(call.index - step) % call.ring.size]
        block = (key, value) if step == 0 else _unpacked(received, key, value, call.largest, keys.count)
        yield _KeyBlock(step, *block, keys)


def _packed(key: Tensor, value: Tensor, largest: int) -> Tensor:
    """Keys and values, or their gradients, as one message."""
    return torch.cat([pad(x, (0, 0, 0, largest - x.shape[-2])).flatten() for x in (key, value)])


def _unpacked(packed: Tensor, key: Tensor, value: Tensor, largest: int, count: int) -> tuple[Tensor, Tensor]:
    shapes = [(*x.shape[:-2], largest, x.shape[-1]) for x in (key, value)]
    parts = torch.split(packed, [math.prod(shape) for shape in shapes])
    k, v = (part.view(shape).narrow(-2, 0, count) for part, shape in zip(parts, shapes, strict=True))
    return k, v


def _seen(call: AttentionCall, keys: Places) -> Visibility:
    """Who sees what of a block: the columns of its keys."""
    visible = call.visible
    if call.ring is None:
        return visible
    columns = slice(keys.start, keys.start + keys.step * keys.count, keys.step)
    documents, padding, dense = (
        None if x is None else x[..., columns] for x in (visible.key_documents, visible.padding, visible.dense)
    )
    return replace(visible, key_documents=documents, padding=padding, dense=dense)


class _Attention(torch.autograd.Function):
    """Attention over the blocks of keys of all ranks.

    The tensors of `call.visible` are arguments too, so that autograd looks after them.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, of_queries: Tensor | None, of_keys: Tensor | None,
        padding: Tensor | None, dense: Tensor | None, call: AttentionCall,
    ) -> Tensor:  # fmt: skip
        result: tuple[Tensor, Tensor] | None = None
        for block in _blocks(key, value, call):
            visible = _seen(call, block.keys)
            part = attend(query, block.key, block.value, call.queries, block.keys, visible, call.scale)
            result = part if result is None else merge(*result, *part)
        assert result is not None
        out, lse = result[0].to(query.dtype), result[1]
        ctx.save_for_backward(query, key, value, out, lse, of_queries, of_keys, padding, dense)
        visible = call.visible
        ctx.call = replace(call, visible=Visibility(visible.before, visible.after, visible.prefix))
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True: what is made here would have no gradient
            raise InputError(
                "gradients of gradients (create_graph=True) don't go through this attention, as they don't through "
                "torch's fused one; run the step under sdpa_kernel(SDPBackend.MATH) of torch.nn.attention, with a plan "
                "that does not split keys, or compute the penalty without them"
            )
        query, key, value, out, lse, *data = ctx.saved_tensors
        limits = ctx.call.visible
        call = replace(ctx.call, visible=Visibility(limits.before, limits.after, limits.prefix, *data))
        if call.ring is None:  # nothing to add up
            places = (call.queries, call.keys[0], call.visible, call.scale)
            return *attend_backward(grad_out, query, key, value, out, lse, *places), *(None,) * 5
        totals = [torch.zeros_like(x, dtype=lse.dtype) for x in (query, key, value)]
        returning: deque[Callable[[], Tensor]] = deque()

        def add_returned(at_most: int) -> None:
            while len(returning) > at_most:
                parts = _unpacked(returning.popleft()(), key, value, call.largest, key.shape[-2])
                for total, part in zip(totals[1:], parts, strict=True):
                    total += part

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
            returning.append(shift_async(_packed(dk, dv, call.largest), -block.step, call.ring))
            add_returned(1)  # one is on its way while the next block is computed
        add_returned(0)
        gradients = (total.to(x.dtype) for total, x in zip(totals, (query, key, value), strict=True))
        return *gradients, *(None,) * 5

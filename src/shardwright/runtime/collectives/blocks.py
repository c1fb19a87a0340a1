"""Sharding a dim of a tensor in blocks, and joining the shards again.

A `Shard` names the spans of a fused dim that belong to each rank (see `shardwright.layout`). Here
the same spans are sliced from real tensors, without a loop over spans: the dim is viewed as

    global  [repeat, sections: outer x size x inner]
    local   [repeat, sections: outer x u x inner]        u = this rank's share of size

and each section is one strided view, so a dim of 80 fused heads costs one copy. Nothing
here communicates. Where collectives need equal shards, a shard is padded at its end to
the size of the largest, which is always the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shardwright.errors import InputError, LayoutError
from shardwright.layout import Block, Shard, chunk_bounds


def plain(size: int) -> Shard:
    """The contiguous sharding of a dim of `size` elements, over any axis."""
    return Shard(axis="", blocks=(Block(1, size, 1),))


def shard(x: Tensor, dim: int, sharding: Shard, parts: int, index: int) -> Tensor:
    """Shard `index` of `parts` of a global tensor: a view where it is one span."""
    if x.layout != torch.strided:
        raise InputError(
            f"the plan splits a sparse input {list(x.shape)} along dim {dim}, and sparse tensors can't be sharded; "
            "pass it dense, or use a plan that replicates it, such as tp"
        )
    dim %= x.ndim
    _expect(x, dim, sharding.elements, sharding)
    if sharding.simple(parts):
        block = sharding.blocks[0]
        start, length = chunk_bounds(block.size, parts, index)
        return x.narrow(dim, start * block.inner, length * block.inner)
    views = [view.flatten(dim + 1, dim + 3) for view in _global_views(x, dim, sharding, parts, index)]
    local = views[0] if len(views) == 1 else torch.cat(views, dim + 1)
    return local.flatten(dim, dim + 1)


def write_shard(out: Tensor, local: Tensor, dim: int, sharding: Shard, parts: int, index: int) -> None:
    """Write shard `index` into a global tensor, in place."""
    dim %= out.ndim
    _expect(out, dim, sharding.elements, sharding)
    _expect(local, dim, sharding.local(parts, index), sharding)
    pairs = zip(
        _global_views(out, dim, sharding, parts, index), _local_views(local, dim, sharding, parts, index), strict=True
    )
    for global_view, local_view in pairs:
        global_view.copy_(local_view)


def unshard(shards: Sequence[Tensor], dim: int, sharding: Shard) -> Tensor:
    """The global tensor from all shards, in order: the inverse of `shard`."""
    dim %= shards[0].ndim
    parts = len(shards)
    for index, local in enumerate(shards):
        _expect(local, dim, sharding.local(parts, index), sharding)
    if sharding.simple(parts):
        return torch.cat(list(shards), dim)
    if len(sharding.blocks) == 1:
        views = [next(_local_views(local, dim, sharding, parts, index)) for index, local in enumerate(shards)]
        return torch.cat(views, dim + 2).flatten(dim, dim + 3)
    shape = list(shards[0].shape)
    shape[dim] = sharding.elements
    out = shards[0].new_empty(shape)
    for index, local in enumerate(shards):
        write_shard(out, local, dim, sharding, parts, index)
    return out


def zero_pad(local: Tensor, dim: int, sharding: Shard, parts: int, index: int) -> Tensor:
    """A global tensor with the shard where it belongs, and zeros elsewhere."""
    dim %= local.ndim
    shape = list(local.shape)
    shape[dim] = sharding.elements
    out = local.new_zeros(shape)
    write_shard(out, local, dim, sharding, parts, index)
    return out


def stack(x: Tensor, dim: int, sharding: Shard, parts: int) -> Tensor:
    """All shards of a global tensor, contiguous, as [parts, *shard], each padded to the largest."""
    dim %= x.ndim
    _expect(x, dim, sharding.elements, sharding)
    if dim == 0 and sharding.simple(parts) and sharding.even(parts):
        return torch.unflatten(x.contiguous(), 0, (parts, sharding.local(parts, 0)))
    if sharding.even(parts):
        return _stack_even(x, dim, sharding, parts)
    shape = list(x.shape)
    shape[dim] = sharding.local(parts, 0)
    out = x.new_zeros((parts, *shape))
    for index in range(parts):
        length = sharding.local(parts, index)
        slot = out[index].narrow(dim, 0, length)
        pairs = zip(
            _local_views(slot, dim, sharding, parts, index), _global_views(x, dim, sharding, parts, index), strict=True
        )
        for local_view, global_view in pairs:
            local_view.copy_(global_view)
    return out


def _stack_even(x: Tensor, dim: int, sharding: Shard, parts: int) -> Tensor:
    """Equal shards are one more dim: [.., repeat, outer, parts, width, ..], no loop over parts."""
    periods = torch.unflatten(x, dim, (sharding.repeat, sharding.elements // sharding.repeat))
    sections, at = [], 0
    for block in sharding.blocks:
        section = periods.narrow(dim + 1, at, block.elements) if len(sharding.blocks) > 1 else periods
        runs = torch.unflatten(section, dim + 1, (block.outer, parts, block.size // parts * block.inner))
        sections.append(runs.movedim(dim + 2, 0).flatten(dim + 2, dim + 3))
        at += block.elements
    stacked = sections[0] if len(sections) == 1 else torch.cat(sections, dim + 2)
    return stacked.flatten(dim + 1, dim + 2).contiguous()


def unstack(stacked: Tensor, dim: int, sharding: Shard) -> Tensor:
    """The global tensor from [parts, *shard] with padded shards: the inverse of `stack`."""
    parts = stacked.shape[0]
    dim %= stacked.ndim - 1
    if dim == 0 and sharding.simple(parts):
        # shards follow each other, and only the last ones are padded
        return stacked.flatten(0, 1).narrow(0, 0, sharding.elements)
    if len(sharding.blocks) == 1 and sharding.even(parts):
        block = sharding.blocks[0]
        runs = torch.unflatten(stacked, dim + 1, (sharding.repeat * block.outer, block.size // parts * block.inner))
        return runs.movedim(0, dim + 1).flatten(dim, dim + 2)
    shards = [padded.narrow(dim, 0, sharding.local(parts, index)) for index, padded in enumerate(stacked.unbind(0))]
    return unshard(shards, dim, sharding)


def fill(local: Tensor, dim: int, sharding: Shard, parts: int, index: int) -> Tensor:
    """The shard, padded with zeros at its end to the size of the largest."""
    dim %= local.ndim
    _expect(local, dim, sharding.local(parts, index), sharding)
    largest = sharding.local(parts, 0)
    if local.shape[dim] == largest:
        return local
    shape = list(local.shape)
    shape[dim] = largest
    out = local.new_zeros(shape)
    out.narrow(dim, 0, local.shape[dim]).copy_(local)
    return out


def locate(ids: Tensor, sharding: Shard, parts: int, index: int) -> tuple[Tensor, Tensor]:
    """Where positions of the global dim are in shard `index` (0 where they are not), and which are."""
    period = sharding.elements // sharding.repeat
    local_period = sum(block.local(parts, index) for block in sharding.blocks)
    turn, within = (ids // period, ids % period) if sharding.repeat > 1 else (None, ids)
    place = torch.zeros_like(ids)
    own = torch.zeros_like(ids, dtype=torch.bool)
    at = local_at = 0
    for block in sharding.blocks:
        start, length = chunk_bounds(block.size, parts, index)
        run, inside = block.size * block.inner, within - at
        offset = inside % run - start * block.inner
        here = (inside >= 0) & (inside < block.elements) & (offset >= 0) & (offset < length * block.inner)
        position = inside.div(run, rounding_mode="floor") * (length * block.inner) + offset + local_at
        place = torch.where(here, position if turn is None else position + turn * local_period, place)
        own |= here
        at += block.elements
        local_at += block.local(parts, index)
    return place, own


def _global_views(x: Tensor, dim: int, sharding: Shard, parts: int, index: int) -> Iterator[Tensor]:
    """For each section of a global tensor, what belongs to `index`, as [.., repeat, outer, u, inner, ..]."""
    periods = torch.unflatten(x, dim, (sharding.repeat, sharding.elements // sharding.repeat if sharding.repeat else 0))
    at = 0
    for block in sharding.blocks:
        section = periods.narrow(dim + 1, at, block.elements)
        section = torch.unflatten(section, dim + 1, (block.outer, block.size, block.inner))
        yield section.narrow(dim + 2, *chunk_bounds(block.size, parts, index))
        at += block.elements


def _local_views(x: Tensor, dim: int, sharding: Shard, parts: int, index: int) -> Iterator[Tensor]:
    """For each section of a shard, the same view as `_global_views` takes from the global tensor."""
    periods = torch.unflatten(x, dim, (sharding.repeat, sum(block.local(parts, index) for block in sharding.blocks)))
    at = 0
    for block in sharding.blocks:
        length = block.local(parts, index)
        mine = chunk_bounds(block.size, parts, index)[1]
        yield torch.unflatten(periods.narrow(dim + 1, at, length), dim + 1, (block.outer, mine, block.inner))
        at += length


def _expect(x: Tensor, dim: int, size: int, sharding: Shard) -> None:
    if x.shape[dim] != size:
        raise LayoutError(
            f"dim {dim} of a tensor of shape {tuple(x.shape)} should have {size} elements by its "
            f"sharding over {sharding.axis or 'a group'} ({sharding.elements} in all, blocks {sharding.blocks}, "
            f"repeated {sharding.repeat})"
        )

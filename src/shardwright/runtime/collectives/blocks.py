"""Cutting a dim of a tensor in blocks, and putting the pieces back together.

A `Cut` names the runs of a fused dim that an axis takes (see `shardwright.layout`). Here
the same runs are taken from real tensors, without a loop over runs: the dim is seen as

    whole   [repeat, sections: outer x size x inner]
    local   [repeat, sections: outer x u x inner]        u = this rank's share of size

and each section is one strided view, so a row of 80 fused heads costs one copy. Nothing
here communicates. Where collectives need equal pieces, a piece is padded at its end to
the largest, which is always the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shardwright.errors import InputError, LayoutError
from shardwright.layout import Block, Shard, chunk_bounds


def plain(size: int) -> Shard:
    """The contiguous cut of a dim of `size` elements, for whatever axis asks."""
    return Shard(axis="", blocks=(Block(1, size, 1),))


def shard(x: Tensor, dim: int, sharding: Shard, parts: int, index: int) -> Tensor:
    """The share of a whole tensor that `index` of `parts` holds: a view where it is one run."""
    if x.layout != torch.strided:
        raise InputError(
            f"the plan splits a sparse input {list(x.shape)} along dim {dim}, and sparse tensors can't be cut; pass it "
            "dense, or use a plan that leaves it whole, such as tp"
        )
    dim %= x.ndim
    _expect(x, dim, sharding.elements, sharding)
    if sharding.simple(parts):
        block = sharding.blocks[0]
        start, length = chunk_bounds(block.size, parts, index)
        return x.narrow(dim, start * block.inner, length * block.inner)
    views = [view.flatten(dim + 1, dim + 3) for view in _whole_views(x, dim, sharding, parts, index)]
    row = views[0] if len(views) == 1 else torch.cat(views, dim + 1)
    return row.flatten(dim, dim + 1)


def write_shard(out: Tensor, piece: Tensor, dim: int, sharding: Shard, parts: int, index: int) -> None:
    """Write the share of `index` into a whole tensor, in place."""
    dim %= out.ndim
    _expect(out, dim, sharding.elements, sharding)
    _expect(piece, dim, sharding.local(parts, index), sharding)
    pairs = zip(
        _whole_views(out, dim, sharding, parts, index), _local_views(piece, dim, sharding, parts, index), strict=True
    )
    for whole, local in pairs:
        whole.copy_(local)


def unshard(pieces: Sequence[Tensor], dim: int, sharding: Shard) -> Tensor:
    """The whole tensor from the pieces of every index, in order: the inverse of `take`."""
    dim %= pieces[0].ndim
    parts = len(pieces)
    for index, piece in enumerate(pieces):
        _expect(piece, dim, sharding.local(parts, index), sharding)
    if sharding.simple(parts):
        return torch.cat(list(pieces), dim)
    if len(sharding.blocks) == 1:
        views = [next(_local_views(piece, dim, sharding, parts, index)) for index, piece in enumerate(pieces)]
        return torch.cat(views, dim + 2).flatten(dim, dim + 3)
    shape = list(pieces[0].shape)
    shape[dim] = sharding.elements
    out = pieces[0].new_empty(shape)
    for index, piece in enumerate(pieces):
        write_shard(out, piece, dim, sharding, parts, index)
    return out


def zero_pad(piece: Tensor, dim: int, sharding: Shard, parts: int, index: int) -> Tensor:
    """A whole tensor that holds the piece where it belongs, and zeros elsewhere."""
    dim %= piece.ndim
    shape = list(piece.shape)
    shape[dim] = sharding.elements
    out = piece.new_zeros(shape)
    write_shard(out, piece, dim, sharding, parts, index)
    return out


def stack(x: Tensor, dim: int, sharding: Shard, parts: int) -> Tensor:
    """All pieces of a whole tensor, contiguous, as [parts, *piece], each padded to the largest."""
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
            _local_views(slot, dim, sharding, parts, index), _whole_views(x, dim, sharding, parts, index), strict=True
        )
        for local, whole in pairs:
            local.copy_(whole)
    return out


def _stack_even(x: Tensor, dim: int, sharding: Shard, parts: int) -> Tensor:
    """Equal pieces are one more dim: [.., repeat, outer, parts, width, ..], no loop over parts."""
    rows = torch.unflatten(x, dim, (sharding.repeat, sharding.elements // sharding.repeat))
    sections, at = [], 0
    for block in sharding.blocks:
        section = rows.narrow(dim + 1, at, block.elements) if len(sharding.blocks) > 1 else rows
        runs = torch.unflatten(section, dim + 1, (block.outer, parts, block.size // parts * block.inner))
        sections.append(runs.movedim(dim + 2, 0).flatten(dim + 2, dim + 3))
        at += block.elements
    row = sections[0] if len(sections) == 1 else torch.cat(sections, dim + 2)
    return row.flatten(dim + 1, dim + 2).contiguous()


def unstack(stacked: Tensor, dim: int, sharding: Shard) -> Tensor:
    """The whole tensor from [parts, *piece] with padded pieces: the inverse of `stack`."""
    parts = stacked.shape[0]
    dim %= stacked.ndim - 1
    if dim == 0 and sharding.simple(parts):
        # pieces follow each other, and only the last ones are short
        return stacked.flatten(0, 1).narrow(0, 0, sharding.elements)
    if len(sharding.blocks) == 1 and sharding.even(parts):
        block = sharding.blocks[0]
        runs = torch.unflatten(stacked, dim + 1, (sharding.repeat * block.outer, block.size // parts * block.inner))
        return runs.movedim(0, dim + 1).flatten(dim, dim + 2)
    pieces = [piece.narrow(dim, 0, sharding.local(parts, index)) for index, piece in enumerate(stacked.unbind(0))]
    return unshard(pieces, dim, sharding)


def fill(piece: Tensor, dim: int, sharding: Shard, parts: int, index: int) -> Tensor:
    """The piece, padded with zeros at its end to the size of the largest piece."""
    dim %= piece.ndim
    _expect(piece, dim, sharding.local(parts, index), sharding)
    largest = sharding.local(parts, 0)
    if piece.shape[dim] == largest:
        return piece
    shape = list(piece.shape)
    shape[dim] = largest
    out = piece.new_zeros(shape)
    out.narrow(dim, 0, piece.shape[dim]).copy_(piece)
    return out


def locate(ids: Tensor, sharding: Shard, parts: int, index: int) -> tuple[Tensor, Tensor]:
    """Where positions of the whole dim are in the piece of `index` (0 where they are not), and which are."""
    row = sharding.elements // sharding.repeat
    local_row = sum(block.local(parts, index) for block in sharding.blocks)
    turn, within = (ids // row, ids % row) if sharding.repeat > 1 else (None, ids)
    place = torch.zeros_like(ids)
    own = torch.zeros_like(ids, dtype=torch.bool)
    at = local_at = 0
    for block in sharding.blocks:
        start, length = chunk_bounds(block.size, parts, index)
        run, inside = block.size * block.inner, within - at
        offset = inside % run - start * block.inner
        here = (inside >= 0) & (inside < block.elements) & (offset >= 0) & (offset < length * block.inner)
        found = inside.div(run, rounding_mode="floor") * (length * block.inner) + offset + local_at
        place = torch.where(here, found if turn is None else found + turn * local_row, place)
        own |= here
        at += block.elements
        local_at += block.local(parts, index)
    return place, own


def _whole_views(x: Tensor, dim: int, sharding: Shard, parts: int, index: int) -> Iterator[Tensor]:
    """For each section of a whole tensor, what `index` takes, as [.., repeat, outer, u, inner, ..]."""
    rows = torch.unflatten(x, dim, (sharding.repeat, sharding.elements // sharding.repeat if sharding.repeat else 0))
    at = 0
    for block in sharding.blocks:
        section = rows.narrow(dim + 1, at, block.elements)
        section = torch.unflatten(section, dim + 1, (block.outer, block.size, block.inner))
        yield section.narrow(dim + 2, *chunk_bounds(block.size, parts, index))
        at += block.elements


def _local_views(x: Tensor, dim: int, sharding: Shard, parts: int, index: int) -> Iterator[Tensor]:
    """For each section of a piece, the same view as `_whole_views` takes from the whole."""
    rows = torch.unflatten(x, dim, (sharding.repeat, sum(block.local(parts, index) for block in sharding.blocks)))
    at = 0
    for block in sharding.blocks:
        length = block.local(parts, index)
        mine = chunk_bounds(block.size, parts, index)[1]
        yield torch.unflatten(rows.narrow(dim + 1, at, length), dim + 1, (block.outer, mine, block.inner))
        at += length


def _expect(x: Tensor, dim: int, size: int, sharding: Shard) -> None:
    if x.shape[dim] != size:
        raise LayoutError(
            f"dim {dim} of a tensor of shape {tuple(x.shape)} should have {size} elements by its "
            f"sharding over {sharding.axis or 'a group'} ({sharding.elements} in all, blocks {sharding.blocks}, "
            f"repeated {sharding.repeat})"
        )

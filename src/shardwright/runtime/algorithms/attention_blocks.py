"""Attention of some queries on some keys, where a few numbers say who sees what: no mask of all pairs is made.

A block is cut into rectangles of pairs, so that only what is seen is computed:

    every row sees the same keys      no mask                      s s s . .     a window of 3: rows that see all
    a row sees one more than before   is_causal                    s . . . .     before them are causal, others come
    anything else                     rows in chunks, each with    s s . . .     in chunks, each with the keys that
                                      a mask of the keys in reach  . s s s .     one of its rows can see

Results over several blocks of keys are joined by `merge`: each comes with the log-sum-exp of its scores. Backward takes
the joined result and log-sum-exp of the whole row, from which the weights of any block follow.

`attention_kernels.py` runs a rectangle. No collectives here, and no dropout: see `random.py` for that.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .attention_kernels import CHUNK, BlockKernel, finite


@dataclass(frozen=True, slots=True)
class Places:
    """Where in the sequence some queries or keys are: start, start + step, ... (a step above 1: striped shards)."""

    start: int
    step: int
    count: int

    def of(self, rows: range, device: torch.device) -> Tensor:
        """The positions of some of them."""
        return torch.arange(len(rows), device=device).mul_(self.step).add_(self.start + rows.start * self.step)


@dataclass(frozen=True, slots=True, eq=False)
class Visibility:
    """Which keys a query sees, by their positions in the sequence; all conditions hold at once.

    before      q - before <= k            a sliding window (None: any key before it)
    after       k <= q + after             0 is causal (None: any key after it)
    prefix      or else k < prefix         keys that every query sees, whatever `after` says
    documents   equal ids                  of the queries [B, Sq] and of the keys [B, Sk]
    padding     true                       [B, Sk]
    dense       a mask that says it all    [.., Sq, Sk], of booleans or of what is added to scores
    """

    before: int | None = None
    after: int | None = None
    prefix: int = 0
    query_documents: Tensor | None = None
    key_documents: Tensor | None = None
    padding: Tensor | None = None
    dense: Tensor | None = None


# -- the three functions


def attend(
    q: Tensor, k: Tensor, v: Tensor, queries: Places, keys: Places, visible: Visibility, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Attention of queries [B, H, Sq, E] on these keys and values alone, and the log-sum-exp of scores [B, H, Sq].

    k and v may have fewer heads. A query that sees none of the keys has a result of 0 and a log-sum-exp of -inf.
    """
    kernel = BlockKernel.of(q, v, scale)
    block = _Block(queries, keys, visible)
    tiles = list(block.tiles(chunked=not kernel.fused))
    if len(tiles) == 1 and len(tiles[0].rows) == queries.count:  # nothing to join, nothing to copy
        return _attend_tile(kernel, q, k, v, block, tiles[0])
    batch, heads, count, _ = q.shape
    out = q.new_zeros((batch, count, heads, v.shape[-1]), dtype=kernel.precision).transpose(1, 2)  # as kernels write it
    lse = q.new_full(q.shape[:-1], -math.inf, dtype=kernel.precision)
    done = 0
    for tile in tiles:
        part = _attend_tile(kernel, q, k, v, block, tile)
        rows, _ = tile.slices
        if tile.rows.start < done:  # tiles come in the order of their rows
            part = merge(out[:, :, rows], lse[:, :, rows], *part)
        out[:, :, rows], lse[:, :, rows] = part
        done = tile.rows.stop
    return out.to(q.dtype), lse


def merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The result over two blocks of keys, in the precision of the log-sum-exp."""
    total = torch.logaddexp(lse, other_lse)
    reference = finite(total)
    weight, other_weight = (torch.exp(part - reference).unsqueeze(-1) for part in (lse, other_lse))
    return out * weight + other_out * other_weight, total


def attend_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    queries: Places,
    keys: Places,
    visible: Visibility,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v from this block; `out` and `lse` are those over all keys, of all blocks."""
    kernel = BlockKernel.of(q, v, scale)
    block = _Block(queries, keys, visible)
    lse = finite(lse)
    totals: list[Tensor] = []
    for tile in block.tiles(chunked=not kernel.fused):
        rows, columns = tile.slices
        parts = kernel.backward(
            *(x[:, :, rows] for x in (grad_out, q)), *(x[:, :, columns] for x in (k, v)),
            *(x[:, :, rows] for x in (out, lse)), causal=tile.causal, seen=block.mask(tile, q.device),
        )  # fmt: skip
        if (len(tile.rows), len(tile.keys)) == (queries.count, keys.count):  # then it is the only one
            return parts
        totals = totals or [torch.zeros_like(x, dtype=kernel.precision) for x in (q, k, v)]
        for total, part, at in zip(totals, parts, (rows, columns, columns), strict=True):
            total[:, :, at] += part
    if not totals:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    dq, dk, dv = (total.to(x.dtype) for total, x in zip(totals, (q, k, v), strict=True))
    return dq, dk, dv


def dense_mask(queries: Places, keys: Places, visible: Visibility, device: torch.device) -> Tensor:
    """The mask of all pairs, [B or 1, 1, Sq, Sk], for kernels that know nothing else."""
    everything = _Tile(range(queries.count), range(keys.count), masked=True)
    mask = _Block(queries, keys, visible).mask(everything, device)
    assert mask is not None
    return mask.expand(-1, -1, queries.count, -1)


def _attend_tile(
    kernel: BlockKernel, q: Tensor, k: Tensor, v: Tensor, block: _Block, tile: _Tile
) -> tuple[Tensor, Tensor]:
    rows, columns = tile.slices
    mask = block.mask(tile, q.device)
    out, lse = kernel.forward(q[:, :, rows], k[:, :, columns], v[:, :, columns], causal=tile.causal, seen=mask)
    if mask is not None:  # kernels may give 0 to a row that sees nothing
        lse = lse.masked_fill(~(mask if mask.dtype is torch.bool else mask > -math.inf).any(-1), -math.inf)
    return out, lse


# -- what is seen


class _Tile(NamedTuple):
    """A rectangle of pairs that a kernel is run on. A row sees all keys unless it is `causal` or `masked`."""

    rows: range
    keys: range
    causal: bool = False
    masked: bool = False

    @property
    def slices(self) -> tuple[slice, slice]:
        return slice(self.rows.start, self.rows.stop), slice(self.keys.start, self.keys.stop)


@dataclass(frozen=True, slots=True)
class _Block:
    """Some queries and some keys.

    By its position a query can see a range of the keys, that never goes back from one row to the next.
    """

    queries: Places
    keys: Places
    visible: Visibility

    def tiles(self, *, chunked: bool) -> Iterator[_Tile]:
        """The rectangles that cover what is seen, in the order of their rows; `chunked`: small ones only."""
        visible = self.visible
        if visible.dense is not None:
            yield _Tile(range(self.queries.count), range(self.keys.count), masked=True)
            return
        documents = visible.key_documents is not None
        for rows in [range(self.queries.count)] if documents else self._regions():
            first, last = self._reach(rows[0]), self._reach(rows[-1])
            if documents or chunked:
                yield from self._chunks(rows)
            elif self._alike(rows):
                if first:
                    yield _Tile(rows, first, masked=visible.padding is not None)
            elif first.start == last.start and self.queries.step == self.keys.step and visible.padding is None:
                if len(first) > 1:
                    yield _Tile(rows, first[:-1])
                yield _Tile(rows, range(first.stop - 1, last.stop), causal=True)
            else:
                yield from self._chunks(rows)

    def _chunks(self, rows: range) -> Iterator[_Tile]:
        """Rows in chunks, with the keys that at least one of them can see."""
        by_place = self.visible.key_documents is None and self.visible.padding is None
        chunks = [rows[at : at + CHUNK] for at in range(0, len(rows), CHUNK)]
        ranges = _document_ranges(chunks, self.visible) or [range(self.keys.count)] * len(chunks)
        for chunk, limit in zip(chunks, ranges, strict=True):
            first, last = self._reach(chunk[0]), self._reach(chunk[-1])
            keys = range(max(first.start, limit.start), min(last.stop, limit.stop))
            if keys:
                yield _Tile(chunk, keys, masked=not (by_place and self._alike(chunk)))

    def _regions(self) -> Iterator[range]:
        """Ranges of rows in each of which the first and the last key either stay or advance with every row."""
        rows, count = range(self.queries.count), self.keys.count
        after, prefix = self.visible.after or 0, self.visible.prefix
        tests: list[Callable[[int], bool]] = [
            lambda row: self._start(row) > 0,
            lambda row: self._start(row) >= count,
            lambda row: self._stop(row) > 0,
            lambda row: self._stop(row) > count,
            lambda row: self._place(row) + after + 1 > prefix,
        ]
        edges = {0, len(rows), *(bisect.bisect_left(rows, True, key=test) for test in tests)}
        yield from itertools.starmap(range, itertools.pairwise(sorted(edges)))

    def _alike(self, rows: range) -> bool:
        """Whether all of some rows can see the same keys."""
        first, last = self._reach(rows[0]), self._reach(rows[-1])
        return (first.start, first.stop) == (last.start, last.stop)  # two empty ranges are equal, wherever they are

    def _reach(self, row: int) -> range:
        """The keys that a row can see by its position."""
        start = min(max(self._start(row), 0), self.keys.count)
        return range(start, max(start, min(self._stop(row), self.keys.count)))

    def _start(self, row: int) -> int:
        before = self.visible.before
        return 0 if before is None else self._first_at(self._place(row) - before)

    def _stop(self, row: int) -> int:
        after = self.visible.after
        if after is None:
            return self.keys.count
        return self._first_at(max(self._place(row) + after + 1, self.visible.prefix))

    def _first_at(self, position: int) -> int:
        """The number of the first key that is at a position or behind it, as if keys went on at both ends."""
        return -((self.keys.start - position) // self.keys.step)

    def _place(self, row: int) -> int:
        return self.queries.start + row * self.queries.step

    def mask(self, tile: _Tile, device: torch.device) -> Tensor | None:
        """What the rows of a tile see of its keys, [B or 1, 1, rows or 1, keys]; None if it needs no mask."""
        if not tile.masked:
            return None
        visible = self.visible
        if visible.dense is not None:
            return visible.dense.reshape((1,) * (4 - visible.dense.ndim) + visible.dense.shape)
        rows, columns = tile.slices
        seen = torch.ones((1, 1, 1, len(tile.keys)), dtype=torch.bool, device=device)
        reach = self._reach(tile.rows[0])
        if not self._alike(tile.rows) or tile.keys.start < reach.start or tile.keys.stop > reach.stop:
            query, key = self.queries.of(tile.rows, device)[:, None], self.keys.of(tile.keys, device)
            if visible.before is not None:
                seen = seen & (key >= query - visible.before)
            if visible.after is not None:
                seen = seen & (key <= (query + visible.after).clamp_(min=visible.prefix - 1))
        if visible.query_documents is not None and visible.key_documents is not None:
            same = visible.query_documents[:, rows, None] == visible.key_documents[:, None, columns]
            seen = seen & same[:, None]
        if visible.padding is not None:
            seen = seen & visible.padding[:, None, None, columns]
        return seen


def _document_ranges(chunks: Sequence[range], visible: Visibility) -> list[range] | None:
    """Where the documents of each chunk are among the keys; None if ids don't grow, and could be anywhere."""
    queries, keys = visible.query_documents, visible.key_documents
    if queries is None or keys is None or len(chunks) < 2 or keys.is_meta:
        return None
    queries, keys = queries.long(), keys.long().contiguous()
    parts = [queries[:, chunk.start : chunk.stop] for chunk in chunks]
    lowest, highest = (torch.stack([f(part, 1) for part in parts], 1).contiguous() for f in (torch.amin, torch.amax))
    starts = torch.searchsorted(keys, lowest).amin(0)
    stops = torch.searchsorted(keys, highest, right=True).amax(0)
    grow = (keys[:, 1:] >= keys[:, :-1]).all().to(starts.dtype)
    sorted_ids, *bounds = torch.cat([grow[None], starts, stops]).tolist()  # waits for a device once
    if not sorted_ids:
        return None
    return [range(start, stop) for start, stop in zip(bounds[: len(chunks)], bounds[len(chunks) :], strict=True)]

"""Attention on blocks of queries and keys against attention with a dense mask: random blocks, forward and backward."""

import math
import random
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from shardwright import ops
from shardwright.runtime.algorithms import attention_blocks
from shardwright.runtime.algorithms.attention_blocks import (
    Places,
    Visibility,
    attend,
    attend_backward,
    dense_mask,
    merge,
)

EXACT = {"rtol": 0.0, "atol": 1e-12}


@dataclass(frozen=True)
class Block:
    q: Tensor
    k: Tensor
    v: Tensor
    queries: Places
    keys: Places
    visible: Visibility
    scale: float | None

    def seen(self) -> Tensor:
        """The dense mask, straight from the definition."""
        q = (self.queries.start + self.queries.step * torch.arange(self.queries.count))[:, None]
        k = self.keys.start + self.keys.step * torch.arange(self.keys.count)
        seen = torch.ones(len(self.q), 1, len(q), len(k), dtype=torch.bool)
        visible = self.visible
        if visible.before is not None:
            seen &= q - visible.before <= k
        if visible.after is not None:
            seen &= (k <= q + visible.after) | (k < visible.prefix)
        if visible.query_documents is not None and visible.key_documents is not None:
            seen &= (visible.query_documents[:, :, None] == visible.key_documents[:, None])[:, None]
        if visible.padding is not None:
            seen &= visible.padding[:, None, None]
        return seen

    def dense(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        groups, seen = q.shape[1] // k.shape[1], self.seen()
        scale = 1 / math.sqrt(q.shape[-1]) if self.scale is None else self.scale
        scores = (q @ k.repeat_interleave(groups, 1).mT * scale).masked_fill(~seen, -math.inf)
        nothing = ~seen.any(-1, keepdim=True)
        weights = scores.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)
        return weights @ v.repeat_interleave(groups, 1), scores.logsumexp(-1)

    def only(self, start: int, stop: int) -> "Block":
        """The same queries on some of the keys."""
        keys = Places(self.keys.start + start * self.keys.step, self.keys.step, stop - start)
        documents, padding = (
            None if x is None else x[:, start:stop] for x in (self.visible.key_documents, self.visible.padding)
        )
        visible = replace(self.visible, key_documents=documents, padding=padding)
        return replace(self, k=self.k[:, :, start:stop], v=self.v[:, :, start:stop], keys=keys, visible=visible)

    def forward(self) -> tuple[Tensor, Tensor]:
        return attend(self.q, self.k, self.v, self.queries, self.keys, self.visible, self.scale)

    def backward(self, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return attend_backward(
            grad, self.q, self.k, self.v, out, lse, self.queries, self.keys, self.visible, self.scale
        )  # fmt: skip


def random_block(seed: int, longest: int = 14) -> Block:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    batch, kv_heads, groups, width = (draw.choice(sizes) for sizes in ((1, 2, 3), (1, 2), (1, 2, 3), (1, 3, 4, 8)))
    step = draw.choice([1, 1, 1, 2, 3])
    queries = Places(draw.randint(0, 9), step, draw.randint(1, longest))
    keys = Places(
        draw.choice([queries.start, 0, draw.randint(0, 9)]),
        draw.choice([step, step, step, 1]),
        draw.randint(1, longest),
    )
    after = draw.choice([None, 0, 0, draw.randint(-4, 6)])
    visible = Visibility(
        before=draw.choice([None, None, draw.randint(-3, longest)]),
        after=after,
        prefix=0 if after is None else draw.choice([0, 0, draw.randint(0, 20)]),
        padding=torch.rand(batch, keys.count) < draw.choice([0.5, 0.9]) if draw.random() < 0.3 else None,
    )
    if draw.random() < 0.4:
        stops = [places.start + places.step * places.count for places in (queries, keys)]
        ids = torch.randint(0, 4, (batch, max(stops)))
        ids = ids.sort(1).values if draw.random() < 0.6 else ids
        of_queries, of_keys = (
            ids[:, places.start : stop : places.step]
            for places, stop in zip((queries, keys), stops, strict=True)
        )  # fmt: skip
        visible = replace(visible, query_documents=of_queries, key_documents=of_keys)
    q = torch.randn(batch, kv_heads * groups, queries.count, width, dtype=torch.float64)
    k = torch.randn(batch, kv_heads, keys.count, width, dtype=torch.float64)
    v = torch.randn(batch, kv_heads, keys.count, draw.choice([width, width, 5]), dtype=torch.float64)
    if draw.random() < 0.3:  # elements of a row that are not side by side
        q = q.mT.contiguous().mT
    return Block(q, k, v, queries, keys, visible, draw.choice([None, 0.7]))


def check(block: Block, message: str = "") -> None:
    mask = dense_mask(block.queries, block.keys, block.visible, torch.device("cpu"))
    assert torch.equal(mask.expand_as(block.seen()), block.seen()), message
    leaves = [x.detach().clone().requires_grad_() for x in (block.q, block.k, block.v)]
    expected, expected_lse = block.dense(*leaves)
    out, lse = block.forward()
    torch.testing.assert_close(out, expected.detach(), **EXACT, msg=message)
    torch.testing.assert_close(lse, expected_lse.detach(), **EXACT, msg=message)
    grad = torch.randn_like(out)
    gradients = torch.autograd.grad(expected, leaves, grad)
    for actual, gradient in zip(block.backward(grad, out, lse), gradients, strict=True):
        torch.testing.assert_close(actual, gradient, **EXACT, msg=message)
    half = block.keys.count // 2
    if half:
        blocks = block.only(0, half), block.only(half, block.keys.count)
        first, other = (part.forward() for part in blocks)
        out, lse = merge(*first, *other)
        torch.testing.assert_close(out, expected.detach(), **EXACT, msg=message)
        torch.testing.assert_close(lse, expected_lse.detach(), **EXACT, msg=message)
        parts = [part.backward(grad, out, lse) for part in blocks]
        joined = (
            parts[0][0] + parts[1][0],
            *(torch.cat([a, b], 2) for a, b in zip(*(p[1:] for p in parts), strict=True)),
        )
        for actual, gradient in zip(joined, gradients, strict=True):
            torch.testing.assert_close(actual, gradient, **EXACT, msg=message)


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 256])
def test_random_blocks_are_equal_to_a_dense_mask(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_blocks, "CHUNK", chunk)
    for seed in range(500):
        check(random_block(1000 * chunk + seed), f"chunk={chunk}, seed={seed}")


@pytest.mark.parametrize("seed", range(4))
def test_long_blocks(seed: int) -> None:
    block = random_block(seed)
    q, k, v = (torch.randn(2, heads, 600, 8, dtype=torch.float64) for heads in (4, 2, 2))
    ids = torch.randint(0, 2, (2, 600)).cumsum(1) // 30
    for visible in (
        Visibility(after=0),
        Visibility(before=99, after=0),
        Visibility(before=40, after=40),
        Visibility(after=0, prefix=70),
        Visibility(after=0, query_documents=ids, key_documents=ids),
        Visibility(after=0, padding=torch.rand(2, 600) < 0.8),
    ):
        places = Places(0, 1, 600)
        check(Block(q, k, v, places, places, visible, block.scale), str(visible))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 3e-2), (torch.float16, 4e-3), (torch.float32, 1e-5)])
def test_narrow_dtypes(dtype: torch.dtype, tolerance: float) -> None:
    block = random_block(3)
    narrow = replace(block, q=block.q.to(dtype), k=block.k.to(dtype), v=block.v.to(dtype))
    out, lse = narrow.forward()
    expected, expected_lse = block.dense(block.q, block.k, block.v)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(out.double(), expected, rtol=0.0, atol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0.0, atol=tolerance)
    assert [x.dtype for x in narrow.backward(out, out, lse)] == [dtype] * 3


def test_what_is_computed_of_a_window_grows_with_the_window() -> None:
    places = Places(0, 1, 4096)
    tiles = list(attention_blocks._Block(places, places, Visibility(before=255, after=0)).tiles(chunked=False))
    pairs = sum(len(tile.rows) * len(tile.keys) for tile in tiles)
    assert pairs <= 4096 * 512
    assert max(len(tile.rows) * len(tile.keys) for tile in tiles if tile.masked) <= 256 * 511


def test_the_memory_model_knows_how_many_queries_share_a_mask() -> None:
    assert attention_blocks.CHUNK == ops.attention.CHUNK


def test_striped_shards_are_causal_without_a_mask() -> None:
    for query, key in ((0, 0), (1, 0), (0, 1), (3, 1)):
        block = attention_blocks._Block(Places(query, 4, 64), Places(key, 4, 64), Visibility(after=0))
        (tile,) = block.tiles(chunked=False)
        assert tile.causal
        assert len(tile.rows) == (64 if key <= query else 63)


def test_blocks_that_see_nothing_are_skipped() -> None:
    ahead = attention_blocks._Block(Places(0, 1, 64), Places(64, 1, 64), Visibility(after=0))
    behind = attention_blocks._Block(Places(256, 1, 64), Places(0, 1, 64), Visibility(before=99, after=0))
    assert not list(ahead.tiles(chunked=False))
    assert not list(behind.tiles(chunked=False))

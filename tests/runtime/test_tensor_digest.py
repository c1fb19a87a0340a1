"""A digest tells any two tensors apart that a slip in the data could make of one another."""

from __future__ import annotations

import pytest
import torch

from shardwright.runtime.faults.tensor_digest import ROWS_AT_ONCE, WIDTH, tensor_digest

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int8, torch.bool, torch.complex64]


def drawn(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


def number(tensor):
    return int(tensor_digest(tensor))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (7, 4096), (0, 4)])
def test_the_same_values_have_the_same_digest_however_they_lie(dtype, shape):
    tensor = drawn(shape, dtype)
    apart = torch.stack([tensor, tensor], -1)[..., 0]
    behind = torch.cat([tensor.new_zeros(1), tensor.reshape(-1)])[1:].view(shape)
    assert number(tensor) == number(tensor.clone()) == number(apart) == number(behind)


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != torch.bool])
@pytest.mark.parametrize("shape", [(1,), (3, 5), (3, 4096 + 17)])
def test_one_other_value_is_seen_wherever_it_is(dtype, shape):
    tensor = drawn(shape, dtype)
    flat, seen = tensor.view(-1), {number(tensor)}
    places = sorted({0, flat.numel() // 2, flat.numel() - 1})
    for place in places:
        other = flat.clone()
        other[place] += 1
        seen.add(number(other.view(shape)))
    assert len(seen) == 1 + len(places)


@pytest.mark.parametrize("width", [5, WIDTH, WIDTH + 1])
def test_samples_in_another_order_are_seen(width):
    tensor = drawn((4, width), torch.int64)
    assert number(tensor) != number(tensor[[1, 0, 2, 3]])
    assert number(tensor) != number(tensor.roll(1, 0))


def test_samples_of_one_sum_in_another_order_are_seen():
    tokens = torch.tensor([[1, 2, 3, 4], [4, 3, 2, 1], [2, 1, 4, 3]])
    assert len({number(tokens[order]) for order in ([0, 1, 2], [1, 0, 2], [2, 1, 0], [1, 2, 0])}) == 4


def test_two_signs_that_change_are_seen():
    tensor = drawn((64,), torch.float32) + 1
    for at in range(62):
        other = tensor.clone()
        other[[at, at + 2]] *= -1
        assert number(other) != number(tensor)


def test_a_tensor_larger_than_one_shard_is_seen_whole():
    tensor = torch.zeros(ROWS_AT_ONCE * WIDTH + WIDTH + 3, dtype=torch.int32)
    actual = {number(tensor)}
    for at in (
        0,
        ROWS_AT_ONCE * WIDTH - 1,
        ROWS_AT_ONCE * WIDTH,
        ROWS_AT_ONCE * WIDTH + WIDTH,
        ROWS_AT_ONCE * WIDTH + WIDTH + 2,
    ):
        tensor[at] = 1
        actual.add(number(tensor))
        tensor[at] = 0
    assert len(actual) == 6

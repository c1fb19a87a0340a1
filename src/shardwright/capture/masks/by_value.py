"""Tensors that are only known by their values (a buffer that holds a causal mask): what they are by place."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .predicates import Affine, NonNegative, Predicate, conjunction, disjunction, index, negated

MAX_NUMBERS = 3


def count_of(tensor: Tensor) -> Affine | None:
    """A row of whole numbers that grow evenly."""
    if tensor.dim() != 1 or len(tensor) < 2 or tensor.dtype not in (torch.int64, torch.int32):
        return None
    with _disable_current_modes():
        start, pace = int(tensor[0]), int(tensor[1]) - int(tensor[0])
        row = start + pace * torch.arange(len(tensor), device="cpu")
        same = torch.equal(row, tensor.cpu().to(torch.int64))
    return Affine(start) + index(0).times(pace) if same else None


def cases_of(tensor: Tensor) -> tuple[tuple[Predicate, bool | int | float], ...] | None:
    """A tensor of a few numbers, each in a band of diagonals or outside of one; None for all others."""
    if tensor.dim() < 2 or not tensor.numel() or tensor.is_complex():
        return None
    with _disable_current_modes():
        values = tensor.detach().cpu()
        matrix = values.reshape(-1, *values.shape[-2:])[0]
        if not bool((values == matrix).all()):  # which holds for no nan
            return None
        numbers = torch.unique(matrix)
        if len(numbers) > MAX_NUMBERS:
            return None
        rank = tensor.dim()
        regions = [_region(matrix == number, rank) for number in numbers]
        known = [region for region in regions if region is not None]
        if len(known) < len(numbers) - 1:
            return None
        rest = negated(disjunction(known))
        return tuple(
            (rest if region is None else region, number.item()) for region, number in zip(regions, numbers, strict=True)
        )


def _region(inside: Tensor, rank: int) -> Predicate | None:
    """Where a boolean matrix is true, if that is a band, all but a band, or a band and some first columns."""
    band = _band(inside, rank)
    if band is not None:
        return band
    outside = _band(~inside, rank)
    if outside is not None:
        return negated(outside)
    prefix = int(inside.all(0).long().cumprod(0).sum())
    behind = _band(inside[:, prefix:], rank) if 0 < prefix < inside.shape[1] else None
    if behind is None:
        return None
    key, query = index(rank - 1), index(rank - 2)
    low, high = _diagonals(inside[:, prefix:])
    limits: list[Predicate] = [NonNegative(Affine(high + prefix) - (key - query))]
    if low > 1 - len(inside):  # the lowest diagonal there is says nothing
        limits.append(NonNegative(key - query - Affine(low + prefix)))
    return disjunction([NonNegative(Affine(prefix - 1) - key), conjunction(limits)])


def _diagonals(inside: Tensor) -> tuple[int, int]:
    rows, columns = (torch.arange(length) for length in inside.shape)
    difference = (columns - rows[:, None])[inside]
    return int(difference.min()), int(difference.max())


def _band(inside: Tensor, rank: int) -> Predicate | None:
    if not bool(inside.any()):
        return False
    low, high = _diagonals(inside)
    rows, columns = (torch.arange(length) for length in inside.shape)
    difference = columns - rows[:, None]
    if not torch.equal(inside, (difference >= low) & (difference <= high)):
        return None
    return _between(index(rank - 1) - index(rank - 2), low, high)


def _between(number: Affine, low: int, high: int) -> Predicate:
    return conjunction([NonNegative(number - Affine(low)), NonNegative(Affine(high) - number)])

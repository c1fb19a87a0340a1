"""Views: where in its input an element of a result is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .predicates import Affine, index

RESHAPES = frozenset({"view", "reshape", "_unsafe_view", "squeeze", "unsqueeze"})


def place_of(
    kind: str, arguments: Mapping[str, Any], shape: Sequence[int], result: Sequence[int]
) -> list[Affine] | None:
    """For a view: where in its input an element of its result is, one number for each dim of the input."""
    rank = len(shape)
    place = [index(dim) for dim in range(rank)]
    if kind == "expand":
        lead = len(result) - rank
        return [Affine(0) if length == 1 else index(lead + dim) for dim, length in enumerate(shape)]
    if kind == "transpose":
        first, other = arguments["dim0"] % rank, arguments["dim1"] % rank
        place[first], place[other] = place[other], place[first]
        return place
    if kind == "t":
        return place[::-1]
    if kind == "permute":
        dims = [dim % rank for dim in arguments["dims"]]
        return [index(dims.index(dim)) for dim in range(rank)]
    if kind == "slice":
        dim, length = arguments.get("dim", 0) % rank, shape[arguments.get("dim", 0) % rank]
        start, _, pace = slice(arguments.get("start"), arguments.get("end"), arguments.get("step", 1)).indices(length)
        place[dim] = Affine(start) + index(dim).times(pace)
        return place
    if kind == "select":
        dim, number = arguments["dim"] % rank, arguments["index"]
        at_index = Affine(number % shape[dim])
        return [at_index if other == dim else index(other - (other > dim)) for other in range(rank)]
    if kind == "flip":
        turned = {dim % rank for dim in arguments["dims"]}
        return [Affine(length - 1) - index(dim) if dim in turned else index(dim) for dim, length in enumerate(shape)]
    if kind in RESHAPES:
        return _reshaped(shape, result)
    return None


def _reshaped(shape: Sequence[int], result: Sequence[int]) -> list[Affine] | None:
    """A reshape that adds and removes dims of size 1."""
    kept = [dim for dim, length in enumerate(result) if length != 1]
    if [length for length in shape if length != 1] != [result[dim] for dim in kept]:
        return None
    left = iter(kept)
    return [Affine(0) if length == 1 else index(next(left)) for length in shape]

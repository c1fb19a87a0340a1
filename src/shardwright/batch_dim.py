"""Which inputs of a call have the batch as their dim 0: by what people say, or else by what the sizes tell.

    x [8, 5, 16], y [8]             all sizes of dim 0 are equal                        x, y are batched
    x [8, 5, 16], mask [5, 5]       5 is a later dim of x, 8 is none of mask            x is batched
    ids [8, 5], position [1, 5]     1 broadcasts                                        ids are batched
    x [8, 4], y [8], prior [3]      most inputs have 8                                  x, y are batched
    images [8, 12], texts [16, 9]   either                                              not known

A wrong guess is never a wrong number while every rank passes the global batch: it only decides what may be split.
Where ranks pass samples of their own, inputs without a batch dim have to be equal on all ranks, which is compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]

REMEDY = "name the inputs that have no batch dim: CompileOptions(unbatched=['mask']), or unbatched=[] if all have one"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDim:
    """The size of the batch, and for each input whether it is its dim 0. `why` says why the size is not known."""

    size: int | None
    batched: tuple[bool, ...]
    why: str = ""


def find_batch_dim(inputs: Sequence[tuple[str, Shape]], known: Mapping[str, bool] | None = None) -> BatchDim:
    """The batch dim of inputs, given by their paths and shapes. What is `known` about a path is not asked again."""
    known = known or {}
    heads = [(path, shape) for path, shape in inputs if shape and known.get(path, True)]
    sure = [(path, shape) for path, shape in heads if path in known]
    sizes = {shape[0] for _, shape in sure or heads}
    size = sizes.pop() if len(sizes) == 1 else None if sure or not heads else _tell(heads)
    if size is None:
        return BatchDim(size=None, batched=(False,) * len(inputs), why=_why(sure or heads))
    return BatchDim(
        size=size, batched=tuple(bool(shape) and known.get(path, True) and shape[0] == size for path, shape in inputs)
    )


def declared_by(unbatched: Iterable[str] | None, paths: Iterable[str]) -> dict[str, bool]:
    """What people say of the inputs of a call; nothing if they say nothing. A name stands for all that is in it."""
    if unbatched is None:
        return {}
    names = tuple(unbatched)
    inside = tuple(f"{name}{mark}" for name in names for mark in "[.")
    return {path: path not in names and not path.startswith(inside) for path in paths}


def _tell(heads: Sequence[tuple[str, Shape]]) -> int | None:
    """The size that explains the others or that most inputs have; None if neither or if the two contradict."""
    counts = Counter(shape[0] for _, shape in heads)
    explaining = [size for size in counts if all(_is_explained(other, size, heads) for other in counts)]
    (first, most), (_, second) = counts.most_common(2)
    votes = {explaining[0]} if len(explaining) == 1 else set[int]()
    if most > second:
        votes.add(first)
    return votes.pop() if len(votes) == 1 else None


def _is_explained(other: int, size: int, heads: Sequence[tuple[str, Shape]]) -> bool:
    """Whether an input may start with `other` where `size` is the batch: it broadcasts, or is about a later dim."""
    return other in (size, 1) or any(other in shape[1:] for _, shape in heads if shape[0] == size)


def _why(heads: Sequence[tuple[str, Shape]]) -> str:
    if not heads:
        return "no input has a batch dim"
    shapes = ", ".join(f"{path} {list(shape)}" for path, shape in heads)
    return f"the inputs have different sizes of dim 0 ({shapes}), so that the batch is not known; {REMEDY}"

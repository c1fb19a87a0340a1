"""Naming the dims of a call: what nearly every rule function begins with."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .notation import Rule, parse
from .registry import OpCall, letters


def label_dims(shape: Sequence[int], prefix: str = "") -> list[str]:
    """One label for each dim; dims of size 1 have none."""
    return [name if size != 1 else "1" for name, size in zip(letters(len(shape), prefix), shape, strict=True)]


def blocked(name: str) -> str:
    """The label, marked unsplittable."""
    return name if name.isdigit() else f"{name}^"


def marked(name: str, mark: str) -> str:
    """The label with a mark behind it; a dim of size 1 takes none."""
    return name if name.isdigit() else f"{name}{mark}"


def stretched(shape: Sequence[int], out: Sequence[int], names: Sequence[str]) -> list[str]:
    """The labels of a tensor that broadcasts to dims called `names`; none where it is stretched."""
    lead = len(out) - len(shape)
    return [
        name if own == size else "1" for name, own, size in zip(names[lead:], shape, out[lead:], strict=True)
    ]  # fmt: skip


def broadcast_shape(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The shape that some shapes broadcast to."""
    rank = max(map(len, shapes))
    aligned = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    return tuple(max(sizes) for sizes in zip(*aligned, strict=True))


def write_rule(
    inputs: Sequence[Sequence[str]], outputs: Sequence[Sequence[str]], linear: Sequence[int | None] = ()
) -> Rule:
    """A rule from the labels of each tensor, and the linear group of each input that has one."""
    groups = [*linear, *[None] * (len(inputs) - len(linear))]
    left = (
        " ".join(dims) + (f" ~{group}" if group is not None else "") for dims, group in zip(inputs, groups, strict=True)
    )
    return parse(f"{', '.join(left)} -> {', '.join(' '.join(dims) for dims in outputs)}")


def through(call: OpCall, along: Collection[int], linear: bool = False) -> Rule:
    """An op that looks along some dims and leaves the others as they are.

    Dims looked along stay whole. They keep their label where an output has them at the same size, so that
    what is known about them stays known; all other dims are free. Inputs after the first are read whole.
    """
    names = label_dims(call.shape)
    source = [blocked(name) if at in along else name for at, name in enumerate(names)]

    def result(shape: Sequence[int]) -> list[str]:
        kept = zip(names, call.shape, shape, strict=True)
        return [
            str(after) if at in along and after != before else name for at, (name, before, after) in enumerate(kept)
        ]

    return write_rule(
        [source, *(["?"] for _ in call.inputs[1:])],
        [result(value.shape) for value in call.outputs],
        [1] if linear else [],
    )

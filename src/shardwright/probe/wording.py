"""Write the splits found by probing in the notation: a letter for each split, at the sizes of the real call.

The splits are known at the sizes of a sample. A dim of the real call is tiled by the real sizes of the
labels on it and the sizes between them; a split whose label does not tile a dim is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, count

from ..layout import Block
from ..rules import OpCall, Rule, parse
from ..rules.registry import letters
from .samples import Sample, numbers
from .search import ProbedSplit, ProbeResult


class Wording:
    """A rule being written. `names` are the letters of the splits that are in it."""

    def __init__(self, result: ProbeResult, call: OpCall, sample: Sample) -> None:
        self.result, self.call, self.sample = result, call, sample
        self.shapes = [value.shape for value in (*call.inputs, *call.outputs)]
        self.small = [value.shape for value in (*sample.call.inputs, *sample.call.outputs)]
        splits = sorted(result.splits, key=_first_place)
        while wrong := self._misfits(splits):
            splits.remove(wrong[0])
        self.names = dict(zip(splits, letters(len(splits)), strict=True))
        self.sizes = {name: self._size(split) for split, name in self.names.items()}
        self.unsplit: dict[tuple[int, int, int], str] = {}  # what can't be split: (tensor, dim, factor) -> letter
        self.spare = chain(letters(26)[len(splits) :], (f"y{at}" for at in count()))

    def rule(self) -> Rule:
        terms = [self._term(tensor) for tensor in range(len(self.shapes))]
        inputs = len(self.call.inputs)
        text = f"{', '.join(terms[:inputs])} -> {', '.join(terms[inputs:])}"
        local: dict[str, tuple[str, ...]] = {}
        for split, name in self.names.items():
            for path in split.shares:
                local[path] = (*local.get(path, ()), name)
        return replace(parse(text), local=local, probed=True).with_sizes(self.sizes)

    def _size(self, split: ProbedSplit) -> int:
        """The size of a label in the real call: that of a dim it fills, of an argument, or what other labels leave."""
        return self._own_size(split) or self._left_size(split)

    def _own_size(self, split: ProbedSplit) -> int:
        for tensor, place in enumerate((*split.inputs, *split.outputs)):
            if isinstance(place, tuple) and place[1].elements == split.units:
                return self.shapes[tensor][place[0]]
        small, real = dict(numbers(self.sample.call.op)), dict(numbers(self.call.op))
        named = (real[path] for path in split.shares if small[path] == split.units)
        return next(named, self.sample.real.get(split.units, 0))

    def _left_size(self, split: ProbedSplit) -> int:
        """The rest of a dim for a label among others of known sizes; 0 if undetermined."""
        for tensor, place in enumerate((*split.inputs, *split.outputs)):
            if isinstance(place, tuple):
                others = [other for _, other in self._splits_on(self.result.splits, tensor, place[0]) if other != split]
                product = math.prod(self._own_size(other) for other in others)
                tiled = math.prod(other.units for other in (split, *others)) == self.small[tensor][place[0]]
                if tiled and product and self.shapes[tensor][place[0]] % product == 0:
                    return self.shapes[tensor][place[0]] // product
        return 0

    def _misfits(self, splits: Sequence[ProbedSplit]) -> list[ProbedSplit]:
        """The splits on a dim that they don't tile, the most entangled first."""
        for tensor, shape in enumerate(self.shapes):
            for dim in range(len(shape)):
                pairs = self._splits_on(splits, tensor, dim)
                if pairs and self._factors(tensor, dim, pairs) is None:
                    return [split for _, split in sorted(pairs, key=lambda pair: -pair[0].outer * pair[0].inner)]
        return []

    def _splits_on(self, splits: Sequence[ProbedSplit], tensor: int, dim: int) -> list[tuple[Block, ProbedSplit]]:
        """The splits on a dim, outermost first."""
        places = ((*split.inputs, *split.outputs)[tensor] for split in splits)
        pairs = [(place[1], split) for place, split in zip(places, splits, strict=True)
                if isinstance(place, tuple) and place[0] == dim]  # fmt: skip
        return sorted(pairs, key=lambda pair: pair[0].outer)

    def _factors(
        self, tensor: int, dim: int, pairs: Sequence[tuple[Block, ProbedSplit]]
    ) -> list[tuple[ProbedSplit | None, int]] | None:
        """The factors of a real dim, outermost first; None if it is not a product."""
        small, size = self.small[tensor][dim], self.shapes[tensor][dim]
        factors: list[tuple[ProbedSplit | None, int]] = []
        at = 1
        for block, split in pairs:
            factors += [(None, block.outer // at), (split, self._size(split))]
            at = block.outer * block.size
        factors = [(split, real) for split, real in (*factors, (None, small // at)) if split or real != 1]
        gaps = [gap for split, gap in factors if split is None]
        product = math.prod(real for split, real in factors if split is not None)
        if not product or size % product:
            return None
        fills = [size // product] if len(gaps) == 1 else [self.sample.real.get(gap, 0) for gap in gaps]
        if math.prod(fills) * product != size:
            return None
        fill = iter(fills)
        return [(split, real if split is not None else next(fill)) for split, real in factors]

    def _term(self, tensor: int) -> str:
        words = [self._dim(tensor, dim) for dim in range(len(self.shapes[tensor]))]
        if tensor < len(self.call.inputs):
            if any(tensor in split.added for split in self.names):
                words.append("&")
            words += [f"~{number}" for number, group in enumerate(self.result.linear, 1) if tensor in group]
        return " ".join(words)

    def _dim(self, tensor: int, dim: int) -> str:
        pairs = self._splits_on(list(self.names), tensor, dim)
        if not pairs:
            size = self.shapes[tensor][dim]
            return "1" if size == 1 else self._unsplit(tensor, dim, 0, size)
        words = []
        for at, (split, real) in enumerate(self._factors(tensor, dim, pairs) or ()):
            words.append(self._unsplit(tensor, dim, at, real) if split is None else self._label(split, tensor))
        return words[0] if len(words) == 1 else f"({' '.join(words)})"

    def _label(self, split: ProbedSplit, tensor: int) -> str:
        joined = split.outputs[0]
        if tensor >= len(self.call.inputs) or not isinstance(joined, str):
            return self.names[split]
        return f"{self.names[split]}+{'' if joined == 'sum' else joined}"

    def _unsplit(self, tensor: int, dim: int, at: int, size: int) -> str:
        """A letter for what can't be split, the same in an output whose dim is built like that of the first input."""
        splits = list(self.names)
        alike = tensor >= len(self.call.inputs) and self.shapes[tensor] == self.shapes[0]
        alike = alike and self._splits_on(splits, tensor, dim) == self._splits_on(splits, 0, dim)
        key = (0 if alike else tensor, dim, at)
        if key not in self.unsplit:
            self.unsplit[key] = next(self.spare)
            self.sizes[self.unsplit[key]] = size
        return f"{self.unsplit[key]}^"


def _first_place(split: ProbedSplit) -> tuple[int, int, int]:
    places = enumerate(chain(split.inputs, split.outputs))
    return min((at, place[0], place[1].outer) for at, place in places if isinstance(place, tuple))

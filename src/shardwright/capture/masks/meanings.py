"""An abstract interpreter of the ops that make masks: what each element of a value is (`meaning.py`).

An op that is not known gives elements of its own result, so there is a meaning for everything and never a guess.
An elementwise op on `Cases` is run, by torch itself, on the numbers of each case: what it does to types, infinities
and overflows is what it does to the tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..building.finish import is_pure
from ..building.graph_builder import DraftOp, GraphBuilder, ValueInfo, ValueRef, refs
from ..building.schema import torch_op
from .by_value import cases_of, count_of
from .known_values import KnownValues, run_step
from .meaning import Cases, Count, Element, Meaning, Number, boolean, broadcast, disjoint, exclusive, moved
from .places import place_of
from .predicates import (
    LARGEST,
    Affine,
    Equal,
    Flag,
    NonNegative,
    Ordered,
    Predicate,
    conjunction,
    index,
    negated,
    size,
    zero,
)

EXACT = {"int64": 2**24, "int32": 2**24, "float64": 2**24, "float32": 2**24, "bfloat16": 2**8, "float16": 2**11}
"""Whole numbers up to these are exact in a dtype, and in those that it is promoted to."""

ELEMENTWISE = frozenset({"_to_copy", "where", "masked_fill"})
"""Elementwise ops that torch does not tag as such, in all overloads or in some."""

INTEGERS = frozenset({"int64", "int32"})
ORDERS = {"ge": 0, "gt": 1, "le": 0, "lt": 1}
"""Comparisons, with what one side must be larger by."""

LIKE = frozenset({"full_like", "ones_like", "zeros_like"})
SAME = frozenset({"clone", "contiguous", "detach", "alias"})


@dataclass(slots=True)
class Meanings:
    """The meanings of values of a draft, each found once."""

    builder: GraphBuilder
    values: KnownValues
    assumed: Mapping[str, int] = field(default_factory=dict)  # inputs that are this number everywhere
    known: dict[str, Meaning] = field(default_factory=dict)

    def info(self, name: str) -> ValueInfo:
        return self.builder.infos[name]

    def of(self, name: str) -> Meaning:
        """What the elements of a value are."""
        for step in self._before(name):  # in order, so that nothing recurses
            for output in step.outputs:
                if output not in self.known:
                    self.known[output] = self._step(step, output)
        return self._leaf(name)

    def _before(self, name: str) -> list[DraftOp]:
        """The steps that make a value, back to what has a gradient, which a mask is not made of."""
        steps: dict[int, DraftOp] = {}
        todo = [name]
        while todo:
            value = todo.pop()
            step = self.values.producers.get(value)
            if step is None or value in self.known or id(step) in steps or self.info(value).gradient:
                continue
            steps[id(step)] = step
            todo += step.inputs()
        return [step for step in self.builder.steps if id(step) in steps] if steps else []

    def _leaf(self, name: str) -> Meaning:
        if name not in self.known:
            meaning = None if self.info(name).gradient else self._by_value(name)
            if name in self.assumed:
                meaning = Cases(((True, _single(self.assumed[name], ValueInfo((), self.info(name).dtype)).item()),))
            self.known[name] = meaning or self.element(name)
        return self.known[name]

    def element(self, name: str) -> Meaning:
        """Nothing is known of a value but that it is the same everywhere it is read."""
        return Element(name, tuple(map(index, range(len(self.info(name).shape)))))

    def _by_value(self, name: str) -> Meaning | None:
        tensor = self.values.evaluate(name)
        if tensor is None:
            return None
        number = count_of(tensor)
        if number is not None:
            return Count(number)
        cases = cases_of(tensor)
        return None if cases is None else Cases(cases)

    # -- ops

    def _step(self, step: DraftOp, output: str) -> Meaning:
        info = self.info(output)
        if info.gradient or 0 in info.shape or not is_pure(step) or step.place.autocast:
            return self.element(output)
        meaning = self._known(step, info) if len(step.outputs) == 1 else None
        if isinstance(meaning, Cases) and sum(size(predicate) for predicate, _ in meaning.cases) > LARGEST:
            meaning = None
        return meaning or self._by_value(output) or self.element(output)

    def _known(self, step: DraftOp, info: ValueInfo) -> Meaning | None:
        kind = step.target.split(".")[1]
        source = next(iter(refs(step.arguments)), None)
        if source is None:
            return _created(step, kind, info)
        shape = self.info(source.name).shape
        if kind in SAME:
            return self._leaf(source.name)
        if kind in LIKE:  # whatever its values are
            return self._run(step, {source.name: Cases(((True, 0),))})
        if kind == "index":
            return self._indexed(step, info)
        if kind in ("tril", "triu"):
            return _triangle(self._leaf(source.name), kind, step.arguments.get("diagonal", 0), info)
        if kind == "cumsum":
            return _summed(self._leaf(source.name), step.arguments["dim"] % len(shape), info.dtype)
        place = place_of(kind, step.arguments, shape, info.shape)
        if place is not None:
            return moved(self._leaf(source.name), place)
        if kind in ELEMENTWISE or torch.Tag.pointwise in torch_op(step.target).tags:
            return self._elementwise(step, kind, info)
        return None

    def _indexed(self, step: DraftOp, info: ValueInfo) -> Meaning | None:
        """`x[i, j]` with positions: x read there."""
        source, places = step.arguments["self"], []
        shape = self.info(source.name).shape
        if len(step.arguments["indices"]) != len(shape) or None in step.arguments["indices"]:
            return None
        for ref, length in zip(step.arguments["indices"], shape, strict=True):
            meaning = broadcast(self._leaf(ref.name), self.info(ref.name).shape, info.shape)
            if not isinstance(meaning, Count):
                return None
            low, high = meaning.number.bounds(info.shape)
            if low < 0 or high >= length:  # counted from the end
                return None
            places.append(meaning.number)
        return moved(self._leaf(source.name), places)

    def _elementwise(self, step: DraftOp, kind: str, info: ValueInfo) -> Meaning | None:
        operands = {
            ref.name: broadcast(self._leaf(ref.name), self.info(ref.name).shape, info.shape)
            for ref in refs(step.arguments)
        }
        counted = self._counted(step, kind, info, operands)
        if counted is not None:
            return counted
        compared = self._same(step, kind, operands) if kind in ("eq", "ne") else self._data(step, kind, info, operands)
        if compared is not None:
            return compared
        cases = {name: self._as_cases(meaning) for name, meaning in operands.items()}
        return self._run(step, cases)

    def _counted(self, step: DraftOp, kind: str, info: ValueInfo, operands: Mapping[str, Meaning]) -> Meaning | None:
        """Arithmetic and comparisons of positions."""
        arguments = step.arguments
        first, other = (_as_count(operands, arguments.get(name)) for name in ("self", "other"))
        limit = min((EXACT.get(self.info(name).dtype, 0) for name in operands), default=0)
        if first is None or not _fits(first, info.shape, limit):
            return None
        if kind == "_to_copy":
            return _fitting(first, info)
        if kind == "neg":
            return _fitting(first.times(-1), info)
        if other is None or not _fits(other, info.shape, limit):
            return None
        if kind in COMPARISONS:
            return boolean(COMPARISONS[kind](first - other))
        alpha = arguments.get("alpha", 1)
        if kind in ("add", "sub") and type(alpha) is int:
            return _fitting(first + other.times(alpha if kind == "add" else -alpha), info)
        if kind == "rsub" and alpha == 1:
            return _fitting(other - first, info)
        if kind == "mul" and not (first.terms and other.terms):
            factor, number = (first, other) if not first.terms else (other, first)
            return _fitting(number.times(factor.constant), info)
        return None

    def _same(self, step: DraftOp, kind: str, operands: Mapping[str, Meaning]) -> Meaning | None:
        """Whether elements of two tensors are equal, such as document ids."""
        sides = [operands.get(ref.name) for ref in (step.arguments["self"], step.arguments["other"])
                 if isinstance(ref, ValueRef)]  # fmt: skip
        if len(sides) != 2 or not all(isinstance(side, Element) for side in sides):
            return None
        first, other = sides
        assert isinstance(first, Element)
        assert isinstance(other, Element)
        if any(self.info(side.value).floating or side.plus for side in (first, other)):  # nan is not equal to itself
            return None
        equal: Predicate = Equal(first.value, first.place, other.value, other.place)
        return boolean(equal if kind == "eq" else negated(equal))

    def _data(self, step: DraftOp, kind: str, info: ValueInfo, operands: Mapping[str, Meaning]) -> Meaning | None:
        """Whole numbers that are data: one of them moved by a number, or which of two of one tensor is larger."""
        first, other = (operands.get(getattr(step.arguments.get(name), "name", "")) for name in ("self", "other"))
        if not isinstance(first, Element) or self.info(first.value).dtype not in INTEGERS:
            return None
        number = _as_count(operands, step.arguments.get("other"))
        if kind in ("add", "sub") and number is not None and not number.terms and "alpha" not in step.arguments:
            plus = first.plus + (number.constant if kind == "add" else -number.constant)
            return Element(first.value, first.place, plus) if info.dtype == self.info(first.value).dtype else None
        if not isinstance(other, Element) or first.value != other.value or kind not in ORDERS:
            return None
        larger, smaller = (first, other) if kind in ("ge", "gt") else (other, first)
        return boolean(Ordered(first.value, larger.place, smaller.place, larger.plus - smaller.plus - ORDERS[kind]))

    def _as_cases(self, meaning: Meaning) -> Cases | None:
        if isinstance(meaning, Element) and self.info(meaning.value).dtype == "bool":
            return boolean(Flag(meaning.value, meaning.place))
        return meaning if isinstance(meaning, Cases) else None

    def _run(self, step: DraftOp, operands: Mapping[str, Cases | None]) -> Meaning | None:
        """An elementwise op on each combination of cases."""
        choices: list[tuple[str, Cases]] = []
        for name, cases in operands.items():
            if cases is None:
                return None
            choices.append((name, cases))
        outcomes: dict[tuple[type, str], tuple[Number, list[Predicate]]] = {}
        for combination in itertools.product(*(cases.cases for _, cases in choices)):
            predicate = conjunction(condition for condition, _ in combination)
            if predicate is False:
                continue
            inputs = {
                name: _single(number, self.info(name))
                for (name, _), (_, number) in zip(choices, combination, strict=True)
            }
            (result,) = run_step(step, inputs)
            number = result.item()
            outcomes.setdefault((type(number), repr(number)), (number, []))[1].append(predicate)
        return disjoint(list(outcomes.values()))


COMPARISONS: dict[str, Callable[[Affine], Predicate]] = {
    "ge": NonNegative,
    "gt": lambda number: NonNegative(number + Affine(-1)),
    "le": lambda number: NonNegative(number.times(-1)),
    "lt": lambda number: NonNegative(number.times(-1) + Affine(-1)),
    "eq": zero,
    "ne": lambda number: negated(zero(number)),
}
"""How the difference of two whole numbers says how they compare."""


def _as_count(operands: Mapping[str, Meaning], argument: Any) -> Affine | None:
    """An operand as a whole number: positions, or one and the same number everywhere."""
    if isinstance(argument, ValueRef):
        meaning = operands[argument.name]
        if isinstance(meaning, Count):
            return meaning.number
        if not isinstance(meaning, Cases) or len(meaning.cases) != 1:
            return None
        argument = meaning.cases[0][1]
    if isinstance(argument, bool) or not isinstance(argument, int | float) or argument != argument:
        return None
    return Affine(int(argument)) if abs(argument) < 2**53 and int(argument) == argument else None


def _fitting(number: Affine, info: ValueInfo) -> Count | None:
    """A number in a dtype, if that has room for all of them."""
    return Count(number) if _fits(number, info.shape, EXACT.get(info.dtype, 0)) else None


def _fits(number: Affine, shape: Sequence[int], limit: int) -> bool:
    low, high = number.bounds(shape)
    return max(-low, high) <= limit


def _created(step: DraftOp, kind: str, info: ValueInfo) -> Meaning | None:
    """A tensor that is made of nothing but arguments."""
    arguments = step.arguments
    if kind == "arange":
        start, pace = arguments.get("start", 0), arguments.get("step", 1)
        if type(start) is int and type(pace) is int:
            return _fitting(Affine(start) + index(0).times(pace), info)
    if kind in ("full", "ones", "zeros"):
        step = DraftOp(step.target, {**arguments, "size": ()}, step.outputs, step.place, step.kind)
    if kind in ("full", "ones", "zeros", "scalar_tensor"):
        (value,) = run_step(step, {})
        return Cases(((True, value.item()),))
    if kind == "eye":
        return boolean_numbers(zero(index(0) - index(1)), info)
    return None


def boolean_numbers(predicate: Predicate, info: ValueInfo) -> Cases:
    """1 where a predicate holds and 0 elsewhere, in a dtype."""
    numbers = [_single(number, ValueInfo((), info.dtype)).item() for number in (1, 0)]
    return exclusive([(predicate, numbers[0]), (negated(predicate), numbers[1])])


def _triangle(meaning: Meaning, kind: str, diagonal: int, info: ValueInfo) -> Meaning | None:
    if not isinstance(meaning, Cases):
        return None
    rank = len(info.shape)
    below = index(rank - 2) - index(rank - 1) + Affine(diagonal)
    inside: Predicate = NonNegative(below if kind == "tril" else below.times(-1))
    outcomes: dict[str, tuple[Number, list[Predicate]]] = {}
    nothing = _single(0, ValueInfo((), info.dtype)).item()
    for predicate, number in ((negated(inside), nothing), *((conjunction([inside, p]), n) for p, n in meaning.cases)):
        if predicate is not False:
            outcomes.setdefault(repr(number), (number, []))[1].append(predicate)
    return disjoint(list(outcomes.values()))


def _summed(meaning: Meaning, dim: int, dtype: str) -> Meaning | None:
    """The running sum of one and the same whole number: positions."""
    factor = _as_count({"x": meaning}, ValueRef("x"))
    if factor is None or factor.terms or dtype not in INTEGERS:
        return None
    return Count((index(dim) + Affine(1)).times(factor.constant))


def _single(number: Number, info: ValueInfo) -> Tensor:
    """A tensor of one element, with the dims of another, on which types depend."""
    return torch.full((1,) * len(info.shape), number, dtype=getattr(torch, info.dtype), device="cpu")

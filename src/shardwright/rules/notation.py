"""The rule notation: what people write to say how an op may be split.

    b m k+, n k+ -> b m n      k is summed: splitting it gives partial sums
    (h d) k -> h d k           a dim that is a product of labels
    (q | k | v) -> q, k, v     a dim that is a row of sections
    n c h^ -> n c h^           ^ may not be split
    * d^ -> * d^               any number of leading dims, each splittable
    *~1, *~1 -> *              linear in both inputs jointly;  mul is *~1, *~2 -> *
    b m k+, n k+, n& -> b m n  & an input that is added once where a label was summed
    v=rows+ d, s -> s d        v is split by the algorithm "rows", whose result is a partial sum
    t d, e=experts@t d -> t d  e is split by the algorithm "experts", and t with it on the same axis
    b s, ? -> b s              ? anything, replicated
    3 h -> h                   a number is a dim (or factor) that may not be split

Parsed once, here, into `Rule`. What the labels are bound to is `signature.py`'s business.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import cast

from ..errors import RuleError
from ..layout import Reduction

Section = tuple[str, ...]
"""Labels multiplied, outermost first."""

Dim = tuple[Section, ...]
"""Sections side by side; nearly always one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """An own implementation of one split; `partial` says whether it leaves a sum to be done."""

    name: str
    partial: bool = False
    beside: str | None = None  # a label that the axis splits as well, where a tensor lacks this one


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One tensor of a rule."""

    dims: tuple[Dim, ...] = ()
    star: bool = False  # any number of leading dims stand before `dims`
    linear: int | None = None
    bias: bool = False
    anything: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A parsed rule. `sizes` are those of labels that shapes alone don't tell.

    `local` names the arguments that hold the size of labels ("num_heads", or "size.2" in a list):
    a rank gets its own size there. `probed` is a rule that was found by probing. `triangular` are labels of
    places whose work grows along the dim (causal attention): striped shards balance it.
    """

    inputs: tuple[Term, ...]
    outputs: tuple[Term, ...]
    sums: Mapping[str, Reduction] = field(default_factory=dict)
    blocked: frozenset[str] = frozenset()
    algorithms: Mapping[str, Algorithm] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    local: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    probed: bool = False
    triangular: frozenset[str] = frozenset()
    text: str = ""

    def __post_init__(self) -> None:
        for name in ("sums", "algorithms", "sizes", "local"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def with_sizes(self, sizes: Mapping[str, int]) -> Rule:
        return replace(self, sizes={**self.sizes, **sizes})

    def with_local(self, local: Mapping[str, tuple[str, ...]]) -> Rule:
        return replace(self, local=local)

    def with_triangular(self, labels: Iterable[str]) -> Rule:
        return replace(self, triangular=frozenset(labels))


_LABEL = r"\(|\)|\||[A-Za-z_][A-Za-z_0-9]*|\d+|\*"
_TOKEN = re.compile(rf"\s*({_LABEL})(=[a-z_]+(?:@[A-Za-z_]\w*)?)?(\+(?:max|min)?(?![a-z]))?(\^)?")
_TAIL = re.compile(r"\s*(~\d+|&)\s*$")


class _Parser:
    """Reads one rule; collects what the labels say about themselves as it goes."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.sums: dict[str, Reduction] = {}
        self.blocked: set[str] = set()
        self.algorithms: dict[str, Algorithm] = {}
        self.numbers: dict[str, int] = {}

    def fail(self, why: str) -> RuleError:
        return RuleError(f"the rule {self.text!r} can't be read: {why}")

    def rule(self) -> Rule:
        if self.text.count("->") != 1:
            raise self.fail("it needs exactly one '->' between inputs and outputs")
        left, right = self.text.split("->")
        inputs = tuple(self.term(part) for part in left.split(","))
        outputs = tuple(self.term(part) for part in right.split(","))
        return Rule(
            inputs=inputs,
            outputs=outputs,
            sums=self.sums,
            blocked=frozenset(self.blocked),
            algorithms=self.algorithms,
            sizes=self.numbers,
            text=self.text,
        )

    def term(self, text: str) -> Term:
        if text.strip() == "?":
            return Term(anything=True)
        linear, bias = None, False
        while tail := _TAIL.search(text):
            if tail[1] == "&":
                bias = True
            else:
                linear = int(tail[1][1:])
            text = text[: tail.start()]
        star, depth, at = False, 0, 0
        dims: list[Dim] = []
        sections: list[Section] = []
        section: list[str] = []
        text = text.strip()
        while at < len(text):
            token = _TOKEN.match(text, at)
            if token is None:
                raise self.fail(f"{text[at:]!r} is not a label")
            at = token.end()
            word = token[1]
            if word == "*":
                if dims or depth:
                    raise self.fail("'*' stands only before the other dims")
                star = True
            elif word == "(":
                depth, sections, section = depth + 1, [], []
                if depth > 1:
                    raise self.fail("brackets don't nest")
            elif word == "|":
                if not depth:
                    raise self.fail("'|' stands only inside brackets")
                sections.append(tuple(section))
                section = []
            elif word == ")":
                depth -= 1
                if depth:
                    raise self.fail("a bracket closes that was not open")
                dims.append((*sections, tuple(section)))
            else:
                label = self.label(token)
                if depth:
                    section.append(label)
                else:
                    dims.append(((label,),))
        if depth:
            raise self.fail("a bracket stays open")
        return Term(dims=tuple(dims), star=star, linear=linear, bias=bias)

    def label(self, token: re.Match[str]) -> str:
        word = token[1]
        if word.isdigit():
            name = f"_{len(self.numbers)}"
            self.numbers[name] = int(word)
            self.blocked.add(name)
            return name
        if token[2]:
            name, _, beside = token[2][1:].partition("@")
            self.algorithms[word] = Algorithm(name=name, partial=bool(token[3]), beside=beside or None)
        elif token[3]:
            self.sums[word] = cast(Reduction, token[3][1:] or "sum")
        if token[4]:
            self.blocked.add(word)
        return word


@lru_cache(maxsize=4096)
def parse(text: str) -> Rule:
    """Read a rule, or raise a RuleError that says what is wrong with it."""
    rule = _Parser(text).rule()
    inside = {label for term in rule.inputs for dim in term.dims for section in dim for label in section}
    outside = {label for term in rule.outputs for dim in term.dims for section in dim for label in section}
    for label in rule.sums:
        if label in outside:
            raise RuleError(f"the rule {text!r} sums {label} away and still has it in an output")
    for label in inside - outside - set(rule.sums) - rule.blocked - set(rule.algorithms):
        raise RuleError(
            f"the rule {text!r} loses {label}: an input has it, no output does; write {label}+ if it is summed, "
            f"{label}^ if it can't be split"
        )
    for label, algorithm in rule.algorithms.items():
        if algorithm.beside is not None and algorithm.beside not in inside:
            raise RuleError(f"the rule {text!r} splits {label} together with {algorithm.beside}, which no input has")
    if any(term.star for term in rule.outputs) and not any(term.star for term in rule.inputs):
        raise RuleError(f"the rule {text!r} has '*' in an output but in no input")
    return rule

"""Calls at the corners of a rule, with the rule that they get: whatever sizes happen to agree, nothing else may change.

Arguments drawn at random (`test_properties.py`) seldom meet these: an index as long as what it reads, a number where
mostly a tensor stands, as many tensors as there are rows, padding that leaves the size as it was.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardwright.rules import Call, find_rule
from shardwright.rules.pointwise import full_name
from tests.rules.drawn import Arguments, one_op
from tests.rules.oracle import check_split
from tests.rules.test_properties import choices


def real(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


def ids(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(high))


X = real(6, 4, 6)
CORNERS: dict[str, tuple[str, Arguments, str]] = {
    "x + 1": ("add.Tensor", {"self": X, "other": 1.5}, "a b c -> a b c"),
    "x + y": ("add.Tensor", {"self": X, "other": real(4, 1)}, "a b c ~1, b 1 ~1 -> a b c"),
    "x * 2": ("mul.Tensor", {"self": X, "other": 2.5}, "a b c ~1 -> a b c"),
    "x / 2": ("div.Tensor", {"self": X, "other": 2.5}, "a b c ~1 -> a b c"),
    "gather, as many as there are": (
        "gather", {"self": X, "dim": 1, "index": ids(4, 6, 4, 6)}, "a 4 c ~1, a b c -> a b c",
    ),
    "gather, fewer rows": ("gather", {"self": X, "dim": 1, "index": ids(4, 3, 4, 6)}, "6 4 c ~1, 3 b c -> 3 b c"),
    "pad the last dim": ("constant_pad_nd", {"self": X, "pad": [1, 2], "value": 0}, "a b c^ ~1 -> a b 9"),
    "pad the dim before": ("constant_pad_nd", {"self": X, "pad": [0, 0, 1, 1], "value": 0}, "a b^ c ~1 -> a 6 c"),
    "pad here, cut there": ("constant_pad_nd", {"self": X, "pad": [1, -1], "value": 0}, "a b c^ ~1 -> a b c"),
    "pad with a number": ("constant_pad_nd", {"self": X, "pad": [1, 2], "value": 1.5}, "a b c^ -> a b 9"),
    "stack 3 rows": ("stack", {"tensors": [real(3, 3)] * 3, "dim": 0}, ", ".join(["a b ~1"] * 3) + " -> 3 a b"),
    "stack inside": ("stack", {"tensors": [real(4, 4)] * 4, "dim": 1}, ", ".join(["a b ~1"] * 4) + " -> a 4 b"),
    "stack at the end": ("stack", {"tensors": [real(4, 6), real(4, 6)], "dim": -1}, "a b ~1, a b ~1 -> a b 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", CORNERS)
def test_a_call_at_a_corner_has_its_rule_and_every_split_of_it_is_right(name: str) -> None:
    target, arguments, expected = CORNERS[name]
    facts, op, given = one_op(full_name(target), arguments)
    values = facts.graph.values
    call = Call(op, tuple(values[at] for at in op.inputs), tuple(values[at] for at in op.outputs))

    found = find_rule(call)

    assert found is not None and found.text == expected
    for choice, parts in choices(facts, op):
        check_split(facts, {op.name: (given, ())}, op, choice, parts)

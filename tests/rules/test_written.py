"""The rule of a call is the one that is written down for it, and every split that it allows is right.

Arguments drawn at random (`test_properties.py`) seldom meet a corner: an index as long as what it reads, a number where
mostly a tensor stands, as many tensors as there are rows, padding that leaves the size as it was.
"""

from __future__ import annotations

import pytest

from shardwright.ir import Op
from shardwright.ir.graph import Slot
from shardwright.rules import OpCall, find_rule
from tests.probe.calls import value
from tests.rules.drawn import full_name, one_op
from tests.rules.oracle import check_split
from tests.rules.test_properties import choices
from tests.rules.written import WRITTEN, real


@pytest.mark.parametrize("name", WRITTEN)
def test_a_call_has_the_rule_that_is_written_for_it_and_every_split_of_it_is_right(name: str) -> None:
    target, arguments, expected = WRITTEN[name]
    analysis, op, inputs = one_op(full_name(target), arguments)
    values = analysis.graph.values
    call = OpCall(op, tuple(values[at] for at in op.inputs), tuple(values[at] for at in op.outputs))

    rule = find_rule(call)

    assert (None if rule is None else " ".join(rule.text.split())) == (expected and expected.strip())
    for choice, parts in choices(analysis, op):
        check_split(analysis, {op.name: (inputs, ())}, op, choice, parts)


def test_what_an_op_makes_is_of_the_atoms_of_what_it_reads() -> None:
    analysis, _, _ = one_op("aten.linear.default", {"input": real(6, 4), "weight": real(8, 4), "bias": None})
    (row, k), (n, other), out = analysis.dims["x0"], analysis.dims["x1"], analysis.dims["y0"]
    assert [analysis.atoms.expand(dim) for dim in out] == [analysis.atoms.expand(row), analysis.atoms.expand(n)]
    assert analysis.atoms.expand(k) == analysis.atoms.expand(other)


@pytest.mark.parametrize("target", ["aten.mul.Tensor", "aten.div.Tensor"])
def test_a_value_times_or_over_itself_is_not_linear(target: str) -> None:
    x, y = value("x", real(4, 6)), value("y", real(4, 6))
    op = Op(
        name="/ op", target=target, inputs=("x", "x"), outputs=("y",), arguments=(("self", Slot(0)), ("other", Slot(1)))
    )  # fmt: skip
    rule = find_rule(OpCall(op, (x, x), (y,)))
    assert rule is not None and rule.text == "a b, a b -> a b"


def test_a_cross_product_that_looks_for_its_dim_has_no_rule() -> None:
    """Of [3, 3] `torch.cross` takes the first dim, and not the last."""
    named = [value(name, real(3, 3)) for name in ("x", "y", "z")]
    op = Op(
        name="/ cross", target="aten.cross.default", inputs=("x", "y"), outputs=("z",),
        arguments=(("self", Slot(0)), ("other", Slot(1))),
    )  # fmt: skip
    assert find_rule(OpCall(op, tuple(named[:2]), tuple(named[2:]))) is None

"""What people write, and what they are told when they write it wrong."""

from __future__ import annotations

import pytest

from shardwright.errors import RuleError
from shardwright.rules import parse


def labels(term) -> list:
    return [list(section) for dim in term.dims for section in dim]


def test_a_linear_has_a_summed_label_and_a_bias_that_is_added_once():
    rule = parse("b m k+, n k+, n& -> b m n")

    assert [labels(term) for term in rule.inputs] == [[["b"], ["m"], ["k"]], [["n"], ["k"]], [["n"]]]
    assert dict(rule.sums) == {"k": "sum"}
    assert [term.bias for term in rule.inputs] == [False, False, True]


def test_brackets_are_products_and_bars_are_sections():
    product, row = parse("(h d) k -> h d k"), parse("(q | k | v) -> q, k, v")

    assert product.inputs[0].dims[0] == (("h", "d"),)
    assert row.inputs[0].dims[0] == (("q",), ("k",), ("v",))
    assert len(row.outputs) == 3


def test_marks_block_number_and_group():
    rule = parse("n c h^ 3 ~1, ? -> n c h^ 3")

    assert "h" in rule.blocked
    assert rule.inputs[0].linear == 1
    assert rule.inputs[1].anything
    assert 3 in rule.sizes.values()
    assert set(rule.sizes) <= rule.blocked, "a number is never split"


def test_other_reductions_and_algorithms_are_named():
    rule = parse("b k+max, v=rows+ d -> b d")

    assert dict(rule.sums) == {"k": "max"}
    assert rule.algorithms["v"].name == "rows"
    assert rule.algorithms["v"].partial
    assert not parse("c=classes d^ -> d^").algorithms["c"].partial


def test_a_star_is_any_number_of_leading_dims():
    rule = parse("* d^ ~1, * d^ ~2 -> * d^")

    assert all(term.star for term in (*rule.inputs, *rule.outputs))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a b", "exactly one '->'"),
        ("a -> b -> c", "exactly one '->'"),
        ("a % -> a", "is not a label"),
        ("(a b -> a b", "stays open"),
        ("a) -> a", "not open"),
        ("((a) b) -> a b", "don't nest"),
        ("a | b -> a b", "only inside brackets"),
        ("a * -> a", "only before the other dims"),
        ("a b -> a", r"loses b.*write b\+ if it is summed, b\^ if it can't be split"),
        ("a b+ -> a b", "sums b away and still has it"),
        ("a -> * a", "in an output but in no input"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused_with_its_text_and_the_reason(text, why):
    with pytest.raises(RuleError, match=why) as error:
        parse(text)

    assert repr(text) in str(error.value)

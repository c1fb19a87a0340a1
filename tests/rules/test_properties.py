"""For every written rule: arguments drawn at random, every split that it allows, on 2 and on 3 shards,
forward and backward, equals the op run whole. So does every partial sum that it lets through. Arguments for which
a result or a gradient is finite nowhere prove nothing and are drawn anew.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, reject, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from shardwright.ops.attention import STRUCTURED
from shardwright.ops.user_calls import OPAQUE
from shardwright.probe.check import NothingProven
from shardwright.rules import PASS_PARTIAL, known_targets
from tests.rules import drawn, drawn_families
from tests.rules.drawn import NO_DERIVATIVE, Dice, one_op, ways
from tests.rules.oracle import check_split

assert drawn_families  # it fills the table of ways

ELSEWHERE = {
    "aten._native_batch_norm_legit_functional.default": "lowered to runtime.batch_norm, tested in tests/runtime",
    "aten._native_batch_norm_legit.no_stats": "lowered to runtime.batch_norm, tested in tests/runtime",
    "aten.native_dropout.default": "lowered to runtime.dropout, tested in tests/runtime",
    "aten.dropout.default": "lowered to runtime.dropout, tested in tests/runtime",
    "aten.empty_like.default": "what it holds is not defined",
    OPAQUE: "runs the user's own Python, tested in tests/parity/test_opaque.py and test_experts.py",
}
"""Rules that can't be exercised here, with the reason."""

WRITTEN = {
    target
    for target in known_targets()
    if target.startswith(("aten.", "transformers.")) or target in (OPAQUE, STRUCTURED)
}
TARGETS = sorted((WRITTEN & set(ways())) - set(ELSEWHERE))


def choices(analysis, op):
    """Every role and every linear group, on 2 and on 3 shards."""
    signature = analysis.signatures[op.name]
    for parts in (2, 3):
        for role in signature.roles:
            if role.fills(parts):
                yield role.name, parts
        if any(analysis.graph.values[name].floating for name in op.outputs):
            for group in signature.linear_groups():
                yield f"{PASS_PARTIAL}{group}", parts


@pytest.mark.parametrize("target", TARGETS)
def test_every_split_that_the_rule_allows_recombines_to_the_unsplit_result(target):
    proven, unproven = set(), set()  # with gradients, without them

    @settings(
        max_examples=4, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )  # fmt: skip
    @given(data=st.data())
    def check(data):
        dice = Dice(data.draw)
        gradients = target not in NO_DERIVATIVE and dice.of(True, True, False)
        analysis, op, inputs = one_op(target, ways()[target](dice), gradients)
        for choice, parts in choices(analysis, op):
            try:
                check_split(analysis, {op.name: (inputs, ())}, op, choice, parts)
            except NothingProven:
                unproven.add(gradients)
                reject()
            proven.add(gradients)

    infinite = f"{target} or its gradient is finite nowhere for what is drawn: draw other arguments with @way"
    try:
        check()
    except Unsatisfiable as error:
        raise AssertionError(infinite) from error
    assert unproven <= proven, infinite


def test_arguments_for_which_an_op_is_finite_nowhere_prove_nothing(monkeypatch):
    monkeypatch.setattr(drawn, "_WAYS", {
        "aten.log.default": lambda dice: {"self": -dice.real(4, 6, low=0.1)},
        "aten.sqrt.default": lambda dice: {"self": 0 * dice.real(4, 6)},  # the gradient alone is infinite
    })  # fmt: skip
    for target in ways():
        with pytest.raises(AssertionError, match="finite nowhere"):
            test_every_split_that_the_rule_allows_recombines_to_the_unsplit_result(target)


def test_every_written_rule_is_exercised_or_says_why_not():
    missing = WRITTEN - set(ways()) - set(ELSEWHERE)
    assert not missing, f"no way to draw arguments for {sorted(missing)}: add one to drawn.py, or a reason here"
    assert len(TARGETS) >= 200

"""DTensor's placements and our rules, for every op that both know: where they disagree, and why.

"missing": DTensor takes a sharding that our rule does not allow. "other": both take it and say
something else about the result. Splits of ours that DTensor would move data for are not counted here;
test_properties holds each of them against the op run whole.
"""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.rules.drawn import NO_DERIVATIVE, Dice, one_op, ways
from tests.rules.second_opinion import knows, mesh_of_two, ours, theirs
from tests.rules.test_properties import TARGETS

_BOOLS = "DTensor sums (or multiplies) the bools of the shards; we have no partial value of bools: the dim stays whole"
_GRADIENT = "the largest of the largest, as DTensor; but not where a gradient has to find the rank that held it"
_NORMS = "DTensor has a partial value of its own for norms; we sum squares only where the model does"
_PRODUCT = "DTensor multiplies the shards; we have no partial product, it would need the other factors in backward"
_LISTS = "a list of tensors: DTensor does not report that it moves the others first; our rule has them split alike"
_NEGATIVE = (
    "a sum along a split dim needs what came before. With a negative dim DTensor (torch 2.13) takes each shard by "
    "itself, which is wrong: d.cumsum(-2) of a tensor with Shard(0) differs from the whole"
)
_MEAN = "DTensor's partial mean is exact for even shards; ours is the local sum over the whole count, exact for all"

EXPLAINED = {
    "aten.all.default": _BOOLS, "aten.all.dim": _BOOLS, "aten.any.default": _BOOLS, "aten.any.dim": _BOOLS,
    "aten.any.dims": _BOOLS,
    "aten.amax.default": _GRADIENT, "aten.amin.default": _GRADIENT, "aten.max.default": _GRADIENT,
    "aten.min.default": _GRADIENT,
    "aten.bucketize.Tensor": "boundaries split: counts below add up. True, and boundaries are never large",
    "aten.cat.default": _LISTS, "aten.stack.default": _LISTS,
    "aten.cumprod.default": _NEGATIVE, "aten.cumsum.default": _NEGATIVE, "aten.logcumsumexp.default": _NEGATIVE,
    "aten.linalg_solve_triangular.default":
        "DTensor takes whole matrices with right sides split on the batch, and then fails on the local shapes",
    "aten.linalg_vector_norm.default": _NORMS, "aten.norm.Scalar": _NORMS,
    "aten.gather.default":
        "DTensor (torch 2.13) cuts an index that is shorter than the tensor on another dim in step with it, which is "
        "wrong: row i of the index belongs to row i of the tensor",
    "aten.logsumexp.default":
        "with keepdim=True DTensor (torch 2.13) counts the dims as if it were False, which is wrong",
    "aten.mean.default": _MEAN, "aten.mean.dim": _MEAN,
    "aten.prod.default": _PRODUCT, "aten.prod.dim_int": _PRODUCT,
}  # fmt: skip


def disagreements(mesh, target: str, calls: int) -> set[str]:
    """What DTensor and our rule say differently about some calls of an op."""
    actual: set[str] = set()

    @settings(
        max_examples=calls, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.data())
    def compare(data):
        drawn = ways()[target](Dice(data.draw))
        if actual and target in EXPLAINED:
            return  # one is enough
        analysis, op, _ = one_op(target, drawn, target not in NO_DERIVATIVE)
        if len(op.inputs) > 4:
            return
        rules, _ = ours(analysis, op)
        for their, result in theirs(mesh, analysis, op).items():
            shapes = [analysis.graph.values[name].shape for name in op.inputs]
            if their not in rules:
                actual.add(f"missing: {their} -> {result} for shapes {shapes}")
            elif rules[their] != result:
                actual.add(f"other: {their} -> {result}, ours {rules[their]} for shapes {shapes}")

    compare()
    return actual


@pytest.fixture(scope="module")
def opinions():
    actual = defaultdict(set)
    with mesh_of_two() as mesh:
        both = [target for target in TARGETS if knows(target)]
        for target in both:
            actual[target] = disagreements(mesh, target, 60 if target in EXPLAINED else 3)
    return actual


def test_every_disagreement_with_dtensor_is_explained(opinions):
    unknown = {target: sorted(message) for target, message in opinions.items() if message and target not in EXPLAINED}
    assert not unknown
    assert len(opinions) >= 250, "DTensor should know most of these ops"


def test_every_explanation_is_still_needed(opinions):
    assert not {target for target in EXPLAINED if not opinions[target]}

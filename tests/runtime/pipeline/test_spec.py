"""Parts of a pipeline that do not fit together are refused, all their faults at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shardwright.errors import LayoutError
from shardwright.layout import INVARIANT, REPLICATE, Block, Mesh, Partial, Shard, make_layout, replicated
from shardwright.runtime.pipeline import PipelineOutput, PipelineSpec, PlacedStage
from shardwright.runtime.pipeline.spec import StageCrossing
from shardwright.runtime.world import Moment
from shardwright.schedule.known import forward_only, one_f_one_b

KIND = {"dtype": torch.float64, "gradient": True}


def crossing(**changes) -> StageCrossing:
    usual = {
        "value": "h",
        "sender": 0,
        "receiver": 1,
        "shape": (4,),
        "source_layout": replicated(1),
        "target_layout": replicated(1),
    }
    return StageCrossing(**{**usual, **KIND, **changes})


def pipeline(**changes) -> PipelineSpec:
    meshes = [Mesh(axes=(), devices=(number,)) for number in range(2)]
    usual = {
        "placed": (
            PlacedStage(number=0, mesh=meshes[0], takes=(0,), gives=("h",)),
            PlacedStage(number=1, mesh=meshes[1], takes=("h",), gives=("y",)),
        ),
        "crossings": (crossing(),),
        "leaving": (PipelineOutput(value="y", stage=1, how="sum", shape=(), **KIND),),
        "schedule": one_f_one_b(2, 4),
        "forward": forward_only(2, 4),
        "moment": Moment(4),
    }
    return PipelineSpec(**{**usual, **changes})


def test_parts_that_fit_are_a_pipeline():
    assert pipeline().microbatches == 4


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"receiver": 0}, "from stage 0 to itself"),
        ({"source_layout": replicated(2)}, "source layout has 2 dims"),
        ({"target_layout": replicated(0)}, "target layout has 0 dims"),
        ({"source_layout": make_layout(((),), {"tp": Partial("sum")})}, "source layout is .*reduce pending sums"),
        ({"target_layout": make_layout(((),), {"tp": REPLICATE})}, "target layout is .*reduce pending sums"),
        ({"dtype": torch.int64}, "torch.int64 has no gradient"),
    ],
)
def test_a_value_that_can_not_cross_is_refused(changes, fault):
    with pytest.raises(LayoutError, match=fault):
        crossing(**changes)


def test_sharded_and_replicated_values_cross():
    sharding = make_layout(((Shard(axis="tp", blocks=(Block(1, 4, 1),)),),), {"dp": INVARIANT})
    assert crossing(source_layout=sharding).source_layout == sharding
    assert crossing(dtype=torch.complex64).gradient
    assert not crossing(dtype=torch.int64, gradient=False).gradient


def test_a_gradient_comes_back_if_an_output_that_depends_on_it_has_one():
    assert crossing().has_gradient(frozenset({0}))
    assert crossing(outputs=frozenset({1})).has_gradient(frozenset({0, 1}))
    assert not crossing(outputs=frozenset({1})).has_gradient(frozenset({0}))
    assert not crossing(gradient=False).has_gradient(frozenset({0}))


def test_all_faults_are_named_at_once():
    first, second = pipeline().placed
    with pytest.raises(LayoutError) as error:
        pipeline(
            placed=(replace(first, number=1, gives=()), replace(second, takes=("h", "mask"), gives=())),
            schedule=one_f_one_b(2, 3),
        )
    message = str(error.value)
    for fault in ("stages are numbered [1, 1]", "stage 0 does not give h", "stage 1 does not give y",
                  "stage 1 takes mask, which does not cross to it", "has 3 microbatches, not 4"):  # fmt: skip
        assert fault in message


@pytest.mark.parametrize(("dim", "fine"), [(-2, True), (1, True), (2, False), (-3, False)])
def test_an_output_is_joined_along_one_of_its_dims(dim, fine):
    if fine:
        assert PipelineOutput(value="y", stage=0, how="cat", shape=(4, 2), dim=dim, **KIND).dim == dim
    else:
        with pytest.raises(LayoutError, match="to join"):
            PipelineOutput(value="y", stage=0, how="cat", shape=(4, 2), dim=dim, **KIND)

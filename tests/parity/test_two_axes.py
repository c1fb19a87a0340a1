"""Two axes at once, and the other ZeRO levels: on ranks that are threads, against one device."""

from dataclasses import replace

import pytest

from shardwright.cluster import Curve, MeasuredCollective, find
from tests.runtime.ranks import run_ranks

from . import single
from .threaded import world_of

PLANS = ("zero1=2", "zero2=2", "zero3=2,tp=2", "zero1=2,tp=2", "dp=2,sp=2", "dp=2,zero3=2")


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model", ["mlp", "gpt"])
def test_trains_as_on_one_device(tmp_path, model, plan):
    stored = single.captured(model, "float64")
    references = {kind: single.reference(model, "float64", kind) for kind in ("sgd", "adamw")}

    def run(rank):
        collected = []
        for kind, wanted in references.items():
            mine = single.compiled(model, "float64", plan, kind, str(tmp_path), stored)
            collected += [f"{kind}: {fault}" for fault in single.faults_of(mine, wanted, 1e-10)]
        return collected

    for faults in run_ranks(world_of(plan), run, timeout=120):
        assert faults == []


REFINED = {"hf_llama": "zero3=2,tp=4", "gqa_fused": "dp=2,sp=4", "gpt": "tp=8", "gpt_odd_vocab": "tp=6"}


@pytest.mark.parametrize(("model", "plan"), REFINED.items())
def test_an_axis_that_is_two_trains_as_on_one_device(tmp_path, model, plan):
    stored, wanted = single.captured(model, "float64"), single.reference(model, "float64", "adamw")

    def run(rank):
        return single.faults_of(single.compiled(model, "float64", plan, "adamw", str(tmp_path), stored), wanted, 1e-10)

    for faults in run_ranks(world_of(plan), run, timeout=120):
        assert faults == []


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather"])
@pytest.mark.parametrize("plan", ["dp=2,sp=2", "sp=4"])
def test_trains_as_on_one_device_whatever_collective_is_too_slow_to_use(tmp_path, plan, kind):
    """Reshards go other ways than usual, by what the cluster says."""
    stored, wanted = single.captured("gqa_fused", "float64"), single.reference("gqa_fused", "float64", "adamw")
    slow = Curve(((1.0, 1.0), (1e9, 1.0)))
    tables = tuple(MeasuredCollective(kind=kind, ranks=(size,), seconds=slow) for size in (2, 4))
    cluster = replace(find("cpu:4"), measured=tables)

    def run(rank):
        mine = single.compiled("gqa_fused", "float64", plan, "adamw", str(tmp_path), stored, cluster=cluster)
        return single.faults_of(mine, wanted, 1e-10)

    for faults in run_ranks(4, run, timeout=120):
        assert faults == []


def test_the_measure_sees_a_gradient_that_is_a_little_off():
    right, wrong = single.reference("mlp", "float64", "sgd"), single.reference.__wrapped__("mlp", "float64", "sgd")
    assert single.faults_of(right, wrong, 1e-10) == []
    wrong.gradients[1]["up.weight"][0, 0] += 1e-8
    assert len(single.faults_of(right, wrong, 1e-10)) == 1
    wrong.gradients[1]["up.weight"] = None
    assert len(single.faults_of(right, wrong, 1e-10)) == 1

"""Lowering goes by the prices of the plan: what a program sends takes no longer than the plan has counted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.cluster import Cluster, Curve, MeasuredCollective, find
from shardwright.cost import TrainingSetup
from shardwright.cost.reshard_prices import ReshardPrices, prices_of
from shardwright.cost.reshard_search import step_price
from shardwright.lower import LoweredProgram, reshard_kind
from shardwright.plan import Plan
from shardwright.plan.auto import SearchOptions
from shardwright.plan.file import load
from shardwright.plan.lowering import lower
from shardwright.plan.price import price
from shardwright.plan.request import PlanRequest
from shardwright.planning import make_plan
from shardwright.report.communication import runs_again
from shardwright.reshard import Reshard
from tests.lower.test_collectives import reshards
from tests.plan.graphs import analysis_of, graph_of

FLAT = SearchOptions(pipelines=False)


def plan_of(name: str, text: str, cluster: Cluster) -> Plan:
    """A flat plan on all devices of a cluster."""
    request = PlanRequest.read(text, cluster=cluster, options=FLAT)
    return make_plan(graph_of(name, 8), analysis_of(name, 8), request, cluster.size)


def lowered_seconds(program: LoweredProgram, prices: ReshardPrices) -> float:
    """What the collectives of a program's reshards take, forward and backward."""
    total, again = 0.0, runs_again(program)
    for op in program.body:
        kind = reshard_kind(op)
        if kind is not None:
            value, layout = program.values[op.inputs[0]], program.layouts[op.inputs[0]]
            step = Reshard(kind=kind, axes=op.argument("axes"), after=layout)
            _, _, forward, backward = step_price(step, layout, float(value.bytes), prices, value.gradient)
            total += forward * (2 if op.name in again else 1) + backward
    return total


PLANS = ["tp=8", "dp=2,tp=4", "dp=4,sp=2", "zero3=2,tp=4", "auto"]


@pytest.mark.parametrize("cluster", ["2x4xA100-80GB", "cpu:8"])
@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("gpt", [*PLANS, "dp=2,sp=4,recompute", "tp=8,recompute"]),
        ("checkpointed_gpt", PLANS),
        ("gqa_fused", PLANS),
        ("hf_t5", PLANS[:-1]),
        ("unet", PLANS),
        ("masked", PLANS),
        ("regularized", PLANS),
    ],
)
def test_the_reshards_of_a_program_take_no_longer_than_its_plan_says(name, texts, cluster):
    known = find(cluster)
    for text in texts:
        plan = plan_of(name, text, known)
        counted = sum(edge.seconds for edge in price(analysis_of(name, 8), known, TrainingSetup(), plan).edges)

        program = lower(graph_of(name, 8), plan, analysis_of(name, 8))

        assert lowered_seconds(program, prices_of(plan.mesh, known)) <= counted * (1 + 1e-9), (text, str(plan.mesh))


def slow(kind: str, size: int) -> Cluster:
    """CPUs on which one kind of collective was measured to take a second."""
    table = MeasuredCollective(kind=kind, ranks=(size,), seconds=Curve(((1.0, 1.0), (1e9, 1.0))))
    return replace(find(f"cpu:{size}"), measured=(table,))


def test_where_a_collective_is_slow_a_program_goes_without_it():
    """Sequence parallelism scatters sums; where that is slow, they are reduced and a share is taken."""
    usual, without = plan_of("gpt", "sp=2", find("cpu:2")), plan_of("gpt", "sp=2", slow("reduce_scatter", 2))

    programs = [reshards(lower(graph_of("gpt", 8), plan, analysis_of("gpt", 8))) for plan in (usual, without)]

    assert usual.choices("train") == without.choices("train")
    assert programs[0]["reduce_scatter"] and programs[0]["all_gather_to_r"]
    assert not programs[1]["reduce_scatter"] and not programs[1]["all_gather_to_r"]


def test_a_plan_file_is_lowered_by_bytes_unless_a_cluster_is_named_with_it(tmp_path: Path):
    graph, analysis, cluster = graph_of("gpt", 8), analysis_of("gpt", 8), slow("reduce_scatter", 2)
    plan = plan_of("gpt", "sp=2", cluster)
    plan.save(tmp_path / "plan.json")

    read = load(tmp_path / "plan.json", graph)
    named = make_plan(graph, analysis, PlanRequest.read(tmp_path / "plan.json", cluster=cluster, options=FLAT), 2)

    assert (plan.made_for, read.made_for, named.made_for) == (cluster, None, cluster)
    assert read.name == plan.name
    assert reshards(lower(graph, read, analysis))["reduce_scatter"]
    assert lower(graph, named, analysis).body == lower(graph, plan, analysis).body

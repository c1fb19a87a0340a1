"""Pipelines are chosen where they pay, and cut, filled and recomputed as memory and devices ask for."""

import itertools
import math
from dataclasses import replace

import pytest

from shardwright.cluster import Cluster, Link, NodeGroup, find
from shardwright.cost import TrainingSetup
from shardwright.errors import PlanError
from shardwright.plan.auto import SearchOptions
from shardwright.plan.constraint_kinds import Range
from shardwright.plan.joint import find_plan as find_joint
from shardwright.plan.joint import note_of, predicted
from shardwright.plan.joint.bounds import bound_of
from shardwright.plan.joint.ranks import PipelineRequest, PipelineSetup
from shardwright.plan.joint.search import PipelineSearch
from shardwright.plan.limits import Limits
from shardwright.schedule import KINDS

from .models import chain, language

MIXED = TrainingSetup(compute="bfloat16")


def setup(analysis, cluster, *, room=math.inf, training=None, **request):
    request = {name: Range(value, value) if isinstance(value, int) else value for name, value in request.items()}
    return PipelineSetup(
        analysis=analysis, cluster=cluster, training=training or TrainingSetup(), limits=Limits(), size=cluster.size,
        room=lambda pp_rank: room, request=PipelineRequest(**request),
    )  # fmt: skip


def slow_network(cluster: Cluster, bandwidth: float) -> Cluster:
    """The same with a network of so many bytes a second."""
    link = Link(name="string", bandwidth=bandwidth, latency=20e-6)
    groups = tuple(NodeGroup(node=replace(group.node, network=link), nodes=group.nodes) for group in cluster.groups)
    return replace(cluster, name="slow", groups=groups)


def layers(trial, search):
    """How many layers each stage has."""
    ops = [search.line.ops[search.blocks.places[a] : search.blocks.places[b]] for a, b in pairs(trial.bounds)]
    return [sum("linear" in op.target for op in part) for part in ops]


def pairs(bounds):
    return list(itertools.pairwise(bounds))


def test_equal_layers_are_cut_evenly():
    search = PipelineSearch(setup(chain(), find("4xA100-80GB"), stages=4, microbatches=8, schedule=KINDS["1f1b"]))
    best = search.run().best
    assert layers(best, search) == [2, 2, 2, 2]


def test_a_single_sample_is_planned_without_a_batch_to_split():
    result = find_joint(language(width=256, layers=2, batch=1), find("2xA100-80GB"), TrainingSetup(), SearchOptions())
    assert result.plan.size == 2
    assert result.plan.microbatches == 1


def test_a_faster_group_of_devices_gets_more_layers():
    cluster = find("2xA100-80GB+2xV100-32GB")
    search = PipelineSearch(
        setup(chain(layers=24), cluster, stages=4, microbatches=16, schedule=KINDS["1f1b"], training=MIXED)
    )
    best = search.run().best
    blocks = dict(
        zip((cluster.device(pp_rank.devices[0]).name for pp_rank in best.pp_ranks), layers(best, search), strict=True)
    )
    assert blocks["A100-80GB"] >= 4 * blocks["V100-32GB"] > 0
    assert sum(layers(best, search)) == 24


@pytest.mark.parametrize("size", [3, 4])
def test_every_number_of_stages_is_looked_at(size):
    search = PipelineSearch(setup(chain(), find(f"{size}xA100-80GB")))
    assert {len(candidate.pp_ranks) for candidate in search.candidates} == set(range(1, size + 1))


def test_bounds_are_below_what_they_bound():
    search = PipelineSearch(setup(language(layers=4), find("4xA100-80GB"), training=MIXED))
    uneven = 0
    for rough in search.candidates:
        sure = search.candidates.sure(rough)
        assert rough.bound <= sure.bound
        trial = search.tried(sure)
        if trial is not None:
            assert sure.bound <= trial.seconds * (1 + 1e-9)
            uneven += len({len(pp_rank.devices) for pp_rank in sure.pp_ranks}) > 1
    assert uneven


def test_a_batch_undivided_passes_stages_of_any_size_one_after_the_other():
    assert bound_of([2.0, 4.0], 1, fill=1.0) == 2.0  # the whole batch on the faster seat: nothing is quicker
    assert bound_of([4.0, 4.0], 4, fill=1.0) == pytest.approx(2.0 * 4 + 2.0)  # two stages, and one waits once


def test_a_model_that_fits_on_good_links_gets_no_pipeline():
    result = find_joint(language(layers=4), find("4xA100-80GB"), MIXED, SearchOptions())
    assert result.pipeline is None and not result.plan.is_pipeline
    assert result.piped is not None and "pipeline" in note_of(result)


def test_slow_links_between_nodes_make_pipelines_win():
    cluster = slow_network(find("2x4xA100-80GB"), 1e9)
    result = find_joint(language(width=4096, layers=4, batch=128), cluster, MIXED, SearchOptions())
    assert result.pipeline is not None
    assert result.flat.best.time > result.pipeline.trial.seconds
    pp_ranks = result.pipeline.trial.pp_ranks
    assert all(len({cluster.node_of(rank) for rank in pp_rank.devices}) == 1 for pp_rank in pp_ranks)


def test_short_memory_is_met_by_recomputing_or_more_stages():
    analysis, cluster = language(layers=8, batch=64), find("4xA100-80GB")
    request = {"stages": 2, "schedule": KINDS["1f1b"], "microbatches": 4}
    wide = PipelineSearch(setup(analysis, cluster, training=MIXED, **request)).run().best
    need = max(wide.memory(pp_rank) for pp_rank in range(2))
    short = need * 0.6
    result = find_joint(analysis, cluster, MIXED, SearchOptions(memory=short))
    if result.pipeline is not None:
        assert max(peak.peak for peak in result.pipeline.memory) <= short
    tight = PipelineSearch(setup(analysis, cluster, training=MIXED, room=short, **request))
    again = tight.run().best
    assert again is None or (
        again.seconds > wide.seconds and max(again.memory(pp_rank) for pp_rank in range(2)) <= short
    )


def test_a_plan_of_a_pipeline_names_every_op_once_and_says_what_it_costs():
    analysis, cluster = language(width=4096, layers=4, batch=128), slow_network(find("2x4xA100-80GB"), 1e9)
    result = find_joint(analysis, cluster, MIXED, SearchOptions())
    plan = result.plan
    names = [name for stage in plan.stages for name in stage.choices]
    assert sorted(names) == sorted(op.name for op in analysis.graph.ops)
    assert plan.size == 8 and plan.schedule and plan.is_pipeline
    prediction = predicted(result, cluster, MIXED, analysis)
    assert prediction["seconds"] > 0 and len(prediction["pipeline"]["stages"]) == len(plan.stages)
    assert 0 <= prediction["pipeline"]["bubble"] < 1 <= prediction["pipeline"]["balance"]
    assert prediction["memory"]["peak"] <= prediction["limit"]


def test_nothing_that_fits_is_an_error():
    with pytest.raises(PlanError, match="does not fit"):
        find_joint(chain(layers=4), find("2xA100-80GB"), TrainingSetup(), SearchOptions(memory=1e6))


def test_the_search_ends_when_it_is_told():
    calls = []
    find_joint(
        language(layers=4),
        find("4xA100-80GB"),
        MIXED,
        SearchOptions(seconds=0.0, progress=lambda *report: calls.append(report)),
    )
    assert calls

"""Pipeline ranks: which devices hold which parameters, and what is refused."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from shardwright.compile.files import generate
from shardwright.compile.pipeline_ranks import find_pipeline_ranks, keys_in_use
from shardwright.errors import PlanError
from shardwright.layout import Mesh
from shardwright.parallelize import parallelize
from shardwright.plan import parse_plan_string
from shardwright.plan.lowering import lower_pipeline
from shardwright.plan.pipeline import build_pipeline
from shardwright.verify import verify
from tests.models.zoo import ZOO
from tests.options import grouped
from tests.plan.graphs import analysis_of, graph_of
from tests.runtime.ranks import run_ranks


def made_of(text: str, folder, name: str = "gpt", batch: int = 12):
    graph, analysis = graph_of(name, batch), analysis_of(name, batch)
    plan = build_pipeline(graph, parse_plan_string(text), analysis, "", 2)
    programs = lower_pipeline(graph, plan, analysis).programs
    return plan, [generate(program, folder) for program in programs]


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("pp=2", [(0,), (1,)]),
        ("pp=2,interleaved", [(0, 2), (1, 3)]),
        ("pp=2,zbv", [(0, 3), (1, 2)]),
        ("pp=1+3,dp", [(0,), (1,)]),
    ],
)
def test_a_seat_has_all_stages_of_its_devices(tmp_path, text, stages):
    plan, built = made_of(text, tmp_path)

    pp_ranks = find_pipeline_ranks(plan.stages, built)

    assert [pp_rank.stages for pp_rank in pp_ranks] == stages
    assert [pp_rank.mesh for pp_rank in pp_ranks] == sorted(
        {s.mesh for s in plan.stages}, key=lambda mesh: mesh.devices
    )
    values = [{spec.name for spec in pp_rank.specs} for pp_rank in pp_ranks]
    assert set().union(*values) == {parameter.key for parameter in graph_of("gpt", 12).parameters}
    assert all(len(names) == len(pp_rank.specs) for names, pp_rank in zip(values, pp_ranks, strict=True)), "each once"


def test_a_tied_weight_is_held_by_both_stages_under_both_names(tmp_path):
    plan, built = made_of("pp=2", tmp_path)

    results = [
        spec.keys
        for pp_rank in find_pipeline_ranks(plan.stages, built)
        for spec in pp_rank.specs
        if spec.name == "wte.weight"
    ]

    assert results == [("wte.weight", "head.weight")] * 2


def test_the_first_and_last_stage_of_one_device_hold_it_once(tmp_path):
    plan, built = made_of("pp=2,zbv", tmp_path)

    results = [
        [spec.name for spec in pp_rank.specs].count("wte.weight") for pp_rank in find_pipeline_ranks(plan.stages, built)
    ]

    assert results == [1, 0]


def test_groups_are_those_that_its_programs_communicate_over(tmp_path):
    plan, built = made_of("pp=2,dp=2", tmp_path)

    assert [pp_rank.wanted for pp_rank in find_pipeline_ranks(plan.stages, built)] == [(("dp",),)] * 2


def test_parameters_are_in_the_order_in_which_they_are_read(tmp_path):
    _, built = made_of("pp=2", tmp_path)

    keys = keys_in_use(built[0].program)

    assert keys[:2] == ["wte.weight", "wpe.weight"]
    assert keys.index("blocks.0.ln1.weight") < keys.index("blocks.0.attn.qkv.weight") < keys.index("blocks.0.up.weight")


def test_a_device_in_two_meshes_is_refused(tmp_path):
    plan, built = made_of("pp=2", tmp_path)
    first, second = plan.stages
    other = replace(second, mesh=Mesh(axes=mesh_axes(2), devices=(0, 1)))

    with pytest.raises(
        PlanError, match="device 0 is in the meshes one device and dp=2; all stages of a device have one"
    ):
        find_pipeline_ranks((first, other), built)


def mesh_axes(size: int):
    return parse_plan_string(f"dp={size}").mesh.axes


# Entries after the first.


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.train_head, self.eval_head = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.a(x).tanh()).tanh()
        return self.train_head(x).square().mean() if self.training else self.eval_head(x)


def test_a_call_that_reads_parameters_on_other_devices_says_which_and_where():
    with pytest.raises(PlanError) as error:
        verify(Heads(), "pp=2", example=(torch.randn(4, 6),), method="threads", entries=("train", "eval"))

    message = str(error.value)
    assert "eval_head / linear (aten.linear.default) at test_pipeline_ranks.py:" in message
    assert "reads eval_head.weight on device 1, and it is on device 0" in message


@pytest.mark.parametrize("options", [{"microbatches": 4}, {"microbatch_semantics": "local", "microbatches": 2}])
def test_a_plan_and_a_wish_that_differ_are_refused(tmp_path, options):
    graph, analysis = graph_of("mlp", 4), analysis_of("mlp", 4)
    plan = build_pipeline(graph, parse_plan_string("pp=2"), analysis, "", 2)
    case = ZOO["mlp"]()

    def run(rank: int) -> None:
        parallelize(copy.deepcopy(case.module), plan=plan, example=case.args, **grouped(directory=tmp_path, **options))

    refused = r"the plan (has 2 microbatches, and 4|is for PipelineOptions\(semantics=\"global\")"
    with pytest.raises(PlanError, match=refused):
        run_ranks(2, run)

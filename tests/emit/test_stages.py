"""The files of a pipeline's stages: what they say of themselves, and names that a model may have too."""

from __future__ import annotations

import ast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.emit.prologue import counts, known_names
from shardwright.lower.program import PrologueValue
from shardwright.plan.request import PlanRequest
from shardwright.plan.search_options import SearchOptions
from shardwright.verify import compile_program, verify
from tests.emit.emitted import pipeline_texts

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb", "zbv")


def test_the_head_says_what_a_stage_receives_and_sends():
    first, second = (text.split('"""')[1] for text in pipeline_texts("pp=2", 2))

    assert "stage 0 of 2" in first and "stage 1 of 2" in second
    assert "sends      x to stage 1" in first and "receives " not in first
    assert "receives   x from stage 0" in second and "sends " not in second
    for head in (first, second):
        assert "schedule   1f1b" in head
        assert "time       2 microbatches; mb is the one that runs" in head
        assert "mesh       one device" in head, "time is no axis of devices"


def request_for(plan):
    return PlanRequest.read(plan, options=SearchOptions(microbatches=2))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_weights_gradients_are_put_off_only_where_the_schedule_has_a_step_for_them(schedule):
    text = "".join(pipeline_texts(f"pp=2,{schedule}", 2))

    assert ("self.weights.linear(" in text) == schedule.startswith("zb")
    assert ("F.linear(" in text) != schedule.startswith("zb")


def test_evaluation_puts_nothing_off():
    module = Named()
    module.eval()

    compiled = compile_program(module, (torch.randn(4, 6), labels()), {}, request_for("pp=2,zb"), 2)

    assert "self.weights.linear" not in "".join(compiled.texts)


def test_convolutions_are_put_off_but_transposed_ones_are_not():
    text = "".join(pipeline_texts("pp=2,zb", 2, "unet"))

    assert "self.weights.conv2d(" in text
    assert "conv_transpose2d" in text and "weights.conv_transpose2d" not in text


class TwoLosses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, first: Tensor, other: Tensor) -> Tensor:
        x = self.b(self.a(x).tanh())
        return F.cross_entropy(x, first) + F.cross_entropy(x, other)


def test_labels_are_counted_before_the_first_microbatch_each_under_a_name_of_its_own():
    args = torch.randn(4, 6), labels(), labels()
    compiled = compile_program(TwoLosses(), args, {}, request_for("pp=2"), 2)
    program = compiled.programs[-1]

    assert list(counts(program)) == ['runtime.PrologueCount(name="count")', 'runtime.PrologueCount(name="count_1")']
    assert list(known_names(program).values()) == ["self.known.count", "self.known.count_1"]


@pytest.mark.parametrize("plan", ["pp=2", "pp=2,dp=2", "pp=4", "pp=2,interleaved"])
def test_every_file_is_python_and_groups_do_not_name_time(plan):
    for text in pipeline_texts(plan, 2, "gpt_deep", 12):
        tree = ast.parse(text)
        groups = next(
            node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "GROUPS"
        )
        assert all("mb" not in name.split("_") for name in ast.literal_eval(groups))


# Names of a stage that a model has too.


def labels() -> Tensor:
    return torch.tensor([0, -100, -100, 3])


class Named(nn.Module):
    """Its parts are called as what a stage has of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weights, self.known, self.mb, self.prologue, self.counts = (nn.Linear(6, 6) for _ in range(5))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.mb(self.known(self.weights(x)).tanh()).tanh()
        return F.cross_entropy(self.counts(self.prologue(x).tanh()), target)


class Rooted(nn.Module):
    """So are parameters that are in no part."""

    def __init__(self) -> None:
        super().__init__()
        self.mb, self.known, self.weights = (nn.Parameter(torch.rand(6)) for _ in range(3))
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.b(self.a(x * self.mb).tanh() * self.known) * self.weights, target)


@pytest.mark.parametrize("net", [Named, Rooted])
@pytest.mark.parametrize("plan", ["pp=2", "pp=2,zb"])
def test_models_may_have_the_names_of_a_stage(net, plan):
    torch.manual_seed(0)

    report = verify(
        net(), plan, example=(torch.randn(4, 6), labels()), method="threads", pipeline={"microbatches": 2}, steps=1
    )

    assert report.passed, str(report)


def test_a_count_is_said_with_the_axes_it_is_summed_over_and_how_it_is_reduced():
    early = [
        PrologueValue(value="count@loss", source="count@loss@early"),
        PrologueValue(value="count@loss_1", source="a", axes=("dp",)),
        PrologueValue(value="count@loss_2", source="b", axes=("dp", "tp"), how="max"),
    ]
    program = compile_program(
        TwoLosses(), (torch.randn(4, 6), labels(), labels()), {}, request_for("pp=2"), 2
    ).programs[-1].with_(early=tuple(early))  # fmt: skip

    assert list(counts(program)) == [
        'runtime.PrologueCount(name="count")',
        'runtime.PrologueCount(name="count_1", over="dp")',
        'runtime.PrologueCount(name="count_2", over="dp_tp", op="max")',
    ]
    assert known_names(program) == {
        "count@loss": "self.known.count",
        "count@loss_1": "self.known.count_1",
        "count@loss_2": "self.known.count_2",
    }

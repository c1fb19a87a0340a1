"""Programs of stages: how values go between them, how outputs leave, who holds what."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from shardwright.capture import capture
from shardwright.errors import PlanError
from shardwright.layout import (
    INVARIANT,
    MB,
    REPLICATE,
    Axis,
    Block,
    Mesh,
    Partial,
    Shard,
    local_region,
    make_layout,
    replicated,
)
from shardwright.lower.place import in_time, sendable_layout
from shardwright.plan import parse_plan_string
from shardwright.plan.lowering import PipelinePrograms, _with_others, lower_pipeline
from shardwright.plan.pipeline import build_pipeline
from shardwright.rules import analyse
from tests.plan.graphs import analysis_of, graph_of


def lowered(text: str, name: str = "gpt", microbatches: int = 2, batch: int = 12, **options) -> PipelinePrograms:
    graph, analysis = graph_of(name, batch), analysis_of(name, batch)
    return lower_pipeline(
        graph, build_pipeline(graph, parse_plan_string(text), analysis, "", microbatches), analysis, **options
    )


def lowered_module(
    module: nn.Module, *args: Tensor, text: str = "pp=2", microbatches: int = 2, local=False
) -> PipelinePrograms:
    graph = capture(module, args, {}).graph
    analysis = analyse(graph)
    return lower_pipeline(
        graph, build_pipeline(graph, parse_plan_string(text), analysis, "", microbatches, local), analysis
    )


# Between stages.


def test_what_crosses_has_the_shape_of_a_microbatch():
    (passage,) = lowered("pp=2", microbatches=3).passages

    assert passage.shape == (4, 12, 32)
    assert (passage.sender, passage.receiver, passage.gradient) == (0, 1, True)
    assert passage.sent == passage.received == replicated(3), "time is not in the layouts between devices"


@pytest.mark.parametrize("text", ["pp=2,dp=2", "pp=2,tp=2", "pp=2,sp=2"])
def test_meshes_that_are_alike_give_as_the_other_takes(text):
    for passage in lowered(text).passages:
        assert passage.sent == passage.received


def test_rows_of_a_microbatch_are_split_over_devices():
    (passage,) = lowered("pp=2,dp=2").passages

    assert passage.shape == (6, 12, 32)
    assert local_region(passage.sent, passage.shape, {"dp": 2}, {"dp": 1}).local_shape == (3, 12, 32)


def test_so_are_microbatches_of_each_groups_own_rows():
    (passage,) = lowered("pp=2,dp=2", mode="per_replica").passages

    assert passage.shape == (6, 12, 32)
    assert local_region(passage.sent, passage.shape, {"dp": 2}, {"dp": 1}).local_shape == (3, 12, 32)


def test_meshes_that_differ_have_each_their_layout():
    (passage,) = lowered("pp=1+3,dp").passages

    assert passage.sent == replicated(3)
    assert passage.received.shard_of("dp") is not None


def test_partial_sums_are_summed_before_they_go_on():
    for passage in lowered("pp=2,tp=2").passages:
        placements = [value for layout in (passage.sent, passage.received) for _, value in layout.rest]
        assert not any(isinstance(placement, Partial) for placement in placements)
        assert REPLICATE not in placements


class PartialAtTheCut(nn.Module):
    """What goes to the second stage is a product without a bias, under tp a partial sum."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(6, 24), nn.Linear(24, 6, bias=False), nn.Linear(6, 90)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(self.up(x).relu())).square().mean()


@pytest.mark.parametrize("text", ["pp=2+1,tp", "pp=2+4,tp"])
def test_partial_sums_are_summed_before_they_go_to_another_mesh(text):
    built = lowered_module(PartialAtTheCut(), torch.randn(4, 6), text=text)
    (passage,) = built.passages

    assert passage.sent == passage.received == replicated(2)
    assert built.programs[0].body[-1].target == "comm.all_reduce"


def test_a_mask_of_whole_numbers_crosses_without_a_gradient():
    passages = lowered("pp=2", "masked").passages

    assert {passage.dtype: passage.gradient for passage in passages} == {"float32": True, "int64": False}


def test_a_skip_goes_straight_to_where_it_is_read():
    program = lowered("pp=4", "unet")

    assert any(receiver - sender > 1 for sender, receiver in program.edges)
    programs = program.programs
    for passage in program.passages:
        assert passage.value in programs[passage.receiver].received
        assert passage.value in [output.value for output in programs[passage.sender].graph.outputs]


def test_an_op_that_a_stage_runs_beside_its_own_is_split_as_there_on_the_axes_that_it_has():
    own, other = {"a": {"dp": "b"}}, {"a": {"dp": "x"}, "c": {"dp": "n", "tp": "k", MB: "n"}}
    meshes = [Mesh(axes=(Axis(name="dp", size=2),)), Mesh(axes=(Axis(name="dp", size=2), Axis(name="tp", size=2)))]
    stages = [SimpleNamespace(choices=c, mesh=m) for c, m in zip((own, other), meshes, strict=True)]
    graph = SimpleNamespace(ops=[SimpleNamespace(name="a"), SimpleNamespace(name="c")])

    assert _with_others(stages, 0, graph) == {"a": {"dp": "b"}, "c": {"dp": "n", MB: "n"}}


# Who holds what.


@pytest.mark.parametrize("text", ["pp=2", "pp=4", "pp=2,interleaved", "pp=1+3,dp"])
def test_every_parameter_is_held_and_a_tied_one_by_all_that_read_it(text):
    lowered_program = lowered(text)
    values = [{parameter.name for parameter in program.parameters} for program in lowered_program.programs]

    assert set().union(*values) == {parameter.key for parameter in lowered_program.graph.parameters}
    assert [number for number, keys in enumerate(values) if "wte.weight" in keys] == [0, len(values) - 1]
    assert sum(map(len, values)) == len(set().union(*values)) + 1, "all others by one stage"


def test_programs_of_stages_run_by_a_schedule_and_leave_nothing_to_be_awaited():
    for program in lowered("pp=2,dp=2").programs:
        assert program.stepped and not program.puts_off
        assert not any(op.argument("later") for op in program.body)
    assert all(program.puts_off for program in lowered("pp=2,zb").programs)


def test_stages_of_one_device_hold_a_tied_weight_alike():
    program = lowered("pp=2,tp=2,zbv")
    first, last = (
        next(parameter for parameter in p.parameters if parameter.name == "wte.weight")
        for p in program.programs[:: len(program.programs) - 1]
    )

    assert first.layout == last.layout


def test_homes_of_an_entry_before_are_kept():
    lowered_program = lowered("pp=2,tp=2")
    storage_options = [
        {parameter.name: parameter.layout for parameter in program.parameters} for program in lowered_program.programs
    ]
    fixed = [
        {key: replicated(len(layout.shards)) if key.endswith("up.weight") else layout for key, layout in option.items()}
        for option in storage_options
    ]

    again = lowered("pp=2,tp=2", storage_options=fixed)

    results = [{parameter.name: parameter.layout for parameter in program.parameters} for program in again.programs]
    assert results == fixed != storage_options


# How outputs leave.


class Outputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> dict:
        h = self.a(x).tanh()
        y = self.b(h)
        return {
            "loss": y.square().mean(), "h": h, "y": y.t(), "weights": self.b.weight.square().sum(), "twice": h, "n": 2,
        }  # fmt: skip


def test_losses_are_summed_rows_joined_and_what_time_does_not_cut_is_the_same():
    exits = lowered_module(Outputs(), torch.randn(4, 6)).exits

    assert [(code.path, code.how, code.shape) for code in exits] == [
        ("loss", "sum", ()), ("h", "cat", (4, 6)), ("y", "cat", (6, 4)), ("weights", "same", ()),
        ("twice", "cat", (4, 6)),
    ]  # fmt: skip
    by_path = {code.path: code for code in exits}
    assert (by_path["h"].dim, by_path["y"].dim) == (0, 1)
    assert (by_path["h"].stage, by_path["loss"].stage) == (0, 1)
    assert by_path["h"].value == by_path["twice"].value


def test_batches_of_their_own_are_averaged_or_joined():
    exits = lowered_module(Outputs(), torch.randn(4, 6), microbatches=3, local=True).exits

    by_key = {code.path: (code.how, code.shape) for code in exits}
    assert by_key["loss"] == ("mean", ())
    assert by_key["h"] == ("cat", (12, 6))


def test_a_value_that_crosses_and_is_an_output_leaves_whole():
    built = lowered_module(Outputs(), torch.randn(4, 6), text="pp=2,dp=2")
    (passage,) = (passage for passage in built.passages if passage.value == built.exits[1].value)

    assert passage.sent == replicated(2)
    assert passage.received.shard_of("dp") is not None


# Layouts in time.

TIME = Shard(axis=MB, blocks=(Block(1, 8, 1),))
PASS_PARTIAL = Shard(axis="dp", blocks=(Block(1, 4, 1),))


def test_an_output_is_in_time_as_it_is_made():
    sizes = {MB: 2, "dp": 2}

    assert in_time(replicated(2), make_layout(((TIME, PASS_PARTIAL), ()), {}), sizes) == make_layout(((TIME,), ()), {})
    assert in_time(replicated(0), make_layout((), {MB: Partial("sum"), "dp": INVARIANT}), sizes).placement(
        MB
    ) == Partial("sum")
    assert in_time(replicated(1), replicated(1), sizes) == replicated(1)


def test_time_comes_before_devices_unless_it_is_inside_them():
    rows = make_layout(((PASS_PARTIAL,), ()), {})
    layout = make_layout(((TIME,), ()), {})

    assert [cut.axis for cut in in_time(rows, layout, {MB: 2, "dp": 2}).shards[0]] == [MB, "dp"]
    assert [cut.axis for cut in in_time(rows, layout, {"dp": 2, MB: 2}).shards[0]] == ["dp", MB]


def test_settling_forgets_sums_over_devices_but_not_over_time():
    layout = make_layout(((TIME,), ()), {"tp": Partial("sum"), "dp": REPLICATE})

    assert sendable_layout(layout) == make_layout(((TIME,), ()), {})
    assert sendable_layout(make_layout((), {MB: Partial("sum"), "tp": REPLICATE})) == make_layout(
        (), {MB: Partial("sum")}
    )


def test_a_plan_for_another_graph_is_refused():
    graph, analysis = graph_of("gpt", 12), analysis_of("gpt", 12)
    plan = build_pipeline(graph, parse_plan_string("pp=2"), analysis, "", 2)

    with pytest.raises(PlanError, match="another graph"):
        lower_pipeline(graph_of("masked", 12), plan, analysis_of("masked", 12))

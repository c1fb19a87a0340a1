"""Each pass is checked, and what it promises holds."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from shardwright.capture import capture
from shardwright.errors import LoweringError, PlanError
from shardwright.layout import INVARIANT, REPLICATE, replicated
from shardwright.lower import PASSES, Size
from shardwright.lower.check import check
from shardwright.lower.overlap import in_place, overlap
from shardwright.lower.place import check_edges
from shardwright.lower.program import flat
from shardwright.plan import build_plan, parse_plan_string
from shardwright.plan.lowering import lower
from shardwright.rules import analyse
from shardwright.rules.atoms import Atoms
from shardwright.storage.zero3 import Zero3
from tests.lower.test_collectives import program_of
from tests.plan.graphs import analysis_of, graph_of


def passes_of(text: str) -> list:
    """(name, program after it) of every pass, the placing first."""
    graph, analysis, shown = graph_of("gpt"), analysis_of("gpt"), []
    plan = build_plan(graph, parse_plan_string(text), analysis)
    lower(graph, plan, analysis, show=lambda name, program: shown.append((name, program)))
    return shown


def test_every_pass_can_be_printed_and_leaves_a_program_that_is_well_formed():
    graph, analysis, shown = graph_of("gpt"), analysis_of("gpt"), []

    lower(
        graph,
        build_plan(graph, parse_plan_string("tp=2"), analysis),
        analysis,
        show=lambda name, program: shown.append((name, program)),
    )

    assert [name for name, _ in shown[1:]] == [name for name, _ in PASSES]
    assert all(check(program) is program for _, program in shown)


def test_a_plan_for_another_graph_is_refused_before_anything_is_lowered():
    plan = build_plan(graph_of("gpt"), parse_plan_string("tp=2"), analysis_of("gpt"))

    with pytest.raises(PlanError, match="another graph"):
        lower(graph_of("rotary"), plan, analysis_of("rotary"))


# Broken programs.


def test_an_op_that_reads_what_nothing_made_is_named_with_its_line():
    program = program_of("tp=2")
    at = next(i for i, op in enumerate(program.body) if op.target == "aten.gelu.default")
    wrong = dataclasses.replace(program.body[at], inputs=("nowhere",))

    with pytest.raises(LoweringError, match=r"gelu.*transformer\.py:\d+ reads nowhere, which nothing before it makes"):
        check(program.with_(body=(*program.body[:at], wrong, *program.body[at + 1 :])))


def test_all_faults_are_named_at_once():
    program = program_of("tp=2")
    name = program.body[3].outputs[0]
    layouts = {key: layout for key, layout in program.layouts.items() if key != name}
    broken = program.with_(body=(*program.body, program.body[0]), layouts=layouts, outputs=("gone",))

    with pytest.raises(LoweringError) as error:
        check(broken)

    for fault in ("which exists already", "which has no layout", "returns gone, which nothing makes"):
        assert fault in str(error.value)


def test_a_cut_that_does_not_fit_its_shape_is_found():
    program = program_of("tp=2")
    name, layout = next(
        (n, layout) for n, layout in program.layouts.items() if layout.shard_of("tp") and n in _output_names(program)
    )
    value = dataclasses.replace(program.values[name], shape=tuple(size + 1 for size in program.values[name].shape))

    with pytest.raises(LoweringError, match=r"a shard of \d+ elements over tp meets a dim of \d+"):
        check(program.with_(values={**program.values, name: value}))
    assert layout is not None


def test_an_input_in_another_layout_than_its_op_asks_for_is_found():
    """The reshard before the second half of a block is taken out."""
    shown = {}
    graph, analysis = graph_of("gpt"), analysis_of("gpt")
    lower(
        graph,
        build_plan(graph, parse_plan_string("tp=2"), analysis),
        analysis,
        show=lambda name, program: shown.setdefault(name, program),
    )
    placed = shown["place: layouts and reshards"]
    at, op = next((i, op) for i, op in enumerate(placed.body) if op.target == "comm.all_reduce")
    body = [
        dataclasses.replace(value, inputs=tuple(op.inputs[0] if n == op.outputs[0] else n for n in value.inputs))
        for value in (*placed.body[:at], *placed.body[at + 1 :])
    ]

    with pytest.raises(LoweringError, match=r"wants .* as .* and finds it as .*partial sum"):
        check_edges(placed.with_(body=tuple(body)))


def _output_names(program) -> set[str]:
    return {name for op in program.body for name in op.outputs}


# Local sizes.


def numbers(value, program) -> tuple:
    at = dict.fromkeys(program.mesh.names, 0)
    return tuple(size.local(program.mesh.sizes, at) if isinstance(size, Size) else size for size in value)


def test_views_get_local_sizes_from_atoms():
    """[4, 12, 32] as [4, 12, 4 heads, 8], with heads on tp and rows on dp."""
    program = program_of("dp=2,tp=2")
    view = next(op for op in program.body if op.name == "blocks.0.attn / view")

    assert numbers(view.argument("size"), program) == (2, 12, 2, 8)
    assert [str(f.axes) for f in program.sizes_of(view.outputs[0])[2].sections[0]] == ["('tp',)"]


def test_a_row_of_sections_is_opened_only_where_a_cut_reaches_into_it():
    """(q | k), each a product of groups that both share and of heads of its own."""
    atoms = Atoms()
    (group,), (many,), (few,) = atoms.fresh(2), atoms.fresh(6), atoms.fresh(3)
    (row,), (inner,) = atoms.row([(group, many), (group, few)]), atoms.fresh(5)
    dim = (row, inner)

    assert flat(atoms, dim, {}) == flat(atoms, dim, {inner: ()}) == [(row, inner)]
    assert flat(atoms, dim, {row: ()}) == [(row, inner)]
    assert flat(atoms, dim, {group: ()}) == [(group, many, inner), (group, few, inner)]


def test_positions_are_made_whole_once_and_cut_where_they_are_used():
    program = program_of("sp=2")
    (arange,) = (op for op in program.constants if "arange" in op.target)

    assert program.layouts[arange.outputs[0]] == replicated(1)
    end = arange.argument("end")
    assert end.local(program.mesh.sizes, {"sp": 1}) == end.local(program.mesh.sizes, {"sp": 0}) == 12, (
        "all places, not this rank's"
    )
    assert not any("arange" in op.target for op in program.body)


def test_rotary_tables_are_shared_constants_of_all_layers():
    program = program_of("tp=2", "hf_llama")

    assert not any(op.target in ("aten.cos.default", "aten.sin.default") for op in program.body)
    assert sum(op.target == "aten.cos.default" for op in program.constants) == 1


def test_the_divisor_of_a_mean_stays_global():
    program = program_of("dp=2", "mlp")
    share = next(op for op in program.body if op.target == "aten.div.Scalar")

    assert share.argument("other") == 4 * 16, "4 rows of 16, of which a rank has 2"


def test_a_mean_of_what_is_whole_stays_a_mean():
    assert any(
        op.target == "aten.mse_loss.default" and op.argument("reduction", 1) == 1
        for op in program_of("tp=2", "mlp").body
    )


def test_fixed_homes_are_kept_for_the_entries_after_the_first():
    graph, analysis = graph_of("gpt"), analysis_of("gpt")
    storage_options = {parameter.name: parameter.layout for parameter in program_of("tp=2").parameters}

    again = lower(
        graph, build_plan(graph, parse_plan_string("tp=2"), analysis), analysis, storage_options=storage_options
    )
    other = lower(
        graph,
        build_plan(graph, parse_plan_string("tp=2"), analysis),
        analysis,
        storage_options={"wte.weight": replicated(2)},
    )

    assert {parameter.name: parameter.layout for parameter in again.parameters} == storage_options
    assert next(parameter.layout for parameter in other.parameters if parameter.name == "wte.weight") == replicated(2)


# Recomputation.


@pytest.mark.parametrize("text", ["tp=2,recompute", "sp=2,recompute"])
def test_the_ops_of_a_layer_are_in_its_region_and_no_others(text):
    regions: dict[str, set] = {}
    for op in program_of(text).body:
        layer = op.module_path.split(".")[1] if op.module_path.startswith("blocks.") else ""
        regions.setdefault(layer, set()).add(op.region)

    assert regions == {"": {None}, "0": {"recompute blocks.0"}, "1": {"recompute blocks.1"}}


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Deep(nn.Module):
    """Layers that begin with a product, which under sp reads what is gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layers = nn.LayerNorm(8), nn.ModuleList(Halves() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


def test_what_enters_a_region_is_gathered_before_it_and_not_again_in_backward():
    graph = capture(Deep(), (torch.randn(4, 6, 8),), {}).graph
    analysis = analyse(graph)
    program = lower(graph, build_plan(graph, parse_plan_string("sp=2,recompute"), analysis), analysis)

    gathered = {op.outputs[0]: op.region for op in program.body if op.target == "comm.all_gather_to_r"}
    readers = [op.region for op in program.body if gathered.keys() & set(op.inputs)]
    assert set(gathered.values()) == {None}
    assert readers == ["recompute layers.0", "recompute layers.1", "recompute layers.2"]
    assert all(op.region for op in program.body if op.target == "comm.reduce_scatter")


# Several axes.


def test_a_sum_over_two_axes_is_one_over_both():
    """4 heads on 8 devices: partial sums over tp1 and over tp0."""
    program = program_of("tp=8")
    sums = [op for op in program.body if op.target == "comm.all_reduce"]

    assert ("tp0", "tp1") in {op.argument("axes") for op in sums}
    assert not {name for op in sums for name in op.inputs} & {name for op in sums for name in op.outputs}


class HalfFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.up.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x)).sum()


def test_frozen_parameters_have_no_sum_of_gradients_and_are_kept_in_shares_all_the_same():
    graph = capture(HalfFrozen(), (torch.randn(4, 6),), {}).graph
    analysis = analyse(graph)
    plan = build_plan(graph, parse_plan_string("zero3=2"), analysis)
    program = lower(graph, plan, analysis)
    (axis,) = program.parameters[0].storage.axes

    again = lower(
        graph, plan, analysis, storage_options={parameter.name: parameter.layout for parameter in program.parameters}
    )

    assert again.parameters == program.parameters
    assert {p.name: (p.storage, p.layout.placement(axis)) for p in program.parameters} == {
        "up.weight": (Zero3((axis,)), INVARIANT), "up.bias": (Zero3((axis,)), INVARIANT),
        "down.weight": (Zero3((axis,)), REPLICATE), "down.bias": (Zero3((axis,)), REPLICATE),
    }  # fmt: skip


# Speed: what may be done in place, and what may be joined.


def test_only_a_product_that_nobody_else_reads_is_summed_in_place():
    program = program_of("tp=2")
    makers = {name: op for op in program.body for name in op.outputs}
    sums = [op for op in program.body if op.target == "comm.all_reduce"]

    assert {makers[op.inputs[0]].target for op in sums if op.argument("in_place")} == {
        "aten.linear.default",
        "runtime.embedding_rows",
    }
    users = program.users()
    assert all(len(users[op.inputs[0]]) == 1 for op in sums if op.argument("in_place"))

    kept = program.with_(
        outputs=(*program.outputs, sums[0].inputs[0]), body=tuple(map(_without_in_place, program.body))
    )
    again = {op.name: op.argument("in_place") for op in in_place(kept).body}
    assert not again[sums[0].name]
    assert again[sums[1].name]


def _without_in_place(op):
    return dataclasses.replace(op, arguments=tuple(argument for argument in op.arguments if argument[0] != "in_place"))


def test_the_products_of_one_value_are_joined_with_its_reshard():
    joined = [op for op in program_of("tp=2", "hf_llama").body if op.target == "runtime.replicate_linears"]

    assert [len(op.outputs) for op in joined if "layers.0" in op.module_path] == [3, 2]


def test_joined_products_keep_their_biases_and_each_its_own():
    joined = [op for op in program_of("tp=2").body if op.target == "runtime.replicate_linears"]
    (qkv,) = (op for op in joined if op.module_path == "blocks.0.attn.qkv")

    (weight,), (bias,) = qkv.argument("weights"), qkv.argument("biases")
    assert "weight" in qkv.inputs[weight.index] and "bias" in qkv.inputs[bias.index]
    assert {op.argument("biases") for op in program_of("tp=2", "hf_llama").body if op.target == qkv.target} == {None}


def test_a_value_that_something_else_reads_too_keeps_its_reshard():
    program = passes_of("tp=2")[-2][1]
    reshard = next(op for op in program.body if op.target == "comm.replicate")
    at = program.body.index(reshard)
    other = dataclasses.replace(
        reshard,
        name="other",
        target="aten.relu.default",
        inputs=reshard.outputs,
        outputs=(reshard.inputs[0] + "@9",),
    )
    layouts = {**program.layouts, other.outputs[0]: program.layouts[reshard.outputs[0]]}
    values = {**program.values, other.outputs[0]: program.values[reshard.outputs[0]]}
    body = (*program.body[: at + 1], other, *program.body[at + 1 :])

    assert reshard in overlap(program.with_(body=body, layouts=layouts, values=values)).body
    assert reshard not in overlap(program).body

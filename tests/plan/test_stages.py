"""A graph in stages: where it may be cut, what goes between, and that the shards compute what the whole computes."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwright.capture import CapturedGraph, capture, run
from shardwright.cost import flops
from shardwright.errors import PlanError
from shardwright.plan.stages import OpSequence, StagedGraph, balanced, split_graph
from shardwright.rules import analyse
from tests.models.zoo import ZOO
from tests.plan.graphs import analysis_of

D = 6


def line_of(module: nn.Module, *args: Tensor) -> OpSequence:
    return OpSequence(analyse(capture(module, args, {}).graph))


def place(line: OpSequence, name: str) -> int:
    return line.place[name]


def cut_before(line: OpSequence, *names: str) -> StagedGraph:
    """The line cut before the ops of these names."""
    return split_graph(line, line.parts([place(line, name) for name in names]))


def names_of(graph) -> set[str]:
    return {op.name for op in graph.ops}


def keys_of(graph) -> set[str]:
    return {parameter.key for parameter in graph.parameters}


def crossing(cut: StagedGraph) -> set[tuple[str, int, int]]:
    return {(sent.value, sent.sender, sent.receiver) for sent in cut.crossings}


def x() -> Tensor:
    return torch.randn(4, D)


class Net(nn.Module):
    """Four products in a row, and what a test adds to them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(D, D, bias=False) for _ in range(4))


# Ops off the line.


class Positions(Net):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        steps = torch.arange(D) * 0.1
        keep = (mask > 0).float()
        scale = self.a.weight.square().sum()
        x = self.b(x + steps) * keep * scale
        x = self.c(x.tanh()) * keep + steps
        return (self.d(x) * keep * scale).sum()


def test_constants_and_what_inputs_or_parameters_alone_decide_are_run_where_they_are_read():
    line = line_of(Positions(), x(), x())
    off = {"/ arange", "/ mul", "/ gt", "/ _to_copy", "/ square", "/ sum"}
    assert off <= line.floating
    assert not line.floating & {"b / linear", "c / linear", "d / linear"}

    cut = cut_before(line, "c / linear", "d / linear")

    assert [names_of(graph) & {"/ gt", "/ _to_copy"} for graph in cut.graphs] == [{"/ gt", "/ _to_copy"}] * 3
    assert ["/ arange" in names_of(graph) for graph in cut.graphs] == [True, True, False]
    assert ["/ square" in names_of(graph) for graph in cut.graphs] == [True, False, True]
    assert [keys_of(graph) for graph in cut.graphs] == [
        {"a.weight", "b.weight"},
        {"c.weight"},
        {"a.weight", "d.weight"},
    ]
    crossed = {sent.value for sent in cut.crossings}
    assert len(crossed) == 2, "only what is on the line is sent"
    assert all(line.graph.producer[name].name in line.place for name in crossed)


class Drawing(Net):
    def forward(self, x: Tensor) -> Tensor:
        noise = nn.functional.dropout(x, 0.5, training=True)
        return self.b(self.a(noise)).sum() + noise.sum()


def test_what_is_drawn_is_drawn_once_and_sent():
    line = line_of(Drawing(), x())

    cut = cut_before(line, "b / linear")

    assert "/ dropout" in line.place
    assert ["/ dropout" in names_of(graph) for graph in cut.graphs] == [True, False]
    assert {(sender, receiver) for _, sender, receiver in crossing(cut)} == {(0, 1)}
    assert len(cut.crossings) == 2


class Twice(Net):
    """`again` is cheap, and what it is made of goes on anyway."""

    def __init__(self, alone: bool) -> None:
        super().__init__()
        self.alone = alone

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        again = h.tanh()
        y = self.b(again)
        return (self.c(y) + again + (0.0 if self.alone else h)).sum()


def test_a_cheap_op_whose_inputs_are_at_hand_is_run_again_instead_of_sent():
    cut = cut_before(line_of(Twice(alone=False), x()), "c / linear")

    assert ["/ tanh" in names_of(graph) for graph in cut.graphs] == [True, True]
    assert {sent.value for sent in cut.crossings} == {"h", "y"}


def test_else_it_is_sent():
    cut = cut_before(line_of(Twice(alone=True), x()), "c / linear")

    assert ["/ tanh" in names_of(graph) for graph in cut.graphs] == [True, False]
    assert {sent.value for sent in cut.crossings} == {"again", "y"}


class Skipping(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        y = self.b(h.tanh())
        z = self.c(y) + h
        return (self.d(z) + h).sum()


def test_a_value_that_several_stages_read_goes_from_where_it_is_made_to_each():
    line = line_of(Skipping(), x())
    (h,) = line.graph.by_name["a / linear"].outputs

    cut = cut_before(line, "b / linear", "c / linear", "d / linear")

    assert {(sender, receiver) for value, sender, receiver in crossing(cut) if value == h} == {(0, 2), (0, 3)}
    assert sum(output.value == h for output in cut.graphs[0].outputs) == 1, "given once"
    assert cut.edges == {(0, 1), (1, 2), (0, 2), (2, 3), (0, 3)}


class Spare(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)).sum()


def test_parameters_that_nobody_reads_are_held_somewhere():
    cut = cut_before(line_of(Spare(), x()), "b / linear")

    stored = [key for graph in cut.graphs for key in keys_of(graph)]
    assert sorted(stored) == ["a.weight", "b.weight", "c.weight", "d.weight"]


class Tied(Net):
    def forward(self, x: Tensor) -> Tensor:
        return (self.b(self.a(x).tanh()).tanh() @ self.a.weight).sum()


def test_a_weight_that_two_stages_read_is_held_by_both():
    cut = cut_before(line_of(Tied(), x()), "b / linear", "/ matmul")

    assert ["a.weight" in keys_of(graph) for graph in cut.graphs] == [True, False, True]


class Returning(Net):
    def forward(self, x: Tensor) -> dict:
        h = self.a(x)
        return {"h": h, "again": h, "x": x, "loss": self.b(h.tanh()).sum(), "n": 3}


def test_outputs_leave_from_where_they_are_made():
    line = line_of(Returning(), x())

    cut = cut_before(line, "b / linear")

    assert [output.path for output in line.graph.outputs] == ["h", "again", "x", "loss", "n"]
    assert cut.outputs == (0, 0, 0, 1, -1)
    assert [output.path for output in cut.graphs[1].outputs] == ["loss"]


# Where the line may be cut.


@pytest.mark.parametrize("name", ["gpt", "unet", "hf_t5", "masked"])
def test_bytes_that_cross_are_those_of_values_made_before_and_read_after(name):
    line = OpSequence(analysis_of(name, 12))

    for at in range(len(line.ops)):
        before = {value for op in line.ops[:at] for value in op.outputs}
        after = {value for op in line.ops[at:] for value in op.inputs}
        assert line.crossing[at] == sum(line.graph.values[value].bytes for value in before & after), at


@pytest.mark.parametrize("name", ["gpt", "unet", "hf_t5"])
def test_places_are_where_less_crosses_than_around_them_and_never_where_more_does(name):
    line = OpSequence(analysis_of(name, 12))

    assert line.places == tuple(sorted(set(line.places)))
    assert all(0 < at < len(line.ops) for at in line.places)
    load = (*line.crossing, 0)
    inside = range(2, len(line.ops) - 1)
    lowest = {at for at in inside if load[at - 1] > load[at] < load[at + 1]}
    assert lowest <= {*line.places}
    assert not {*line.places} & {at for at in inside if load[at - 1] < load[at]}


class Biased(nn.Module):
    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(width, other) for width, other in itertools.pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x).tanh()).tanh()).sum()


@pytest.mark.parametrize("widths", [(D, D, D, D), (D, 9, 4, 9), (D, 4, 9, 2), (D, 9, 7, 5), (D, 7, 8, 9)])
def test_a_bias_and_an_activation_stay_with_their_product(widths):
    line = line_of(Biased(*widths), x())

    assert [line.ops[at].name for at in line.places] == ["b / linear", "c / linear", "/ sum"]


def test_the_first_op_may_be_a_stage_of_its_own():
    line = line_of(Spare(), x())

    assert [line.ops[at].name for at in line.places] == ["b / linear", "/ sum"]


def test_a_block_of_a_gpt_may_be_cut_from_the_next():
    line = OpSequence(analysis_of("gpt", 12))

    assert place(line, "blocks.1.ln1 / layer_norm") in line.places


class Checkpointed(Net):
    def inner(self, x: Tensor) -> Tensor:
        return self.c(self.b(x).tanh())

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.inner, self.a(x), use_reentrant=False)
        return self.d(x).sum()


def test_regions_that_the_user_checkpoints_are_not_cut():
    line = line_of(Checkpointed(), x())
    region = [at for at, op in enumerate(line.ops) if op.region is not None]
    assert len(region) == 3

    assert not set(region[1:]) & set(line.places)
    assert {region[0], region[-1] + 1} <= set(line.places)


def test_more_stages_than_places_are_refused_with_the_number():
    line = OpSequence(analysis_of("mlp"))
    most = len(line.places) + 1

    assert len(balanced(line, [1.0] * len(line.ops), most)) == most - 1
    with pytest.raises(PlanError, match=rf"{most + 1} stages are asked for, and the model can be cut in {most} at"):
        balanced(line, [1.0] * len(line.ops), most + 1)


class OneOp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def test_a_graph_that_can_not_be_cut_says_so():
    line = line_of(OneOp(), x())

    with pytest.raises(PlanError, match="2 stages are asked for, and the model can be cut in 1 at most; use fewer"):
        balanced(line, [1.0] * len(line.ops), 2)


@pytest.mark.parametrize("cuts", [(0,), (3, 3), (3, 2), (99,)])
def test_parts_that_would_be_empty_are_refused(cuts):
    line = OpSequence(analysis_of("mlp"))

    with pytest.raises(PlanError, match=rf"a line of {len(line.ops)} ops can't be cut at"):
        line.parts(cuts)


def test_a_stage_that_reads_from_a_later_one_is_refused_with_both_ops():
    line = line_of(Skipping(), x())
    first, second = line.parts([place(line, "c / linear")])

    with pytest.raises(PlanError, match=r"/ tanh .*is in stage 0 and reads h, which a / linear .*later stage 1"):
        split_graph(line, [[name for name in first if name != "a / linear"], [*second, "a / linear"]])


# The shards together are the whole.

MODELS = ("gpt", "masked", "unet", "repeated", "regularized", "resnet", "lora", "checkpointed_gpt", "hf_t5", "hf_llama")


@lru_cache
def captured_of(name: str) -> tuple[CapturedGraph, OpSequence, dict[str, Tensor], dict[str, Tensor]]:
    case = ZOO[name](dtype=torch.float64)
    captured = capture(case.module, case.args, case.kwargs, promote=True)  # casts to float32 make sums depend on order
    inputs = dict(zip([i.value for i in captured.graph.inputs], captured.flatten(case.args, case.kwargs), strict=True))
    state = dict(case.module.named_parameters(remove_duplicate=False))
    state |= dict(case.module.named_buffers(remove_duplicate=False))
    return captured, OpSequence(analyse(captured.graph)), inputs, state


def run_in_shards(cut: StagedGraph, captured: CapturedGraph, arguments: dict[str, Tensor], state: dict[str, Tensor]):
    """Stages one after the other, each with nothing but what it takes: outputs in order, and updated buffers."""
    sent: dict[tuple[str, int], Tensor] = {}
    outputs: list[Tensor | None] = [None] * len(cut.outputs)
    updates: dict[str, Tensor] = {}
    for number, graph in enumerate(cut.graphs):
        takes = {
            crossing.value: sent.pop((crossing.value, number))
            for crossing in cut.crossings
            if crossing.receiver == number
        }
        inputs = [
            takes[crossing.value] if crossing.value in takes else arguments[crossing.value] for crossing in graph.inputs
        ]
        keys = {key for crossing in graph.parameters for key in crossing.keys} | {
            crossing.key for crossing in graph.buffers
        }
        own = {key: tensor for key, tensor in state.items() if key in keys}
        results, changed, values = run(replace(captured, graph=graph), inputs, own, own)
        sent |= {
            (crossing.value, crossing.receiver): values[crossing.value]
            for crossing in cut.crossings
            if crossing.sender == number
        }
        leaving = iter(results[len(graph.outputs) - cut.outputs.count(number) :])
        outputs = [next(leaving) if at == number else old for at, old in zip(cut.outputs, outputs, strict=True)]
        updates |= changed
    assert not sent, "what crosses is taken"
    return outputs, updates


def gradients_of(outputs: list[Tensor | None], state: dict[str, Tensor]) -> dict[str, Tensor]:
    loss = next(output for output in outputs if output is not None)
    trained = {key: tensor for key, tensor in state.items() if tensor.requires_grad}
    gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    return {key: gradient for key, gradient in zip(trained, gradients, strict=True) if gradient is not None}


@pytest.mark.parametrize("name", MODELS)
def test_stages_one_after_the_other_compute_what_the_graph_computes(name):
    captured, line, inputs, state = captured_of(name)
    wanted, changed, _ = run(captured, list(inputs.values()), state, state)
    gradients = gradients_of(wanted, state)
    drawn = random.Random(name)

    for count in (2, 3, 5):
        cuts = sorted(drawn.sample(range(1, len(line.ops)), count - 1))  # anywhere, also where nobody would
        cut = split_graph(line, line.parts(cuts))
        outputs, updates = run_in_shards(cut, captured, inputs, state)

        assert all(a is b is None or torch.equal(a, b) for a, b in zip(outputs, wanted, strict=True))
        assert updates.keys() == changed.keys()
        assert all(torch.equal(updates[key], changed[key]) for key in changed)
        staged = gradients_of(outputs, state)
        assert staged.keys() == gradients.keys()
        for key, gradient in gradients.items():
            torch.testing.assert_close(staged[key], gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", MODELS)
def test_every_op_is_in_one_part_and_all_that_is_needed_is_run(name):
    _, line, _, _ = captured_of(name)
    drawn = random.Random(name)
    for count in (1, 2, 4):
        cuts = sorted(drawn.sample(range(1, len(line.ops)), count - 1))

        parts = line.parts(cuts)

        assert sorted(op for part in parts for op in part) == sorted(op.name for op in line.graph.ops)
        cut = split_graph(line, parts)
        for part, graph in zip(parts, cut.graphs, strict=True):
            assert {op for op in part if op in line.place} <= names_of(graph)
            assert len(graph.ops) == len(names_of(graph))
        assert all(sender < receiver for sender, receiver in cut.edges)


# The balance.


class FakeLine(OpSequence):
    """A line of numbers: what crosses before each place, all of which may be cut."""

    def __init__(self, crossing: list[int]) -> None:
        self.__dict__ |= {
            "ops": (None,) * len(crossing),
            "crossing": tuple(crossing),
            "places": tuple(range(1, len(crossing))),
        }


def brute(weights: list[float], crossing: list[int], count: int) -> list[tuple[float, int]]:
    """(the heaviest part, what crosses) of every way to cut."""
    costs = []
    for cuts in itertools.combinations(range(1, len(weights)), count - 1):
        bounds = [0, *cuts, len(weights)]
        heaviest = max(sum(weights[a:b]) for a, b in itertools.pairwise(bounds))
        costs.append((heaviest, sum(crossing[at] for at in cuts)))
    return costs


ops = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), min_size=1, max_size=9)


@settings(max_examples=200, deadline=None)
@given(ops, st.data(), st.sampled_from([0.0, 0.05, 0.5]))
def test_the_heaviest_part_is_as_light_as_can_be_and_then_the_least_is_sent(drawn, data, slack):
    count = data.draw(st.integers(1, len(drawn)))
    weights, crossing = [float(w) for w, _ in drawn], [c for _, c in drawn]

    cuts = balanced(FakeLine(crossing), weights, count, slack)

    every = brute(weights, crossing, count)
    best = min(heaviest for heaviest, _ in every)
    bounds = [0, *cuts, len(weights)]
    mine = max(sum(weights[a:b]) for a, b in itertools.pairwise(bounds))
    assert len(cuts) == count - 1 and all(a < b for a, b in itertools.pairwise(bounds))
    assert mine <= best * (1 + slack) * (1 + 1e-6)
    within = [sent for heaviest, sent in every if heaviest <= best * (1 + slack)]
    assert sum(crossing[at] for at in cuts) <= min(within)


def test_stages_of_a_deep_gpt_have_about_the_same_arithmetic():
    line = OpSequence(analysis_of("gpt_deep", 12))
    weights = [flops(line.analysis.signatures[op.name]) for op in line.ops]

    bounds = [0, *balanced(line, weights, 4), len(weights)]

    loads = [sum(weights[a:b]) for a, b in itertools.pairwise(bounds)]
    assert max(loads) <= 1.3 * sum(loads) / 4

"""The debug mode names the op that was given a wrong rule, and finds nothing where nothing is wrong."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwright.errors import InputError
from shardwright.rules import parse, registry
from shardwright.runtime.algorithms import linears
from shardwright.runtime.collectives import comm
from shardwright.verify import first_difference, trace
from tests.models.zoo import ZOO


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.last = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        weights = torch.softmax(self.up(x), -1)
        y = F.gelu(F.linear(weights, self.down.weight))
        return F.mse_loss(self.last(y), x)


class Narrow(nn.Module):
    """Its gelu comes right after a product that tensor parallelism leaves as a partial sum."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 32)
        self.down = nn.Linear(32, 8, bias=False)

    def forward(self, x):
        return F.mse_loss(F.gelu(self.down(self.up(x).relu())), x)


@pytest.fixture
def gated():
    torch.manual_seed(0)
    return Gated(), (torch.randn(4, 8),)


@pytest.mark.parametrize(
    ("name", "plan"),
    [("mlp", "dp=2"), ("gpt", "dp=2,tp=2"), ("gpt", "sp=2"), ("gpt_odd_vocab", "tp=2"), ("gpt_ignore", "dp=2"),
     ("dropout_gpt", "tp=2"), ("resnet", "dp=2"), ("custom_backward", "dp=2"), ("gqa_fused", "tp=2")],
)  # fmt: skip
def test_a_right_program_never_leaves_the_original(name, plan):
    module, args, kwargs = ZOO[name]()
    trace_result = trace(module, plan, example=(args, kwargs))

    assert trace_result.first is None, str(trace_result.first)
    assert {row.phase for row in trace_result.rows} == {"forward", "backward"}


def test_a_softmax_that_claims_to_be_splittable_is_named(gated, monkeypatch):
    module, example = gated
    assert first_difference(module, "tp=2", example=example) is None
    monkeypatch.setitem(registry._TABLE, "aten.softmax.int", lambda call: parse("* d -> * d"))

    difference = first_difference(module, "tp=2", example=example)

    assert difference is not None
    assert (difference.phase, difference.op) == ("forward", "/ softmax")
    assert difference.value == "weights: float64[4, 16]"
    assert difference.source.startswith("test_debug.py:")
    assert difference.layout == "[., tp]"
    assert len(difference.hashes) == 2
    assert "test_debug.py" in str(difference)


def test_a_gelu_that_claims_to_be_linear_is_named(monkeypatch):
    torch.manual_seed(0)
    module, example = Narrow(), (torch.randn(4, 8),)
    assert first_difference(module, "tp=2", example=example) is None
    monkeypatch.setitem(registry._TABLE, "aten.gelu.default", lambda call: parse("*~1 -> *"))

    difference = first_difference(module, "tp=2", example=example)

    assert difference is not None
    assert (difference.phase, difference.op) == ("forward", "/ gelu")
    assert "partial sum" in difference.layout


def test_a_reshard_with_a_wrong_backward_is_named(monkeypatch):
    monkeypatch.setattr(comm, "replicate", lambda x, group: x)
    module, args, kwargs = ZOO["hf_gpt2"]()

    difference = first_difference(module, "tp=2", example=(args, kwargs))

    assert difference is not None
    assert difference.phase == "backward"
    assert " < replicate " in difference.op


def test_products_joined_with_a_reshard_whose_backward_is_wrong_are_named(monkeypatch):
    monkeypatch.setattr(linears, "_apply", lambda x, way, weights, biases: linears._each(x, weights, biases))
    module, args, kwargs = ZOO["gpt"]()

    difference = first_difference(module, "tp=2", example=(args, kwargs))

    assert difference is not None
    assert (difference.phase, difference.op) == ("backward", "head / linear")
    assert difference.value.startswith("ln")


def test_an_op_with_a_wrong_backward_is_named(gated, monkeypatch):
    """The rule says that the weight's gradient is replicated, where each rank has a pending sum."""
    from shardwright.layout import INVARIANT
    from shardwright.rules.signature import Signature

    module, example = gated
    right = Signature._absent

    def wrong(self, bound, role, is_input):
        return INVARIANT if bound.value == "last_weight" else right(self, bound, role, is_input)

    monkeypatch.setattr(Signature, "_absent", wrong)
    difference = first_difference(module, "dp=2", example=example)

    assert difference is not None
    assert (difference.phase, difference.op) == ("backward", "last / linear")
    assert difference.value.startswith("last_weight")


def test_a_trace_lists_every_value_with_its_layout_and_hashes(gated):
    module, example = gated
    trace_result = trace(module, "dp=2", example=example)
    text = str(trace_result)

    assert "weights: float64[4, 16]" in text
    assert "[dp, .]" in text
    (weights,) = [row for row in trace_result.rows if row.phase == "forward" and row.op == "/ softmax"]
    assert weights.hashes[0] != weights.hashes[1]  # each rank has other rows
    assert all(digits in text for digits in weights.hashes)
    loss = [row for row in trace_result.rows if row.phase == "forward" and " < all_reduce " in row.op][-1]
    assert loss.hashes[0] == loss.hashes[1]  # the loss is whole


def test_pipelines_are_not_followed_op_by_op():
    module, args, kwargs = ZOO["mlp"]()

    with pytest.raises(InputError, match="pp=2 runs by a schedule; only plans without stages"):
        first_difference(module, "pp=2", example=(args, kwargs))

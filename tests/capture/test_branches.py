"""`torch.cond`, `scan` and `while_loop` stay what they are: one op that decides by data, with graphs of its own."""

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan

from shardwright.capture import capture, run
from shardwright.errors import CaptureError
from shardwright.ir import show

from ..models.deciding import Chooses, Net, Recurrent, Repeats
from .agreement import agree, tensors_of

# torch's own cond says it of every model that calls it on what is no leaf
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def x(value: float = 0.0) -> Tensor:
    built = torch.randn(3, 4, dtype=torch.float64)
    return built.abs() * value if value else built


@pytest.mark.parametrize("value", [1.0, 10.0, -1.0])
def test_every_way_through_a_branch_in_a_branch(value):
    captured = agree(Chooses().double(), x(value))
    [op] = [op for op in captured.graph.ops if op.target.startswith("call.")]
    assert op.target == "call.cond"
    assert set(captured.graph.branches) == {"cond_then", "cond_else", "cond_then_1", "cond_else_1"}
    assert "call.cond" in show(captured.graph)


def test_a_parameter_of_the_branch_that_is_not_taken_has_zeros_for_its_gradient():
    module = Chooses().double()
    captured = capture(module, (x(),))
    outputs, _, _ = run(captured, [x(-1.0)], *tensors_of(module))
    outputs[0].sum().backward()
    assert torch.equal(module.large.weight.grad, torch.zeros(4, 4, dtype=torch.float64))
    assert module.small.weight.grad.abs().max() > 0


def test_a_scan_is_one_op():
    captured = agree(Recurrent().double(), torch.randn(2, 5, 4, dtype=torch.float64))
    [op] = [op for op in captured.graph.ops if op.target.startswith("call.")]
    assert (op.target, op.argument("step")) == ("call.scan", "scan_step")


@pytest.mark.parametrize("value", [1.0, -1.0])
def test_a_while_loop_is_one_op(value):
    """What it starts from needs a gradient here: torch's own backward of a while_loop is wrong where it has none."""
    captured = agree(Repeats().double(), x(value).requires_grad_())
    [op] = [op for op in captured.graph.ops if op.target.startswith("call.")]
    assert (op.target, op.argument("body")) == ("call.while_loop", "while_body")


def test_the_gradient_of_a_while_loop_is_that_of_the_loop_written_out():
    module, inputs = Repeats().double(), x(1.0)
    captured = capture(module, (inputs,))
    outputs, _, _ = run(captured, [inputs], *tensors_of(module))
    mine = torch.autograd.grad(outputs[0].sum(), list(module.parameters()))
    y = inputs
    for _ in range(3):
        y = torch.tanh(module.turn(y))
    for value, other in zip(mine, torch.autograd.grad(y.sum(), list(module.parameters())), strict=True):
        torch.testing.assert_close(value, other, rtol=1e-12, atol=1e-12)


def test_layers_that_decide_alike_share_their_graphs():
    captured = capture(Net(Chooses(), layers=3), (torch.randn(3, 4),))
    assert len([op for op in captured.graph.ops if op.target == "call.cond"]) == 3
    assert len(captured.graph.branches) == 4


def test_names_and_fingerprints_are_the_same_every_time():
    def graph() -> object:
        return capture(Net(Chooses(), layers=2), (torch.randn(3, 4),)).graph

    first, other = graph(), graph()
    assert show(first) == show(other)
    assert first.fingerprint == other.fingerprint


def test_a_change_in_a_branch_is_a_change_of_the_graph():
    class Other(Chooses):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cond(x.sum() > 0, lambda x: self.large(x), lambda x: self.small(x).tanh(), (x,))

    class Another(Chooses):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cond(x.sum() > 0, lambda x: self.large(x), lambda x: self.small(x).sin(), (x,))

    assert capture(Other(), (torch.randn(3, 4),), name="N").graph.fingerprint != (
        capture(Another(), (torch.randn(3, 4),), name="N").graph.fingerprint
    )


def test_random_numbers_in_a_loop_are_refused():
    class Draws(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            def step(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
                built = nn.functional.dropout(carry + row, 0.5)
                return built, built * 2

            return scan(step, torch.zeros(4), x)[0]

    with pytest.raises(CaptureError, match="the body of a loop draws random numbers"):
        capture(Draws(), (torch.randn(3, 4),))

"""A NaN or an infinity is traced to the first op that makes it, on any plan, and nothing is changed by looking."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwright as sw
from shardwright.runtime.faults.nonfinite import agree_finite, explain_nonfinite, find_nonfinite, first_gradient
from tests.options import grouped
from tests.parity.threaded import world_of
from tests.runtime.ranks import run_ranks


class Net(nn.Module):
    """Goes wrong where `x` has a zero: in forward if `log`, in backward if `root`."""

    def __init__(self, kind):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.2)
        self.kind = kind

    def forward(self, x, z):
        y = self.drop(self.norm(self.up(x)) if self.kind != "plain" else self.up(x))
        y = y.masked_fill(y < 0, float("-inf")).exp()
        if self.kind in ("log", "plain"):
            z = z.log()
            y = y + (z - z).sum(1, keepdim=True)
        if self.kind == "root":
            y = y * (z * self.up.weight[0]).pow(2).sum(1, keepdim=True).sqrt()
        return self.down(y).square().mean()


def batch(bad):
    torch.manual_seed(1)
    x, z = torch.randn(8, 4), torch.rand(8, 4) + 0.5
    if bad:
        z[6] = 0.0
    return x, z


def look(kind, plan, folder, bad=True, **options):
    """On each rank: whether it was fine, where it went wrong, the first gradient; and that nothing changed."""
    torch.manual_seed(0)
    net, inputs = Net(kind), batch(bad)

    def run(rank):
        own = copy.deepcopy(net)
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
        model, _ = sw.parallelize(own, optimizer, plan=plan, example=inputs, **grouped(directory=folder, **options))
        loss = model(*inputs)
        loss.backward()
        fine = agree_finite(model, loss, gradients=True)
        before = state_of(model)
        nonfinite = find_nonfinite(model, inputs)
        for (name, mine), (_, other) in zip(before, state_of(model), strict=True):
            assert torch.equal(torch.nan_to_num(mine), torch.nan_to_num(other)), name
        return fine, nonfinite, first_gradient(model), str(explain_nonfinite(model, inputs))

    return run_ranks(world_of(plan), run)


def state_of(model):
    values = [(key, p.grad) for key, p in model.named_parameters() if p.grad is not None]
    values += [(key, buffer) for key, buffer in model.named_buffers()]
    return [(key, value.detach().clone()) for key, value in values] + [("step", torch.tensor(model.random.step))]


@pytest.mark.parametrize("plan", ["single", "dp=2", "tp=2", "zero3=2"])
def test_an_op_of_forward(plan, tmp_path):
    for fine, result, _, message in look("log", plan, tmp_path):
        assert not fine
        assert result.startswith("forward of log at ")
        assert "from test_nonfinite.py:" in result and "are infinite" in result
        assert plan != "dp=2" or result.endswith("on rank 1")  # which has row 6
        assert f"it begins in the {result}" in message


def test_an_op_of_a_stage_and_the_first_parameter_of_all_stages(tmp_path):
    first, second = look("plain", "pp=2", tmp_path)
    assert first == second
    _, actual, gradient, _ = first
    assert actual.startswith("forward of log at ") and "from test_nonfinite.py:" in actual
    assert gradient.startswith("the gradient of up.weight is not finite on rank 0, and of 3 more")


@pytest.mark.parametrize(
    ("plan", "precision"), [("single", None), ("dp=2", None), ("zero3=2", None), ("zero1=2", None), ("dp=2", "bf16")]
)
def test_an_op_of_backward_and_the_first_parameter(plan, precision, tmp_path):
    for fine, result, gradient, _ in look("root", plan, tmp_path, precision=precision):
        assert not fine
        assert result.startswith("backward of ")
        assert "sqrt" in result and "from test_nonfinite.py:" in result
        assert gradient.startswith("the gradient of up.weight is not finite on rank 0")


@pytest.mark.parametrize("plan", ["single", "dp=2"])
def test_infinities_that_a_model_is_made_with_are_none(plan, tmp_path):
    for fine, result, gradient, message in look("none", plan, tmp_path, bad=False):
        assert fine and result is None and gradient is None
        assert "repeating the step is finite" in message


def test_what_is_wrong_before_the_step(tmp_path):
    x, z = batch(False)
    model = sw.parallelize(Net("none"), plan="single", example=(x, z), compile={"directory": tmp_path})
    with torch.no_grad():
        model.down.bias[1] = float("nan")
    assert "value of parameter down.bias at the beginning of the step: 1 of 4" in find_nonfinite(model, (x, z))
    x[0, 0] = float("inf")
    assert "value of input" in find_nonfinite(model, (x, z))


def test_a_model_that_is_not_compiled():
    net = nn.Linear(2, 1)
    assert find_nonfinite(net, (torch.zeros(3, 2),), loss_of=lambda out: (out - out).log().sum()) is not None
    assert find_nonfinite(net, (torch.ones(3, 2),), loss_of=lambda out: F.mse_loss(out, out)) is None

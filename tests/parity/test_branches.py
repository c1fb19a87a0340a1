"""Models that decide by data, compiled: every rank goes the same way, and nothing differs from one device."""

import copy
import tempfile
from functools import cache

import pytest
import torch
from torch import nn

import shardwright as sw

from ..models.deciding import Chooses, Net, Recurrent, Repeats
from ..runtime.ranks import run_ranks
from ..verified import referred, verified

# torch's own cond says it of every model that calls it on what is no leaf
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

PARTS = {"cond": Chooses, "scan": Recurrent, "while_loop": Repeats}


@cache
def original(part):
    return referred(Net(PARTS[part]()), torch.randn(6, 4), entries=("train", "eval"))


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,tp=2", "zero3=2"])
@pytest.mark.parametrize("part", PARTS)
def test_the_same_as_on_one_device(part, plan):
    report = verified(original(part), plan)
    assert report, str(report)


def test_the_branches_are_methods_that_layers_share(tmp_path):
    sw.verify(
        Net(Chooses(), layers=3),
        "zero3=2",
        example=torch.randn(6, 4),
        method="threads",
        compile={"directory": tmp_path},
        steps=1,
    )
    text = next(tmp_path.glob("*/train*.py")).read_text()
    assert text.count("def cond_else_1(self, ") == 1
    assert text.count("def cond") == 4
    assert text.count("runtime.cond(") == 4  # three layers, and the branch in the branch


def test_another_way_in_every_step():
    """What the first step took is not what is taken from then on; parameters of the other way go on, with zeros."""
    torch.manual_seed(1)
    net = Net(Chooses(), drop=0.0).double()
    net.embed.weight.data.copy_(torch.eye(4))
    net.embed.bias.data.zero_()
    steps = [torch.rand(4, 4).double() + 0.1, -torch.rand(4, 4).double() - 2, torch.rand(4, 4).double() * 9 + 4]

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        for x in steps:
            optimizer.zero_grad()
            loss = model(x)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    original = copy.deepcopy(net)
    expected = run(original, torch.optim.AdamW(original.parameters(), lr=1e-2))
    folder = tempfile.mkdtemp()

    def rank(number: int) -> tuple[list[float], dict[str, torch.Tensor]]:
        mine = copy.deepcopy(net)
        optimizer = torch.optim.AdamW(mine.parameters(), lr=1e-2)
        model, optimizer = sw.parallelize(mine, optimizer, plan="zero3=2", compile={"directory": folder})
        return run(model, optimizer), model.full_state_dict()

    for losses, state in run_ranks(2, rank):
        assert losses == pytest.approx(expected, abs=1e-10)
        for key, tensor in original.state_dict().items():
            torch.testing.assert_close(state[key], tensor, rtol=1e-9, atol=1e-10)


def test_dropout_in_a_branch_trains_and_is_not_verified():
    class Drops(Chooses):
        def forward(self, x):
            drop = nn.functional.dropout
            return torch.cond(x.sum() > 0, lambda x: drop(self.large(x), 0.5), lambda x: self.small(x), (x,))

    net, x = Net(Drops(), drop=0.0), torch.rand(4, 4)
    with pytest.raises(sw.errors.InputError, match="can't be made the same on one device and on many"):
        sw.verify(net, "dp=2", example=x, method="threads")
    folder = tempfile.mkdtemp()

    def rank(number: int) -> list[float]:
        model = sw.parallelize(copy.deepcopy(net), plan="dp=2", compile={"directory": folder})
        return [model(x).item() for _ in range(2)]

    first, other = run_ranks(2, rank)
    assert first == other


def test_the_plan_says_that_it_runs_whole():
    notes = sw.plan(Net(Chooses()), example=torch.randn(6, 4), plan="dp=2").notes
    assert any("cond (call.cond)" in note and "runs replicated on every device" in note for note in notes)

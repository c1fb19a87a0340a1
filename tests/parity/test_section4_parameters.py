"""More of section 4: parameters and chance. See test_section4.py for how these tests are made."""

from __future__ import annotations

import copy
import tempfile

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.parallelize import parallelize
from tests.parity.threaded import apart, compare, ranks_of
from tests.runtime.ranks import run_ranks


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def batch(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


class MLP(nn.Module):
    def __init__(self, width: int = 6, hidden: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x))).square().mean()


# Parameters.


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(12, 6), nn.Linear(6, 12, bias=False)
        self.head.weight = self.table.weight

    def forward(self, idx: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(torch.tanh(self.table(idx))), target)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero1=2", "dp=2,tp=2"])
def test_a_tied_parameter_gets_the_sum_of_its_gradients(plan):
    net = Tied().double()
    inputs = torch.randint(12, (4,)), torch.randint(12, (4,))
    loss = net(*inputs)
    both = torch.autograd.grad(loss, [net.table.weight])[0]
    scores = F.linear(torch.tanh(F.embedding(inputs[0], net.table.weight.detach())), net.head.weight)
    gradients = torch.autograd.grad(F.cross_entropy(scores, inputs[1]), [net.head.weight])[0]
    assert apart(gradients, both)

    compare(net, inputs, plan)


class Repeated(nn.Module):
    def __init__(self, times: int) -> None:
        super().__init__()
        self.block, self.times = MLP(), times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = x + self.block.down(torch.tanh(self.block.up(x)))
        return x.square().mean()


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "sp=2"])
def test_one_block_applied_four_times_gets_four_gradients_and_one_sync(plan):
    net, x = Repeated(4).double(), batch(4, 6)

    four = compare(net, (x,), plan)
    comparison = compare(Repeated(1), (x,), plan)

    assert apart(four.gradients["block.up.weight"], comparison.gradients["block.up.weight"])
    assert four.ranks[0].synced == comparison.ranks[0].synced


class PartlyUsed(nn.Module):
    """A frozen layer, a parameter that nothing reads, and one that this step does not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 6), nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 64).requires_grad_(False)
        self.idle, self.other = nn.Parameter(torch.randn(1000)), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return (self.leave(self.enter(x)).square().sum(-1) + self.frozen(x).sum(-1)).mean()


class OnlyRegularized(nn.Module):
    """One parameter that no op with the batch in it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.prior = nn.Linear(6, 6), nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).square().mean() + self.prior.square().sum()


@pytest.mark.parametrize("plan", ["dp=2", "zero1=2", "zero2=2", "zero3=2"])
def test_a_parameter_that_only_a_whole_op_reads_gets_its_gradient_once(plan):
    compare(OnlyRegularized(), (batch(4, 6),), plan)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero1=2", "zero2=2"])
def test_frozen_and_unused_parameters_get_no_gradient_and_sync_nothing(plan):
    net, x = PartlyUsed().double(), batch(4, 6)

    comparison = compare(net, (x,), plan)

    assert all(
        rank.gradients[key] is None for rank in comparison.ranks for key in ("idle", "frozen.weight", "other.bias")
    )
    used = sum(p.numel() for name, p in net.named_parameters() if name.startswith(("enter", "leave")))
    assert sum(comparison.ranks[0].synced) < 2 * used, "1000 idle or 448 frozen numbers on the wire would show"
    assert plan == "tp=2" or sum(comparison.ranks[0].synced) > 0


def test_ranks_of_an_unseeded_script_start_from_one_ranks_parameters():
    x = batch(4, 6)
    modules = [MLP().double() for _ in range(2)]
    assert apart(modules[0](x), modules[1](x))

    ranks = ranks_of(lambda rank: copy.deepcopy(modules[rank]), (x,), "dp=2")

    assert not apart(ranks[0].outputs, modules[0](x))
    assert torch.equal(ranks[0].outputs, ranks[1].outputs)
    assert all(torch.equal(a, ranks[1].gradients[key]) for key, a in ranks[0].gradients.items())


class PositionOnly(nn.Module):
    """What depends on parameters only, and meets the batch late."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix, self.leave = nn.Embedding(4, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        place = torch.tanh(self.mix(self.table(torch.arange(4, device=x.device))))
        return self.leave(x + place).square().mean()


def test_what_depends_on_parameters_only_is_not_summed_over_dp_but_its_parameters_are():
    """Every backward is linear in the gradient, so the sum can wait for the parameters' own sync."""
    comparison = compare(PositionOnly(), (batch(4, 4, 6),), "dp=2")

    assert comparison.sent("all_reduce", "dp") == (1, 0), "the loss forward, no activation backward"
    parameters = 4 * 6 + 2 * (6 * 6 + 6)
    assert parameters <= sum(comparison.ranks[0].synced) <= parameters + 5, "once each, and a flag each"


# Chance.


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        return (F.dropout(x * self.weight, 0.5) * torch.arange(1.0, 65.0, dtype=x.dtype)).sum()


def test_dropout_masks_differ_on_shards():
    """Rows of ones: the gradient of the weight is the sum of both ranks' masks. If they were equal it had no 2s."""
    x = torch.ones(2, 64, dtype=torch.float64)

    ranks = ranks_of(lambda rank: Dropped().double(), (x,), "dp=2")

    drawn = ranks[0].gradients["weight"] / torch.arange(1.0, 65.0, dtype=torch.float64) / 2
    assert set(drawn.tolist()) == {0.0, 1.0, 2.0}, "drawn by none, one or both rows"


class DroppedWhole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.down(torch.tanh(self.up(x))), 0.5).square().sum()


def test_dropout_masks_agree_where_a_value_is_whole():
    torch.manual_seed(3)
    net, x = DroppedWhole().double(), batch(4, 6)

    ranks = ranks_of(lambda rank: copy.deepcopy(net), (x,), "tp=2")

    assert torch.equal(ranks[0].outputs, ranks[1].outputs)
    assert all(torch.equal(a, ranks[1].gradients[key]) for key, a in ranks[0].gradients.items())
    kept = net.down(torch.tanh(net.up(x))).square()
    assert apart(kept.sum(), ranks[0].outputs)


# Uneven shares.


class NamedAsASize(nn.Module):
    """Five channels on two ranks, in parts that are called as the size of a rank's share would be."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.m = nn.Conv2d(3, 5, 3), nn.Conv2d(5, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.m(F.relu(self.c(x)).flatten(2).view(4, 5, 6, 6)).square().mean()


def test_a_size_that_differs_between_ranks_does_not_take_the_name_of_a_part():
    comparison = compare(NamedAsASize(), (batch(4, 3, 8, 8),), "tp=2")

    assert "self.C_tp = local_size(" in comparison.ranks[0].text and "self.c.weight" in comparison.ranks[0].text


def test_zero3_keeps_no_gathered_weight_after_its_layer():
    """What forward leaves alive is what autograd saved, and that is a key."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x).relu()
            return x.square().mean()

    net, x, folder = Deep().double(), batch(4, 6), tempfile.mkdtemp()

    def run(rank: int) -> list[object]:
        model = parallelize(copy.deepcopy(net), plan="zero3=2", example=(x,), compile={"directory": folder})
        loss = model(x)
        stage = next(iter(model._entries.values())).stage
        values = [layer.weight for layer in stage.layers]
        loss.backward()
        return values

    assert run_ranks(2, run) == [[None] * 3] * 2

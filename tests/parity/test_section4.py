"""The sentences of the design's section 4 that say what goes wrong otherwise.

Each test runs a module that the wrong way would get wrong, shows that the wrong way really
gives another number, and asserts that the compiled program gives the right one.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.parity.threaded import apart, compare


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


# Biases and sums.


@pytest.mark.parametrize("plan", ["tp=2", "sp=2", "dp=2,tp=2"])
def test_a_bias_after_a_split_product_is_added_once_and_not_tp_times(plan):
    net, x = MLP().double(), batch(4, 6)
    twice = copy.deepcopy(net)
    twice.down.bias.data *= 2  # what every rank adding it would come to
    assert apart(twice(x), net(x))

    compare(net, (x,), plan)


class Regularized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up(x)).square().mean() + 0.1 * self.up.weight.square().sum()


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "dp=2,tp=2", "zero1=2"])
def test_a_regularizer_on_the_weights_counts_once_and_not_dp_times(plan):
    net, x = Regularized().double(), batch(4, 6)
    loss = net(x)
    (gradient,) = torch.autograd.grad(loss, [net.up.weight])
    term = 0.2 * net.up.weight.detach()
    assert apart(gradient + term, gradient), "counted twice it would show"

    compare(net, (x,), plan)


class ScaledSum(nn.Module):
    """What is partial over tp meets a trainable scale, and then something that is not linear."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False)
        self.scale = nn.Parameter(torch.tensor([0.5, 2.0, -1.0, 3.0, 1.5, 0.1]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.down(F.gelu(self.up(x))) * self.scale).square().sum()


@pytest.mark.parametrize("plan", ["tp=2", "dp=2,tp=2"])
def test_a_partial_sum_times_a_scale_gives_the_scale_its_whole_gradient(plan):
    """The scale's gradient is made of partial sums then: each rank alone has only its term."""
    net, x = ScaledSum().double(), batch(4, 6)
    whole = torch.autograd.grad(net(x), [net.scale])[0]
    half = copy.deepcopy(net)
    half.down.weight.data[:, 4:] = 0  # what rank 0 would see
    assert apart(torch.autograd.grad(half(x), [half.scale])[0], whole)

    compare(net, (x,), plan)


def test_a_partial_sum_is_summed_before_anything_that_is_not_linear():
    net, x = ScaledSum().double(), batch(4, 6)
    parts = []
    for rows in (slice(0, 4), slice(4, 8)):
        part = copy.deepcopy(net)
        keep = torch.zeros(8, dtype=torch.float64)
        keep[rows] = 1
        part.down.weight.data *= keep
        parts.append(part(x))
    assert apart(parts[0] + parts[1], net(x)), "tanh of each part, then the sum, is something else"

    compare(net, (x,), "tp=2")


class TwoReaders(nn.Module):
    """One partial sum that two ops need, and one input that three products read."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(6, 8, bias=False) for _ in range(3))
        self.down = nn.Linear(8, 6, bias=False)
        self.scale = nn.Parameter(torch.rand(6))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.scale * x)
        y = self.down(torch.tanh(self.q(x)) * torch.sigmoid(self.k(x)) + self.v(x))
        return (torch.tanh(y) + torch.sin(y)).square().mean()


def test_a_sum_needed_twice_is_done_once_and_gradients_join_before_they_are_reduced():
    comparison = compare(TwoReaders(), (batch(4, 6),), "tp=2")

    assert comparison.sent("all_reduce", "tp") == (1, 1), "three products hand back one gradient, reduced once"


# Means and losses.


class MeanOver(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).square().mean()


@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
def test_a_mean_over_a_split_label_is_a_sum_of_shares(plan):
    net, x = MeanOver().double(), batch(4, 6)
    naive = net(x[:2]) + net(x[2:])  # the sum of local means
    assert apart(naive, net(x))

    compare(net, (x,), plan)


class Labelled(nn.Module):
    """Two losses, each a mean over the labels that count, added."""

    def __init__(self, second: bool = False) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(11, 6), nn.Linear(6, 11)
        self.second = second

    def forward(self, idx: Tensor, target: Tensor, other: Tensor) -> Tensor:
        scores = self.head(torch.tanh(self.table(idx))).flatten(0, 1)
        loss = F.cross_entropy(scores, target.flatten(), ignore_index=-100)
        return loss + 0.3 * F.cross_entropy(scores, other.flatten(), ignore_index=0) if self.second else loss


def uneven_labels() -> tuple[Tensor, Tensor, Tensor]:
    """The first rows have all labels, the last ones nearly none."""
    idx, target, other = torch.randint(11, (4, 5)), torch.randint(11, (4, 5)), torch.randint(1, 11, (4, 5))
    target[2:, 1:] = -100
    other[:2, :4] = 0
    return idx, target, other


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "sp=2", "dp=2,tp=2"])
def test_a_mean_with_ignored_labels_is_a_ratio_of_two_sums(plan, second):
    net, inputs = Labelled(second).double(), uneven_labels()
    halves = [net(*(value[rows] for value in inputs)) for rows in (slice(0, 2), slice(2, 4))]
    assert apart(sum(halves) / 2, net(*inputs)), "the mean of the ranks' means is another number"

    compare(net, inputs, plan)


class Masked(nn.Module):
    """A masked mean written out by hand, and one minus another sum over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        each = self.up(x).square().mean(-1)
        return (each * mask).sum() / mask.sum() + torch.log(each.sum())


def test_a_masked_mean_by_hand_divides_the_sums_and_not_the_ranks():
    net, x = Masked().double(), batch(4, 6)
    mask = torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    naive = (net(x[:2], mask[:2]) + net(x[2:], mask[2:])) / 2
    assert apart(naive, net(x, mask))

    compare(net, (x, mask), "dp=2")


# Positions.


class Positions(nn.Module):
    """Learned positions, a causal mask made on the spot, and a sum that weighs by place."""

    def __init__(self, seq: int) -> None:
        super().__init__()
        self.table, self.enter, self.q = nn.Embedding(seq, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        seq = x.size(1)
        place = torch.arange(seq, device=x.device)
        x = torch.tanh(self.enter(x + self.table(place)))
        scores = self.q(x) @ x.transpose(1, 2)
        seen = torch.ones(seq, seq, dtype=torch.bool, device=x.device).tril()
        x = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ x
        return (x * place[:, None]).square().mean()


@pytest.mark.parametrize("plan", ["sp=2", "dp=2", "tp=2"])
def test_positions_are_cut_and_not_shrunk(plan):
    net, x = Positions(4).double(), batch(4, 4, 6)
    shrunk = (net(x[:, :2]) + net(x[:, 2:])) / 2  # both halves counting from 0
    assert apart(shrunk, net(x))

    compare(net, (x,), plan)


class WeighRows(nn.Module):
    """A position along the batch: with dp, rank 1 must not start at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.arange(x.size(0), dtype=x.dtype, device=x.device)
        return (self.up(x).square().sum(-1) * weight).sum() / x.size(0)


def test_a_mask_that_depends_on_no_input_is_whole_and_cut_where_it_is_used():
    net, x = WeighRows().double(), batch(4, 6)
    assert apart(net(x[:2]) + net(x[2:]), net(x))

    comparison = compare(net, (x,), "dp=2")

    assert "torch.arange(" in comparison.ranks[0].text
    assert "4" in comparison.ranks[0].text.split("def constants")[1].split("\n")[1], "made whole"
    assert comparison.sent("all_gather", "dp") == (0, 0)


def test_a_size_read_as_a_number_stays_global():
    """x.size(0) above divides by 4, and not by the 2 rows that a rank has."""
    net, x = WeighRows().double(), batch(4, 6)

    comparison = compare(net, (x,), "dp=2")

    assert "/ 4" in comparison.ranks[0].text


# Batch norm and buffers.


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).square().mul(torch.arange(4.0, dtype=x.dtype).view(4, 1, 1)).mean()


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "dp=2,tp=2"])
def test_batch_norm_takes_its_statistics_over_all_rows_and_updates_its_buffers_once(plan):
    net, x = Normed().double(), batch(4, 2, 5, 5)
    x[2:] += 3
    local, whole = copy.deepcopy(net), copy.deepcopy(net)
    local(x[:2]), whole(x)
    assert apart(local.norm.running_mean, whole.norm.running_mean), "one rank's rows have other statistics"
    twice = copy.deepcopy(whole)
    twice(x)
    assert apart(twice.norm.running_mean, whole.norm.running_mean), "a second update would show"

    comparison = compare(net, (x,), plan)

    assert all(int(rank.buffers["norm.num_batches_tracked"]) == 1 for rank in comparison.ranks)

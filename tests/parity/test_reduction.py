"""Losses and penalties that are computed outside of the model: what the groups' gradients become."""

from __future__ import annotations

import tempfile

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shardwright.errors import InputError
from shardwright.parallelize import parallelize
from tests.options import grouped
from tests.runtime.ranks import run_ranks

from .looped import both, gradients
from .threaded import apart, whole_gradients, world_of

SKIP = -100
LABELS = torch.tensor([[1, 2, SKIP, 3], [0, 1, 1, 2], [SKIP, SKIP, SKIP, 1], [SKIP, 3, SKIP, SKIP]])


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.table, self.head = nn.Embedding(5, 6), nn.Linear(6, 4)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
        self.double()

    def forward(self, x):
        return self.head(self.table(x).tanh())


X = torch.arange(16).view(4, 4) % 5


def loss_of(logits, labels, how="mean"):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=SKIP, reduction=how)


def count(labels):
    return (labels != SKIP).sum()


def wanted(loss):
    """The gradients of one device."""
    net = Tagger()
    loss(net).backward()
    return {key: parameter.grad for key, parameter in net.named_parameters()}


def on_groups(step, plan="dp=2", **options):
    """The gradients of two groups, each with half of the rows."""
    nets, folder = [Tagger() for _ in range(world_of(plan))], tempfile.mkdtemp(prefix="reduction-")

    def rank(number):
        model = parallelize(
            nets[number], plan=plan, inputs="per_replica", example=(X[:2],), **grouped(directory=folder, **options)
        )
        rows = slice(2 * model.data_rank, 2 * model.data_rank + 2)
        step(model, X[rows], LABELS[rows])
        return whole_gradients(model)

    return run_ranks(world_of(plan), rank)


def check(actual, expected):
    for mine in actual:
        for key, value in mine.items():
            assert float((value - expected[key]).abs().max()) <= 1e-12 * float(expected[key].abs().max()), key


def halves(net):
    return [loss_of(net(X[at]), LABELS[at]) for at in (slice(0, 2), slice(2, 4))]


def plain(model, x, labels):
    loss_of(model(x), labels).backward()


def test_mean_is_that_of_the_groups():
    check(on_groups(plain), wanted(lambda net: sum(halves(net)) / 2))


def test_sum():
    check(on_groups(plain, reduction="sum"), wanted(lambda net: sum(halves(net))))


@pytest.mark.parametrize("plan", ["dp=2", "zero3=2", "dp=2,tp=2"])
def test_token_is_the_mean_over_all_labels(plan):
    def step(model, x, labels):
        loss = loss_of(model(x), labels)
        model.counted(count(labels))
        loss.backward()

    expected = wanted(lambda net: loss_of(net(X), LABELS))
    assert apart(expected["head.bias"], wanted(lambda net: sum(halves(net)) / 2)["head.bias"])
    check(on_groups(step, plan, reduction="token"), expected)


def test_token_over_several_backwards():
    """Rows one by one, each with its own number of labels."""

    def step(model, x, labels):
        for at in range(2):
            model.counted(count(labels[at]), window=count(labels))
            loss_of(model(x[at : at + 1]), labels[at : at + 1]).backward()

    check(on_groups(step, reduction="token", accumulate=2), wanted(lambda net: loss_of(net(X), LABELS)))


def test_a_sum_divided_by_the_total():
    def step(model, x, labels):
        (loss_of(model(x), labels, "sum") / model.total(count(labels))).backward()

    check(on_groups(step, reduction="sum"), wanted(lambda net: loss_of(net(X), LABELS)))


def test_what_is_refused():
    for reduction, mode, words in (
        ("token", "global", 'for inputs="per_replica"'),
        ("avg", "per_replica", "is not known"),
    ):
        with pytest.raises(InputError, match=words):
            parallelize(Tagger(), plan="single", inputs=mode, reduction=reduction, example=(X,))
    with pytest.raises(InputError, match="scalars only"):
        on_groups(plain, "pp=2,dp=2")
    with pytest.raises(InputError, match=r"model\.counted"):
        on_groups(plain, reduction="token")
    with pytest.raises(InputError, match='needs reduction="token"'):
        on_groups(lambda model, x, labels: model.counted(3))


@pytest.mark.parametrize("plan", ["dp=2", "zero2=2", "pp=2", "pp=2,dp=2"])
def test_a_penalty_on_weights_counts_once(plan):
    """gpt has tied weights, which two stages of a pipeline hold."""

    def loop(model, optimizer, case):
        loss = model(*case.args, **case.kwargs)
        for key, parameter in model.named_parameters():
            loss = loss + 0.1 * parameter.square().sum() if "weight" in key else loss
        loss.backward()
        return gradients(model)

    both("gpt", plan, loop)


@pytest.mark.parametrize("plan", ["dp=2,tp=2", "zero3=2,tp=2", "pp=2,dp=2"])
def test_a_penalty_on_norms_of_weights(plan):
    """One by one and stacked, of several orders; biases of the layer norms are zeros, whose norm has no gradient."""

    def loop(model, optimizer, case):
        loss = model(*case.args, **case.kwargs)
        stored = dict(model.named_parameters())
        weights = [p for key, p in stored.items() if "weight" in key]
        if "pp" not in plan:
            loss = loss + sum(0.1 * p.norm() for p in stored.values()) + torch.linalg.vector_norm(weights[-1], 1)
        loss = loss + torch.stack([p.norm() for p in weights]).square().sum()
        loss = loss + torch.stack([torch.norm(p, torch.inf) for p in weights]).sum()
        loss.backward()
        return [loss.detach().clone(), *gradients(model)]

    both("gpt", plan, loop)

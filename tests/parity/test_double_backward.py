"""Gradients of gradients: under a plan they are those of one device, or they are refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwright.errors import InputError
from shardwright.parallelize import parallelize

from .critics import LABELS, OTHER, Classifier, Critic, X, agree, on_ranks
from .looped import gradients, parameters

PLANS = ("dp=2", "tp=2", "sp=2", "zero1=2", "zero2=2", "zero3=2", "dp=2,tp=2", "zero3=2,tp=2")


def penalty_of(model, x):
    """WGAN-GP: the norm of the gradient of each sample should be 1."""
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return ((slope.norm(dim=1) - 1) ** 2).mean(), slope


def train_critic(model, optimizer):
    """Two steps of a WGAN-GP's critic."""
    seen = []
    for _ in range(2):
        mixed = (0.3 * X + 0.7 * OTHER).requires_grad_()
        penalty, slope = penalty_of(model, mixed)
        loss = model(X).mean() - model(OTHER).mean() + 10 * penalty
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen += [loss.detach(), slope.detach(), *gradients(model)]
    return seen + parameters(model)


@pytest.mark.parametrize("plan", PLANS)
def test_a_gradient_penalty(plan):
    agree(Critic, plan, train_critic)


class Convolutions(nn.Module):
    """With batch norm, whose statistics are over the whole batch."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4), nn.Linear(32, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.norm(self.conv(x.unsqueeze(1)))).flatten(1))


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero3=2"])
def test_a_gradient_penalty_through_batch_norm(plan):
    agree(Convolutions, plan, train_critic)


def smooth(model, optimizer):
    """The gradient of the model's own loss, made small."""
    x = X.clone().requires_grad_()
    loss = model(x, LABELS)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + slope.square().sum()).backward()
    return [loss.detach().clone(), slope.detach(), x.grad, *gradients(model)]


@pytest.mark.parametrize("plan", [*PLANS, "dp=2,recompute", "zero3=2,recompute", "tp=2,recompute"])
def test_through_the_loss_of_the_model(plan):
    """tp splits the classes: their softmax is taken over ranks."""
    agree(Classifier, plan, smooth)


class Weighted(Classifier):
    def forward(self, x, labels):
        x = self.down(torch.tanh(self.up(x)))
        weight = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
        return F.cross_entropy(x, labels, weight=weight, label_smoothing=0.1, ignore_index=1)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
def test_through_a_weighted_and_smoothed_loss(plan):
    agree(Weighted, plan, smooth)


def test_a_pipeline_refuses_it():
    with pytest.raises(InputError, match="without pp"):
        on_ranks(Critic, "pp=2", train_critic)


# -- where each data-parallel group has its own samples -------------------------------------------


def own_rows(tensor, model):
    """The samples of the group that a rank is in; on one device both groups are computed one after the other."""
    half = tensor.shape[0] // 2
    return tensor[model.data_rank * half :][:half]


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,tp=2", "zero3=2"])
def test_groups_have_a_penalty_on_their_own_samples(plan):
    """As DDP has it: the gradient of a group's input is that of the group's own loss, and parameters get the mean."""

    def step(model, x):
        x = x.clone().requires_grad_()
        penalty, slope = penalty_of(model, x)
        (model(x).mean() + 10 * penalty).backward()
        return slope.detach()

    def loop(model, optimizer):
        if isinstance(model, Critic):
            halves = [step(model, half) for half in X.chunk(2)]
            return [torch.cat(halves), *(gradient / 2 for gradient in gradients(model))]
        own_slope = step(model, own_rows(X, model))
        slopes = torch.zeros_like(X)
        own_rows(slopes, model).copy_(own_slope)
        slopes = model.total(slopes) / 1.0
        return [slopes, *gradients(model)]

    agree(Critic, plan, loop, inputs="per_replica", example=(X[:2].clone().requires_grad_(),))


def test_gradients_of_inputs_that_a_mode_can_not_give_are_refused():
    def loop(model, optimizer):
        x, labels = (X, LABELS) if isinstance(model, Classifier) else (own_rows(X, model), own_rows(LABELS, model))
        return [*torch.autograd.grad(model(x := x.clone().requires_grad_(), labels), x)]

    example = X[:2], LABELS[:2]
    with pytest.raises(InputError, match='use inputs="per_replica"'):
        on_ranks(Classifier, "dp=2", loop, inputs="per_rank", example=example)
    with pytest.raises(InputError, match="in a pipeline the gradient of an input"):
        on_ranks(Classifier, "pp=2,dp=2", loop, inputs="per_replica", microbatches=1, example=example)


# -- on real processes, and in a part of a module ------------------------------------------------------


def seeded():
    torch.manual_seed(3)
    return Critic().double()


def critic_of(rank, plan, folder):
    model = seeded()
    return train_critic(
        *parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=plan, compile={"directory": folder})
    )


@pytest.mark.parametrize("plan", ["tp=2", "zero3=2"])
def test_a_gradient_penalty_on_real_processes(pools, tmp_path, plan):
    model = seeded()
    wanted = train_critic(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for result in pools[2].run(critic_of, plan, str(tmp_path)):
        for mine, other in zip(result, wanted, strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-10)


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.part = nn.Linear(8, 8), Critic()

    def forward(self, x):
        return self.part(torch.tanh(self.first(x)))


def test_in_a_part_of_a_module():
    """The rest is ordinary code: gradients and what is asked for beside them are those of one device in both."""

    def loop(model, optimizer):
        seen = train_critic(model, optimizer)[:2]
        stored = list(model.parameters())
        gradients = torch.autograd.grad(model(X).square().mean(), stored, create_graph=True)
        optimizer.zero_grad()
        sum(gradient.square().sum() for gradient in gradients).backward()
        return [*seen, *(gradient.detach() for gradient in gradients), *(p.grad for p in stored)]

    agree(Whole, "dp=2", loop, parts=["part"])


@pytest.mark.parametrize("plan", ["dp=2,tp=2", "zero3=2"])
def test_a_norm_of_parameters_has_a_gradient_and_no_second_one(plan):
    def loop(norm_of):
        def run(model, optimizer):
            model(X, LABELS)
            stored = list(model.parameters())
            penalty = sum(norm_of(p) for p in stored)
            grads = torch.autograd.grad(model(X, LABELS) + penalty, stored, create_graph=True)
            sum(gradient.square().sum() for gradient in grads).backward()
            return gradients(model)

        return run

    agree(Classifier, plan, loop(lambda p: p.square().sum().sqrt()))
    with pytest.raises(InputError, match=r"p\.square\(\)\.sum\(\)\.sqrt"):
        on_ranks(Classifier, plan, loop(torch.norm))

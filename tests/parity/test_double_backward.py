"""Gradients of gradients: under a plan they are those of one device, or they are refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwright.errors import InputError

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

"""What a loop does to parameters and gradients outside of the model: as on one device, or refused."""

from __future__ import annotations

import pytest
import torch

from shardwright.errors import InputError

from .critics import LABELS, Classifier, X, agree
from .looped import gradients, parameters
from .test_gradient_paths import on_ranks_only

PLANS = ("dp=2", "tp=2", "zero1=2", "zero2=2", "zero3=2", "dp=2,tp=2", "zero3=2,tp=2")
SPLIT = ("tp=2", "zero3=2")


def trained(model):
    """A model with gradients."""
    model(X, LABELS).backward()
    return list(model.parameters())


@pytest.mark.parametrize("plan", PLANS)
def test_numbers_about_parameters_and_gradients(plan):
    def loop(model, optimizer):
        held = trained(model)
        seen = [sum(p.grad.data.norm() ** 2 for p in held), sum(p.data.norm() for p in held)]
        seen += [sum(p.detach().abs().sum() for p in held), torch.stack([p.grad.abs().max() for p in held])]
        seen += [torch.stack([p.grad.detach().mean() for p in held]), sum((p.data > 0).sum() for p in held)]
        seen += [torch.stack([p.data.amin() for p in held]), torch.stack([p.grad.isfinite().all() for p in held])]
        return [torch.as_tensor(one).double().clone() for one in seen]

    agree(Classifier, plan, loop)


@pytest.mark.parametrize("plan", PLANS)
def test_a_penalty_is_a_part_of_the_loss_with_its_value(plan):
    def loop(model, optimizer):
        model(X, LABELS)
        penalty = sum(p.square().sum() + 0.1 * p.abs().mean() for p in model.parameters())
        loss = model(X, LABELS) + 0.1 * penalty
        loss.backward()
        return [loss.detach().clone(), *gradients(model)]

    agree(Classifier, plan, loop)


@pytest.mark.parametrize("plan", PLANS)
def test_updates_by_hand(plan):
    """Weight clipping, decay, masks of the whole shape and a step without an optimizer."""
    if "zero2" in plan:
        pytest.skip("a gradient is a share there, and is refused beside a whole parameter (below)")

    def loop(model, optimizer):
        held = trained(model)
        with torch.no_grad():
            for parameter in held:
                parameter -= 0.1 * parameter.grad
                parameter.data.clamp_(-0.2, 0.2)
                parameter.mul_(0.9)
                parameter.grad.data.mul_(0.5)
        seen = gradients(model)
        mask = torch.arange(12 * 8, dtype=torch.float64).view(12, 8)
        with torch.no_grad():
            model.up.weight.mul_(mask)
            model.up.weight.add_(mask[:, :1]).copy_(model.up.weight + mask)
        return seen + parameters(model)

    agree(Classifier, plan, loop)


@pytest.mark.parametrize("plan", SPLIT)
@pytest.mark.parametrize(
    "use",
    [
        lambda p: p[0].zero_(),
        lambda p: p.data[0],
        lambda p: p.grad[:, 0].sum(),
        lambda p: p.view(-1),
        lambda p: p.T @ p,
        lambda p: p.sum(0),
        lambda p: p.tolist(),
        lambda p: p.data.normal_(),
        lambda p: p.grad.detach().cpu().numpy(),
        lambda p: torch.nn.utils.parameters_to_vector([p]),
    ],
)
def test_what_would_be_about_a_piece_is_refused(plan, use):
    def loop(model, optimizer):
        trained(model)
        with torch.no_grad():
            use(model.up.weight)
        return []

    with pytest.raises(InputError, match=r"of parameter up.weight .*p\.full_tensor\(\)"):
        on_ranks_only(Classifier, plan, loop)


def test_a_share_of_a_gradient_beside_a_whole_parameter_is_refused():
    def loop(model, optimizer):
        held = trained(model)
        with torch.no_grad():
            for parameter in held:
                parameter -= 0.1 * parameter.grad
        return []

    with pytest.raises(InputError, match="this rank holds a piece"):
        on_ranks_only(Classifier, "zero2=2", loop)


@pytest.mark.parametrize("use", [lambda p: p.data.clamp_(-0.1, 0.1), lambda p: p.mul_(0.9)])
def test_changing_what_has_a_master_is_refused(use):
    def loop(model, optimizer):
        trained(model)
        with torch.no_grad():
            use(model.up.weight)
        return []

    with pytest.raises(InputError, match="a cast of its float32 master"):
        on_ranks_only(Classifier, "dp=2", loop, precision="bf16")


@pytest.mark.parametrize("plan", PLANS)
def test_the_whole_of_a_parameter_and_of_its_gradient(plan):
    def loop(model, optimizer):
        held = trained(model)
        if isinstance(model, Classifier):
            return [p.detach() for p in held] + [p.grad for p in held]
        return [p.full_tensor() for p in held] + [p.full_grad() for p in held]

    agree(Classifier, plan, loop)


@pytest.mark.parametrize("use", [lambda loss: loss.item(), lambda loss: f"{loss:.3f}", lambda loss: bool(loss > 1)])
def test_the_value_of_a_penalty_of_one_stage_is_refused(use):
    def loop(model, optimizer):
        loss = model(X, LABELS) + sum(p.square().sum() for p in model.parameters())
        loss.backward()
        return use(loss.detach())

    with pytest.raises(InputError, match="one stage of a pipeline"):
        on_ranks_only(Classifier, "pp=2", loop)


def test_the_norm_that_a_loop_adds_up_of_one_stage_is_refused():
    def loop(model, optimizer):
        return [sum(p.grad.data.norm(2).item() ** 2 for p in trained(model)) ** 0.5]

    with pytest.raises(InputError, match=r"torch\.nn\.utils\.get_total_norm"):
        on_ranks_only(Classifier, "pp=2", loop)

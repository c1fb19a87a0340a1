"""What a loop does to parameters and gradients outside of the model: as on one device, or refused."""

from __future__ import annotations

import pytest
import torch

from shardwright.errors import InputError

from .critics import LABELS, Classifier, X, agree
from .looped import gradients, parameters
from .test_gradient_paths import compiled, on_ranks_only

PLANS = ("dp=2", "tp=2", "zero1=2", "zero2=2", "zero3=2", "dp=2,tp=2", "zero3=2,tp=2")
SPLIT = ("tp=2", "zero3=2")


def trained(model):
    """A model with gradients."""
    model(X, LABELS).backward()
    return list(model.parameters())


@pytest.mark.parametrize("plan", PLANS)
def test_numbers_about_parameters_and_gradients(plan):
    def loop(model, optimizer):
        trained_model = trained(model)
        seen = [sum(p.grad.data.norm() ** 2 for p in trained_model), sum(p.data.norm() for p in trained_model)]
        seen += [
            sum(p.detach().abs().sum() for p in trained_model),
            torch.stack([p.grad.abs().max() for p in trained_model]),
        ]
        seen += [
            torch.stack([p.grad.detach().mean() for p in trained_model]),
            sum((p.data > 0).sum() for p in trained_model),
        ]
        seen += [
            torch.stack([p.data.amin() for p in trained_model]),
            torch.stack([p.grad.isfinite().all() for p in trained_model]),
        ]
        return [torch.as_tensor(value).double().clone() for value in seen]

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
        trained_model = trained(model)
        with torch.no_grad():
            for parameter in trained_model:
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
        lambda p: p.norm(dim=0),
        lambda p: p.grad.norm(dim=1, keepdim=True),
        lambda p: torch.linalg.norm(p, "nuc"),
        lambda p: torch.nn.init.orthogonal_(p),
        lambda p: setattr(p, "data", torch.zeros(3, 3)),
    ],
)
def test_what_would_be_about_a_shard_is_refused(plan, use):
    def loop(model, optimizer):
        trained(model)
        with torch.no_grad():
            use(model.up.weight)
        return []

    with pytest.raises(InputError, match=r"of parameter up.weight .*p\.full_tensor\(\)"):
        on_ranks_only(Classifier, plan, loop)


def test_a_share_of_a_gradient_beside_a_whole_parameter_is_refused():
    def loop(model, optimizer):
        trained_model = trained(model)
        with torch.no_grad():
            for parameter in trained_model:
                parameter -= 0.1 * parameter.grad
        return []

    with pytest.raises(InputError, match="this rank holds a shard"):
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
        trained_model = trained(model)
        if isinstance(model, Classifier):
            return [p.detach() for p in trained_model] + [p.grad for p in trained_model]
        return [p.full_tensor() for p in trained_model] + [p.full_grad() for p in trained_model]

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


@pytest.mark.parametrize("plan", ["dp=2", "zero1=2", "zero2=2"])
def test_a_penalty_may_turn_a_parameter_and_go_through_its_rows(plan):
    def loop(model, optimizer):
        weight = compiled(model).up.weight
        loss = model(X, LABELS) + (weight.T @ weight - torch.eye(8)).square().sum() + (weight % 0.3).sum()
        loss = loss + sum(row.norm() for row in weight)
        loss.backward()
        return [loss.detach().clone(), *gradients(model)]

    agree(Classifier, plan, loop)


@pytest.mark.parametrize("plan", [*PLANS, "pp=2"])
def test_weights_are_swapped_with_their_average_and_put_back(plan):
    """`p.data = other` gives other memory, as on one device: what was there before is not overwritten."""

    def loop(model, optimizer):
        stored, kept = list(compiled(model).parameters()), []
        average = [p.data.clone() * 0.5 for p in stored]
        for parameter, other in zip(stored, average, strict=True):
            kept.append(parameter.data)
            parameter.data = other
        with torch.no_grad():
            seen = [model(X, LABELS).clone()]
        for parameter, before in zip(stored, kept, strict=True):
            parameter.data = before
        for _ in range(2):
            optimizer.zero_grad()
            model(X, LABELS).backward()
            optimizer.step()
        return seen + parameters(model)

    agree(Classifier, plan, loop, lambda value: torch.optim.Adam(value, lr=0.1))


@pytest.mark.parametrize("plan", PLANS)
def test_a_whole_tensor_may_be_set_as_the_data_of_a_shard(plan):
    def loop(model, optimizer):
        weight = compiled(model).up.weight
        weight.data = torch.arange(12 * 8, dtype=torch.float64).view(12, 8) / 96
        model(X, LABELS).backward()
        optimizer.step()
        return parameters(model)

    agree(Classifier, plan, loop, lambda value: torch.optim.Adam(value, lr=0.1))


def test_a_graph_of_before_other_weights_were_set_is_refused_under_zero3():
    def loop(model, optimizer):
        loss = compiled(model)(X, LABELS)
        for parameter in model.parameters():
            parameter.data = parameter.data * 2
        loss.backward()
        return []

    with pytest.raises(InputError, match="ZeRO-3"):
        on_ranks_only(Classifier, "zero3=2", loop)


@pytest.mark.parametrize(
    "penalty",
    [
        lambda value: sum(p.square().sum().sqrt() for p in value),
        lambda value: sum(p.view(-1).norm() ** 2 for p in value) / 3,
        lambda value: torch.stack([(p.T @ p).abs().sum() for p in value if p.ndim == 2]).sum(),
    ],
)
@pytest.mark.parametrize("plan", ["pp=2", "pp=2,dp=2"])
def test_a_penalty_that_is_a_sum_over_parameters_in_a_pipeline(plan, penalty):
    def loop(model, optimizer):
        (compiled(model)(X, LABELS) + 0.1 * penalty(list(model.parameters()))).backward()
        return gradients(model)

    agree(Classifier, plan, loop)


@pytest.mark.parametrize(
    "loss",
    [
        lambda loss, value: loss + torch.cat([p.view(-1) for p in value]).norm(),
        lambda loss, value: loss + sum(p.square().sum() for p in value).sqrt(),
        lambda loss, value: loss + torch.stack([p.norm() ** 2 for p in value]).mean(),
        lambda loss, value: loss * sum(p.square().sum() for p in value),
    ],
)
@pytest.mark.parametrize("plan", ["pp=2", "pp=2,dp=2"])
def test_a_penalty_that_is_no_sum_over_parameters_is_refused_in_a_pipeline(plan, loss):
    def loop(model, optimizer):
        loss(compiled(model)(X, LABELS), list(model.parameters())).backward()
        return []

    with pytest.raises(InputError, match="only a sum of terms of one parameter each"):
        on_ranks_only(Classifier, plan, loop)


class Weighted(Classifier):
    """With weights of its losses, as uncertainty weighting has them."""

    def __init__(self):
        super().__init__()
        self.level, self.weights = torch.nn.Parameter(torch.tensor(0.3)), torch.nn.Parameter(torch.tensor([0.3, 0.2]))

    def forward(self, x, labels):
        return super().forward(x, labels) + 0 * self.level + 0 * self.weights.sum()


@pytest.mark.parametrize(
    "combine",
    [
        lambda loss, model: loss * torch.exp(-model.level) + model.level,
        lambda loss, model: torch.stack([loss, model.level]).sum() + model.up.weight.norm(),
        lambda loss, model: (loss * model.weights).sum(),
        lambda loss, model: loss + (model.up.weight / model.up.weight.norm() - loss).square().sum(),
    ],
    ids=["uncertainty", "stack", "weights", "normalized"],
)
@pytest.mark.parametrize("plan", PLANS)
def test_a_loss_beside_parameters(plan, combine):
    """The loss of a program may be on its way, and is no reason to forget what a parameter is."""

    def loop(model, optimizer):
        loss = combine(compiled(model)(X, LABELS), model)
        loss.backward()
        return [loss.detach().clone(), *gradients(model)]

    agree(Weighted, plan, loop)

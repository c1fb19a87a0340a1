"""Hooks on parameters see true gradients; hooks on modules that a compiled program would not run are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.capture import check_hooks
from shardwright.errors import InputError
from shardwright.parallelize import parallelize

from .critics import LABELS, Classifier, X, agree
from .looped import gradients
from .test_gradient_paths import on_ranks_only

PLANS = ("dp=2", "tp=2", "zero1=2", "zero2=2", "zero3=2", "pp=2", "dp=2,tp=2")


def clip(gradient):
    return gradient.clamp(-0.01, 0.01)


def double(parameter):
    parameter.grad.mul_(2)


def add_hooks(model):
    for parameter in model.parameters():
        parameter.register_hook(clip)
        parameter.register_post_accumulate_grad_hook(double)


@pytest.mark.parametrize("plan", PLANS)
def test_hooks_of_before_see_the_sum_over_ranks(plan):
    """A clamp of parts would be another number than the clamp of their sum."""

    def loop(model, optimizer):
        model(X, LABELS).backward()
        return gradients(model)

    agree(Classifier, plan, loop, prepare=add_hooks)


def test_the_handle_of_a_hook_of_before_removes_it():
    handles = []

    def add(model):
        handles.extend(parameter.register_hook(clip) for parameter in model.parameters())

    def loop(model, optimizer):
        model(X, LABELS)
        for handle in handles:  # of all ranks, and each time
            handle.remove()
        model(X, LABELS).backward()
        return gradients(model)

    agree(Classifier, "dp=2", loop, prepare=add)


@pytest.mark.parametrize("plan", PLANS)
def test_hooks_of_after_see_the_sum_over_ranks(plan):
    def loop(model, optimizer):
        model(X, LABELS)
        handles = [parameter.register_hook(clip) for parameter in model.parameters()]
        model(X, LABELS).backward()
        seen = gradients(model)
        for handle in handles:
            handle.remove()
        model(X, LABELS).backward()
        return seen + gradients(model)

    agree(Classifier, plan, loop)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero3=2"])
def test_a_hook_may_look_at_the_norm_of_the_whole_gradient(plan):
    def loop(model, optimizer):
        model(X, LABELS)
        seen = []
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient / gradient.norm())
            parameter.register_post_accumulate_grad_hook(lambda value: seen.append(value.grad.square().sum().clone()))
        model(X, LABELS).backward()
        assert len(seen) == len(list(model.parameters()))
        return gradients(model)

    agree(Classifier, plan, loop)


@pytest.mark.parametrize("plan", PLANS)
def test_hooks_change_what_autograd_grad_gives(plan):
    def loop(model, optimizer):
        model(X, LABELS)
        stored = list(model.parameters())
        for parameter in stored:
            parameter.register_hook(clip)
        for parameter, gradient in zip(stored, torch.autograd.grad(model(X, LABELS), stored), strict=True):
            parameter.grad = gradient
        return gradients(model)

    agree(Classifier, plan, loop)


def test_hooks_and_gradients_that_are_put_off_are_refused():
    def loop(model, optimizer):
        model(X, LABELS)
        next(model.parameters()).register_hook(clip)
        with model.no_sync():
            model(X, LABELS).backward()
        return []

    with pytest.raises(InputError, match="has hooks, which see the gradient of each backward"):
        on_ranks_only(Classifier, "dp=2", loop)


def test_hooks_and_a_second_gradient_from_outside_are_refused_under_zero3():
    def loop(model, optimizer):
        loss = model(X, LABELS)
        first = next(model.parameters())
        first.register_hook(clip)
        (loss + first.square().sum()).backward()
        return []

    with pytest.raises(InputError, match="Use zero2"):
        on_ranks_only(Classifier, "zero3=2", loop)


# -- hooks on modules ------------------------------------------------------------------------------


def look(module, *rest):
    return None


@pytest.mark.parametrize(
    "register",
    ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
     "register_full_backward_pre_hook"],
)  # fmt: skip
def test_hooks_on_modules_are_refused_by_name_and_line(register):
    model = Classifier()
    getattr(model.layers[1], register)(look)
    with pytest.raises(InputError, match=rf"layers\.1 \(Layer\) has a .*hook: look of .*{__name__.split('.')[-1]}"):
        parallelize(model, plan="single", example=(X.float(), LABELS))


def test_hooks_on_the_whole_model_are_registered_on_what_is_compiled():
    def loop(model, optimizer):
        seen = []
        model.register_forward_hook(lambda module, value, loss: seen.append(loss.detach().clone()))
        model(X, LABELS).backward()
        model(X, LABELS).backward()
        assert len(seen) == 2
        return [*seen, *gradients(model)]

    agree(Classifier, "dp=2", loop)


def test_hooks_that_only_compute_a_weight_are_part_of_the_model():
    with pytest.warns(FutureWarning, match="weight_norm"):
        check_hooks(nn.Sequential(nn.utils.weight_norm(nn.Linear(2, 2))))
    check_hooks(nn.Sequential(nn.utils.spectral_norm(nn.Linear(2, 2))))


def test_hooks_inside_of_an_opaque_submodule_run_as_they_are():
    model = Classifier()
    model.layers[1].inner.register_forward_hook(look)
    sw.opaque(model.layers[1])
    check_hooks(model)


class Rest(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.part = nn.Linear(8, 8), Classifier()

    def forward(self, x, labels):
        return self.part(torch.tanh(self.first(x)), labels)


@pytest.mark.parametrize("before", [True, False])
def test_hooks_outside_of_compiled_parts_are_refused_where_groups_differ(before):
    def add(model):
        model.first.weight.register_hook(clip)

    def loop(model, optimizer):
        if not before:
            add(model)
        model(X[:2] + model.part.data_rank, LABELS[:2]).backward()
        return []

    with pytest.raises(InputError, match="outside of the compiled parts and has hooks"):
        on_ranks_only(
            Rest, "dp=2", loop, parts=["part"], inputs="per_replica", prepare=add if before else lambda model: None
        )

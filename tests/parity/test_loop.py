"""An ordinary training loop, unmodified, does under a plan what it does on one device."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from shardwright.errors import InputError
from shardwright.runtime.model.parallel_model import ParallelModel

from .looped import both, gradients, parameters

PLANS = ("dp=2", "tp=2", "zero3=2", "pp=2")


def train(model, optimizer, case, steps=3):
    seen = []
    for _ in range(steps):
        loss = model(*case.args, **case.kwargs)
        loss.backward()
        optimizer.step()
        seen += [loss.detach(), *gradients(model)]
        optimizer.zero_grad()
    return seen + parameters(model)


@pytest.mark.parametrize("example", [False, True])
def test_capture_at_the_first_call_is_as_good_as_with_an_example(example):
    both("mlp", "dp=2", train, example=example)


def test_a_scheduler_made_before_keeps_working():
    schedulers = {}

    def make(parameters):
        sgd = torch.optim.SGD(parameters, lr=0.1)
        schedulers[id(sgd)] = torch.optim.lr_scheduler.StepLR(sgd, step_size=1, gamma=0.5)
        return sgd

    def loop(model, optimizer, case):
        seen = []
        for _ in range(3):
            seen += train(model, optimizer, case, steps=1)
            schedulers[id(optimizer)].step()
        assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**3
        return seen

    both("mlp", "tp=2", loop, make)


def test_a_scheduler_made_after():
    def loop(model, optimizer, case):
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
        seen = []
        for _ in range(3):
            seen += train(model, optimizer, case, steps=1)
            scheduler.step()
        return seen

    both("mlp", "zero1=2", loop)


@pytest.mark.parametrize("plan", [*PLANS, "zero2=2", "dp=2,tp=2"])
def test_clipping_is_by_the_global_norm(plan):
    def loop(model, optimizer, case):
        seen = []
        for _ in range(2):
            model(*case.args).backward()
            seen.append(clip_grad_norm_(model.parameters(), 0.01))
            optimizer.step()
            optimizer.zero_grad()
        return [*seen, *parameters(model)]

    both("gpt", plan, loop)


def accumulated(model, optimizer, case, skip=None):
    """Two backwards a step, on other halves of the data, each for half of the loss."""
    rows = case.args[0].shape[0] // 2
    for _ in range(2):
        for half in range(2):
            args = [argument[half * rows : (half + 1) * rows] for argument in case.args]
            with skip(model) if skip and half == 0 else nullcontext():
                (model(*args) / 2).backward()
        optimizer.step()
        seen = gradients(model)
        optimizer.zero_grad()
    return seen + parameters(model)


@pytest.mark.parametrize("plan", [*PLANS, "zero2=2"])
def test_every_backward_leaves_true_gradients(plan):
    both("mlp", plan, accumulated)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "pp=2"])
def test_accumulate_syncs_at_the_second_backward_only(plan):
    both("mlp", plan, accumulated, accumulate=2)


def test_no_sync():
    def skip(model):
        return model.no_sync() if hasattr(model, "no_sync") else nullcontext()

    def loop(model, optimizer, case):
        model(*case.args)  # what is not compiled yet has nothing to put off
        return accumulated(model, optimizer, case, skip)

    both("mlp", "dp=2", loop)


@pytest.mark.parametrize("plan", PLANS)
def test_two_calls_before_one_backward(plan):
    def loop(model, optimizer, case):
        x, y = case.args
        (model(x, y) + 3 * model(x.flip(0) * 2, y)).backward()
        return gradients(model)

    both("mlp", plan, loop)


@pytest.mark.parametrize("plan", [*PLANS, "zero1=2", "zero2=2"])
def test_zero_grad_that_keeps_the_tensors(plan):
    def loop(model, optimizer, case):
        for _ in range(2):
            optimizer.zero_grad(set_to_none=False)
            model(*case.args).backward()
            optimizer.step()
        return gradients(model) + parameters(model)

    both("mlp", plan, loop)


@pytest.mark.parametrize("plan", PLANS)
def test_eval_with_and_without_labels_and_back(plan):
    def loop(model, optimizer, case):
        idx, target = case.args
        seen = train(model, optimizer, case, steps=1)
        model.eval()
        with torch.no_grad():
            seen += [model(idx), model(idx, target)]
        assert not seen[-1].requires_grad
        model.train()
        return seen + train(model, optimizer, case, steps=1)

    both("gpt", plan, loop)


def test_eval_uses_the_running_statistics_and_leaves_them_alone():
    def loop(model, optimizer, case):
        train(model, optimizer, case, steps=2)
        model.eval()
        with torch.no_grad():
            seen = [model(*case.args)]
        return seen + parameters(model)  # with the buffers

    both("resnet", "dp=2", loop)


@pytest.mark.parametrize("example", [False, True])
def test_batch_norms_frozen_by_their_class_in_the_middle_of_training(example):
    def loop(model, optimizer, case):
        seen = train(model, optimizer, case, steps=1) if example else []
        norms = [part for part in model.modules() if isinstance(part, torch.nn.BatchNorm2d)]
        assert norms
        for norm in norms:
            norm.eval()
        seen += train(model, optimizer, case, steps=2)
        assert model.training
        assert not norms[0].training
        model.train()
        return seen + train(model, optimizer, case, steps=1) + parameters(model)

    both("resnet", "dp=2", loop, example=example)


def test_parts_are_what_they_were_but_can_not_be_called_on_their_own():
    def loop(model, optimizer, case):
        train(model, optimizer, case, steps=1)
        first = next(part for part in model.modules() if isinstance(part, torch.nn.Linear))
        assert first.in_features == 32
        if isinstance(model, ParallelModel):
            with pytest.raises(InputError, match=r"blocks\.0\.attn\.qkv is a part of a parallelized model"):
                first(torch.zeros(1, 32, dtype=torch.float64))
        return parameters(model)

    both("gpt", "tp=2", loop)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "pp=2"])
def test_another_batch_size_and_a_smaller_last_batch(plan):
    def loop(model, optimizer, case):
        seen = []
        for rows in (4, 2, 4):
            model(*(argument[:rows] for argument in case.args)).backward()
            optimizer.step()
            seen += gradients(model)
            optimizer.zero_grad()
        return seen

    both("gpt_ignore", plan, loop)


def test_without_gradients_nothing_is_kept():
    def loop(model, optimizer, case):
        with torch.no_grad():
            loss = model(*case.args)
        assert not loss.requires_grad
        return [loss]

    both("mlp", "zero3=2", loop)


@pytest.mark.parametrize("name", ["lora", "custom_backward", "checkpointed_gpt", "regularized", "gqa_fused", "rotary"])
@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "pp=2"])
def test_other_models(name, plan):
    both(name, plan, train)


def test_frozen_parameters_stay_and_have_no_gradient():
    def loop(model, optimizer, case):
        seen = train(model, optimizer, case, steps=1)
        frozen = [key for key, parameter in model.named_parameters() if not parameter.requires_grad]
        assert frozen == ["up.base.weight", "up.base.bias", "down.base.weight", "down.base.bias"]
        return seen

    both("lora", "zero3=2", loop)


def test_autocast():
    both("autocast_mlp", "dp=2", train, tolerance=2e-2, dtype=torch.float32)


def test_dropout_runs_and_draws_anew():
    def loop(model, optimizer, case):
        losses = torch.stack([model(*case.args).detach() for _ in range(3)])
        assert len(set(losses.tolist())) == 3
        model(*case.args).backward()
        model.eval()
        with torch.no_grad():
            return [model(*case.args)]

    both("dropout_gpt", "tp=2", loop)

"""What a loop may do with a pipeline, beyond what it does with every plan (test_loop.py)."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwright.errors import InputError
from shardwright.parallelize import parallelize, plan
from shardwright.runtime.model.parallel_model import ParallelModel
from shardwright.schedule import KINDS, ScheduleKind, gpipe
from tests.models.zoo import ZOO
from tests.options import grouped
from tests.runtime.ranks import run_ranks

from .looped import both, gradients, parameters
from .single import whole_gradients

PLANS = ("pp=2", "pp=2,zb", "pp=2,dp=2")


def loss_outside(model, optimizer, case):
    """The loss is computed on the model's output."""
    idx, target = case.args
    seen = []
    for _ in range(2):
        logits = model(idx)
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())
        loss.backward()
        optimizer.step()
        seen += [loss.detach(), *gradients(model)]
        optimizer.zero_grad()
    return seen + parameters(model)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("backward", ["inside", "outside"])
def test_a_loss_that_is_computed_on_outputs(plan, backward):
    both("gpt", plan, loss_outside, backward=backward)  # a model that returns no number is run so in any case


@pytest.mark.parametrize("plan", PLANS)
def test_the_loss_of_the_model_used_outside(plan):
    def loop(model, optimizer, case):
        (model(*case.args) ** 2).backward()  # backward knows the gradient of the loss only now
        return gradients(model)

    both("mlp", plan, loop)
    both("mlp", plan, loop, backward="outside")


@pytest.mark.parametrize("backward", ["inside", "outside"])
def test_inputs_get_gradients(backward):
    def loop(model, optimizer, case):
        x, y = case.args
        x = x.clone().requires_grad_()
        (3 * model(x, y)).backward()
        return [x.grad, *gradients(model)]

    both("mlp", "pp=2", loop, backward=backward)
    both("unet", "pp=2,dp=2", loop, backward=backward)


@pytest.mark.parametrize("backward", ["inside", "outside"])
def test_backward_again_if_the_graph_is_retained(backward):
    def loop(model, optimizer, case):
        loss = model(*case.args)
        loss.backward(retain_graph=True)
        loss.backward()
        return gradients(model)

    both("gpt", "pp=2", loop, backward=backward)


def test_hooks_on_parameters_see_and_change_gradients():
    def loop(model, optimizer, case):
        model(*case.args)  # hooks are for the shards, which are there after the first call
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: 2 * gradient)
        model(*case.args).backward()
        return gradients(model)

    both("mlp", "pp=2", loop)


class Both(nn.Module):
    """Returns its loss and what it was computed from, and the loss once more under another name."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x, y):
        logits = self.down(self.up(x).relu())
        loss = F.mse_loss(logits, y)
        return {"logits": logits, "loss": loss, "again": loss}


def with_both(loop, tmp_path, **options):
    """Run a loop on two ranks with a parallelized `Both`, and give the original to compare with."""
    torch.manual_seed(0)
    original, x, y = Both().double(), torch.randn(4, 6).double(), torch.randn(4, 6).double()
    copies = [copy.deepcopy(original) for _ in range(2)]

    def run(rank):
        return loop(parallelize(copies[rank], plan="pp=2", **grouped(directory=tmp_path, **options)), x, y)

    original(x, y)["loss"].backward()
    return run_ranks(2, run), {key: parameter.grad for key, parameter in original.named_parameters()}


def test_gradients_of_other_outputs_are_refused_with_the_way_out(tmp_path):
    def loop(model, x, y):
        output = model(x, y)
        with pytest.raises(InputError, match=r'pass pipeline=PipelineOptions\(backward="outside"\)'):
            output["logits"].sum().backward()
        output = model(x, y)
        output["loss"].backward()
        return whole_gradients(model)

    for mine in (ranks := with_both(loop, tmp_path))[0]:
        for key, wanted in ranks[1].items():
            torch.testing.assert_close(mine[key], wanted, rtol=0, atol=1e-12)


def test_only_numbers_leave_if_that_is_asked_for(tmp_path):
    def loop(model, x, y):
        output = model(x, y)
        assert output["logits"] is None
        assert "Linear(in_features=6, out_features=8" in repr(model)  # also where a stage holds no parameter of it
        output["loss"].backward()
        return whole_gradients(model)

    for mine in (ranks := with_both(loop, tmp_path, outputs="scalars"))[0]:
        for key, wanted in ranks[1].items():
            torch.testing.assert_close(mine[key], wanted, rtol=0, atol=1e-12)


def test_a_scaler_scales_and_steps():
    def loop(model, optimizer, case):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        for _ in range(3):
            loss = model(*case.args)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return [torch.tensor(scaler.get_scale()), *parameters(model)]

    both("mlp", "pp=2", loop)


@pytest.mark.parametrize("mode", ["per_rank", "per_replica"])
def test_ranks_may_pass_their_own_rows(mode):
    """Each rank, or each data-parallel group, has its rows, and the loss is that of all of them."""

    def loop(model, optimizer, case):
        args = case.args
        if isinstance(model, ParallelModel):
            rank, size = (model._world.rank, 4) if mode == "per_rank" else (model._world.rank % 2, 2)
            rows = args[0].shape[0] // size
            args = [argument[rank * rows : (rank + 1) * rows] for argument in args]
        seen = []
        for _ in range(2):
            loss = model(*args)
            loss.backward()
            optimizer.step()
            seen += [loss.detach(), *gradients(model)]
            optimizer.zero_grad()
        return seen

    both("gpt_ignore", "pp=2,dp=2", loop, inputs=mode)


def test_gradients_of_gradients_are_refused():
    def loop(model, optimizer, case):
        loss = model(*case.args)
        if isinstance(model, ParallelModel):
            with pytest.raises(InputError, match="create_graph"):
                loss.backward(create_graph=True)
        return [loss.detach()]

    both("mlp", "pp=2", loop)


def reverse(stages, microbatches):
    """An own schedule: all forwards, then all backwards, the last microbatch first."""
    built = gpipe(stages, microbatches)
    rows = [(*row[:microbatches], *reversed(row[microbatches:])) for row in built.devices]
    return replace(built, devices=tuple(rows), name="reverse")


def trained(model, optimizer, case):
    seen = []
    for rows in (4, 2):  # a smaller batch has fewer microbatches
        model(*(argument[:rows] for argument in case.args)).backward()
        optimizer.step()
        seen += gradients(model)
        optimizer.zero_grad()
    return seen


def test_an_own_schedule_by_its_name(monkeypatch):
    monkeypatch.setitem(KINDS, "reverse", ScheduleKind(name="reverse", make=reverse))
    both("gpt_ignore", "pp=2,reverse", trained)


def test_an_own_schedule_as_data(tmp_path):
    case = ZOO["gpt_ignore"](dtype=torch.float64)
    drawn = plan(case.module, example=case.args, plan="pp=2", cluster=2, pipeline={"microbatches": 4})
    own = replace(drawn, schedule="reverse", steps=reverse(2, 4).to_json())
    own.save(tmp_path / "plan.json")
    both("gpt_ignore", str(tmp_path / "plan.json"), trained)

"""Precisions under plans: the same as on one device, to what the dtype allows, and masters exactly."""

from __future__ import annotations

import tempfile

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from shardwright.capture import cast, casting
from shardwright.errors import InputError
from shardwright.parallelize import parallelize
from shardwright.precision import read_precision
from tests.models.nets import RATE, Exact
from tests.models.nets import SIGNS as X
from tests.models.zoo import ZOO
from tests.options import grouped
from tests.runtime.ranks import run_ranks

from .looped import gradients, on_ranks, parameters, sgd
from .threaded import world_of

PLANS = ("dp=2", "tp=2", "zero1=2", "zero2=2", "zero3=2", "pp=2")


def train(model, optimizer, case, steps=2):
    seen = []
    for _ in range(steps):
        loss = model(*case.args, **case.kwargs)
        loss.backward()
        seen += [loss.detach(), *gradients(model)]
        optimizer.step()
        optimizer.zero_grad()
    return seen + parameters(model)


def alone(name, message):
    """The original on one device, in a precision."""
    case, precision = ZOO[name](dtype=torch.float32), read_precision(message)
    with casting(cast(case.module, precision), precision):
        return train(case.module, sgd(case.module.parameters()), case)


def apart(actual, wanted):
    scale = max(float(expected.abs().max()) for expected in wanted)
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(actual, wanted, strict=True)) / scale


@pytest.mark.parametrize("message", ["bf16-mixed", "fp16-mixed"])
def test_one_rank_does_what_autocast_does_to_the_last_bit(message):
    case = ZOO["gpt"](dtype=torch.float32)
    kind = torch.bfloat16 if message == "bf16-mixed" else torch.float16

    class Under:
        def __getattr__(self, name):
            return getattr(case.module, name)

        def __call__(self, *args):
            with torch.autocast("cpu", kind):
                return case.module(*args)

    wanted = train(Under(), sgd(case.module.parameters()), case)
    assert wanted[1].dtype == torch.float32
    (actual,) = on_ranks("gpt", "single", train, dtype=torch.float32, precision=message)
    assert apart(actual, wanted) == 0.0


@pytest.mark.parametrize("plan", [*PLANS, "dp=2,tp=2"])
@pytest.mark.parametrize("message", ["bf16-mixed", "bf16"])
def test_ranks_round_as_one_device_does(message, plan):
    wanted = alone("mlp", message)
    for result in on_ranks("mlp", plan, train, dtype=torch.float32, precision=message):
        assert apart(result, wanted) < torch.finfo(torch.bfloat16).eps
        assert {value.dtype for value in result[1:5]} == {torch.float32}  # gradients, of masters too


def exact_loop(model, optimizer):
    for _ in range(3):
        model(X).backward()
        clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        optimizer.zero_grad()


def exact(plan, make, **options):
    """The parameters of all ranks after three steps."""
    nets, folder = [Exact() for _ in range(world_of(plan))], tempfile.mkdtemp(prefix="exact-")

    def run(rank):
        instance = make(nets[rank].parameters())
        model, optimizer = parallelize(nets[rank], instance, plan=plan, **grouped(directory=folder, **options))
        exact_loop(model, optimizer)
        working = {str(parameter.dtype) for parameter in model.parameters()}
        return model.full_state_dict(), working

    return run_ranks(world_of(plan), run)


MAKERS = {
    "momentum": lambda value: torch.optim.SGD(value, lr=RATE, momentum=0.5),
    "adafactor": lambda value: torch.optim.Adafactor(value, lr=RATE),
}


def moved_by(make):
    """Three steps in float32, with the gradients of weights that stay what they are."""
    net, fixed = Exact(), Exact()
    fixed(X).backward()
    optimizer = make(net.parameters())
    for _ in range(3):
        for parameter, still in zip(net.parameters(), fixed.parameters(), strict=True):
            parameter.grad = still.grad.clone()
        optimizer.step()
    for parameter, still in zip(net.parameters(), fixed.parameters(), strict=True):
        assert torch.equal(parameter.bfloat16(), still.bfloat16())
    return {key: value.detach() for key, value in net.named_parameters()}


@pytest.mark.parametrize("plan", ["single", *PLANS])
@pytest.mark.parametrize("kind", MAKERS)
def test_masters_gather_what_bfloat16_would_lose(plan, kind):
    moved = moved_by(MAKERS[kind])
    for result, working in exact(plan, MAKERS[kind], precision="bf16"):
        assert working == {"torch.bfloat16"}
        for key, value in moved.items():
            assert value.dtype == result[key].dtype
            assert torch.equal(result[key], value), key
            assert not torch.equal(value, value.round())


def test_without_masters_they_are_lost():
    for result, _ in exact("dp=2", MAKERS["momentum"], precision={"base": "bf16", "master": False}):
        assert torch.equal(result["up"], Exact().up.bfloat16())


def test_masters_need_an_optimizer_unless_nothing_is_trained():
    with pytest.raises(InputError, match="float32 masters"):
        parallelize(Exact(), precision="bf16", plan="single")
    model = parallelize(Exact().eval(), precision="bf16", plan="single", compile={"directory": tempfile.mkdtemp()})
    assert model(X).item() == Exact()(X).item()


class Weighted(nn.Module):
    """The gradient of each rank's row is that row: 256 and 1, whose sum has one bit more than bfloat16."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return (x * self.weight).float().sum()


ROWS = torch.tensor([[256.0], [1.0]]).expand(2, 4).contiguous()


@pytest.mark.parametrize("plan", ["dp=2", "zero2=2", "zero3=2"])
@pytest.mark.parametrize(
    ("message", "sums"),
    [
        ({"base": "bf16", "sync": "float32"}, {257.0}),
        ("bf16", {256.0, 258.0}),
        ({"base": "fp32", "sync": "bf16"}, {256.0, 258.0}),
        ("fp32", {257.0}),
    ],
)
def test_gradients_are_summed_in_the_dtype_that_is_asked_for(plan, message, sums):
    nets, folder = [Weighted() for _ in range(2)], tempfile.mkdtemp(prefix="sync-")

    def run(rank):
        optimizer = torch.optim.SGD(nets[rank].parameters(), lr=1.0)
        model, _ = parallelize(nets[rank], optimizer, plan=plan, compile={"directory": folder}, precision=message)
        model(ROWS).backward()
        return gradients(model)[0]

    for result in run_ranks(2, run):
        assert result.dtype == torch.float32
        assert set(result.tolist()) <= sums


def test_a_submodule_may_compute_in_another_dtype():
    message = {"base": "bf16", "overrides": {"*ln*": "float32"}}
    wanted = alone("gpt", message)

    def loop(model, optimizer, case):
        result = train(model, optimizer, case)
        kinds = {str(parameter.dtype) for key, parameter in model.named_parameters() if "ln" in key}
        assert kinds == {"torch.float32"}
        assert ".ln1.weight" in model.generated.read_text()
        return result

    (actual,) = on_ranks("gpt", "single", loop, dtype=torch.float32, precision=message)
    assert apart(actual[:1], wanted[:1]) == 0.0  # the loss of the first step, which has no masters in it yet


@pytest.mark.parametrize("plan", ["tp=2", "zero1=2", "pp=2"])
def test_a_scaler_with_float16_and_masters(plan):
    """Scales are powers of two, so that masters are exact."""
    rate = 2.0**-19

    def make(parameters):
        return torch.optim.SGD(parameters, lr=rate, momentum=0.5)

    moved = moved_by(make)
    nets, folder = [Exact() for _ in range(2)], tempfile.mkdtemp(prefix="half-")

    def run(rank):
        model, optimizer = parallelize(
            nets[rank], make(nets[rank].parameters()), plan=plan, compile={"directory": folder}, precision="fp16"
        )
        scaler, collected = torch.amp.GradScaler("cpu", init_scale=2.0**17, growth_interval=100), []
        optimizer.register_step_post_hook(lambda *_: collected.append(1))
        while len(collected) < 3:  # the first ones overflow, and are skipped
            scaler.scale(model(X)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return model.full_state_dict(), scaler.get_scale()

    results = run_ranks(2, run)
    assert len({scale for _, scale in results}) == 1
    assert results[0][1] < 2.0**17
    for state, _ in results:
        for key, value in moved.items():
            assert torch.equal(state[key], value), key

"""Averages of the weights, under plans and on one device, and from one plan to another."""

from __future__ import annotations

import tempfile
from copy import deepcopy

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shardwright.ema import EMA
from shardwright.errors import InputError
from shardwright.parallelize import parallelize
from shardwright.runtime.model.parallel_model import ParallelModel
from tests.models.zoo import ZOO
from tests.parity.looped import parameters
from tests.parity.threaded import world_of
from tests.runtime.ranks import run_ranks

DECAY = 0.7
PLANS = ("tp=2", "zero1=2", "zero2=2", "zero3=2", "pp=2")


def loop(model, optimizer, case, ema):
    for _ in range(3):
        model(*case.args).backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update()


def whole(values):
    """A state dict with whole tensors."""
    return {
        key: value.full_tensor() if hasattr(value, "full_tensor") else value.clone() for key, value in values.items()
    }


def wanted():
    """What torch's own average is, on one device."""
    case = ZOO["mlp"](dtype=torch.float64)
    optimizer = torch.optim.AdamW(case.module.parameters(), lr=0.1)

    class Own:
        def __init__(self):
            self.averaged = AveragedModel(case.module, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
            self.averaged.update_parameters(case.module)  # the first one copies

        def update(self):
            self.averaged.update_parameters(case.module)

    own = Own()
    loop(case.module, optimizer, case, own)
    averages = {key: parameter.detach() for key, parameter in own.averaged.module.named_parameters()}
    return (
        averages,
        own.averaged.module(*case.args).detach(),
        [parameter.detach() for parameter in parameters(case.module)],
    )


@pytest.mark.parametrize("plan", PLANS)
def test_the_average_is_that_of_one_device(plan):
    averages, loss, ends = wanted()
    cases, folder = [ZOO["mlp"](dtype=torch.float64) for _ in range(2)], tempfile.mkdtemp(prefix="ema-")

    def rank(number):
        case = cases[number]
        adamw = torch.optim.AdamW(case.module.parameters(), lr=0.1)
        model, optimizer = parallelize(case.module, adamw, plan=plan, example=case.args, compile={"directory": folder})
        ema = EMA(model, DECAY)
        loop(model, optimizer, case, ema)
        with ema.swapped(), torch.no_grad():
            swapped = model(*case.args), parameters(model)
            with pytest.raises(InputError, match="outside of swapped"):
                ema.update()
        return whole(ema.state_dict()["averages"]), swapped, parameters(model)

    results = run_ranks(world_of(plan), rank)
    assert {key for mine, _, _ in results for key in mine} == set(averages)
    for mine, (there, values), after in results:
        for key, value in mine.items():
            assert torch.allclose(value, averages[key], rtol=1e-9, atol=1e-12), key
        assert torch.allclose(there, loss, rtol=1e-9)
        assert all(torch.allclose(a, averages[k], rtol=1e-9) for a, k in zip(values, sorted(averages), strict=True))
        assert all(torch.allclose(a, b, rtol=1e-9) for a, b in zip(after, ends, strict=True))


def test_averages_of_masters_are_float32_and_come_back_to_the_last_bit():
    cases, folder = [ZOO["mlp"](dtype=torch.float32) for _ in range(2)], tempfile.mkdtemp(prefix="ema-")

    def rank(number):
        case = cases[number]
        adamw = torch.optim.AdamW(case.module.parameters(), lr=1e-3)
        model, optimizer = parallelize(
            case.module, adamw, plan="zero1=2", example=case.args, compile={"directory": folder}, precision="bf16"
        )
        ema = EMA(model, DECAY)
        loop(model, optimizer, case, ema)
        before = [parameter.detach().clone() for parameter in model.parameters()], parameters(model)
        with ema.swapped():
            assert not all(torch.equal(a, b) for a, b in zip(parameters(model), before[1], strict=True))
        after = [parameter.detach().clone() for parameter in model.parameters()], parameters(model)
        assert all(torch.equal(a, b) for a, b in zip((*before[0], *before[1]), (*after[0], *after[1]), strict=True))
        return {average.dtype for average in ema._averages.values()}

    assert run_ranks(2, rank) == [{torch.float32}] * 2


def test_from_one_plan_to_another():
    averages, _, _ = wanted()
    state = {"decay": DECAY, "updates": 3, "averages": averages}
    cases, folder = [ZOO["mlp"](dtype=torch.float64) for _ in range(2)], tempfile.mkdtemp(prefix="ema-")

    def rank(number):
        case = cases[number]
        model = parallelize(case.module, plan="zero3=2", example=case.args, compile={"directory": folder})
        ema = EMA(model)
        ema.load_state_dict(deepcopy(state))
        assert (ema.decay, ema.updates) == (DECAY, 3)
        return whole(ema.state_dict()["averages"])

    for result in run_ranks(2, rank):
        assert all(torch.equal(result[key], average) for key, average in averages.items())


def test_what_is_refused():
    case = ZOO["mlp"]()
    with pytest.raises(InputError, match="not compiled yet"):
        EMA(parallelize(case.module, plan="single"))
    with pytest.raises(InputError, match="no decay"):
        EMA(case.module, decay=1.5)
    ema = EMA(case.module)
    with pytest.raises(InputError, match=r"missing: up\.weight"):
        ema.load_state_dict({"averages": {}, "decay": 0.9, "updates": 0})
    assert not isinstance(case.module, ParallelModel)

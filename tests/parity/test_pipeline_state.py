"""Checkpoints go from a pipeline to any other plan and back, with the state of the optimizer."""

from __future__ import annotations

import copy

import pytest
import torch

import shardwright as sw
from tests.models.zoo import ZOO
from tests.options import grouped

LIMIT = 120.0


def train(model, optimizer, case, steps):
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(*case.args, **case.kwargs)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().double())
    return losses


def adamw(module):
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


def compile_gpt(plan, folder):
    case = ZOO["gpt"](dtype=torch.float64, batch=4)
    inputs = {"microbatches": 2} if "pp" in plan else {}
    optimizer = adamw(case.module)
    example = (case.args, case.kwargs)
    model, _ = sw.parallelize(case.module, optimizer, plan=plan, example=example, **grouped(directory=folder, **inputs))
    return model, optimizer, case


def through(rank, plans, folder):
    """A step under each plan, one handing over to the next by a checkpoint. What was seen, and the state at the end."""
    losses, last = [], None
    for number, plan in enumerate(plans):
        model, optimizer, case = compile_gpt(plan, folder)
        if last is not None:
            sw.load(last, model, optimizer)
        losses += train(model, optimizer, case, 1)
        last = f"{folder}/{number}"
        sw.save(last, model, optimizer)
    return losses, model.full_state_dict()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("plans", [("pp=2", "dp=2", "pp=2,zbv"), ("zero2=2", "pp=2,zb")])
def test_training_goes_on_under_another_plan(pools, tmp_path, plans):
    case = ZOO["gpt"](dtype=torch.float64, batch=4)
    reference = copy.deepcopy(case.module)
    wanted = train(reference, adamw(reference), case, len(plans))

    for losses, state in pools[2].run(through, plans, str(tmp_path), timeout=LIMIT):
        torch.testing.assert_close(losses, wanted, rtol=1e-10, atol=0)
        assert state.keys() == reference.state_dict().keys()
        for key, tensor in reference.state_dict().items():
            torch.testing.assert_close(state[key], tensor, rtol=1e-8, atol=1e-10)

    alone = copy.deepcopy(case.module)  # and on one device, without a plan
    sw.load(f"{tmp_path}/{len(plans) - 1}", alone)
    for key, tensor in reference.state_dict().items():
        torch.testing.assert_close(alone.state_dict()[key], tensor, rtol=1e-8, atol=1e-10)

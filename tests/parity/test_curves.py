"""Hundreds of steps of a small GPT on real text: under any plan, the loss at every step is that of one device."""

from __future__ import annotations

from functools import cache
from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from examples.gpt import GPT, GPTConfig
from examples.text import Characters
from torch import Tensor

import shardwright as sw
from tests.options import grouped

BATCH, SEQ, LIMIT = 8, 32, 240.0
DATA = Path(__file__).parents[2] / "examples" / "data" / "paradise_lost.txt"
NEAR = {torch.float32: 1e-4, torch.float64: 1e-8}
PLANS = {
    2: ("dp=2", "tp=2", "pp=2", "zero3=2", "auto"),
    4: ("dp=4", "tp=4", "pp=4", "zero3=4", "auto"),
}
DTYPES = {2: torch.float32, 4: torch.float64}  # the other way round takes as long again, and shows the same
LAYERS = {torch.float32: 2, torch.float64: 1}  # four ranks on two cores wait for each other at every layer
STEPS = 300


def build(dtype: torch.dtype) -> tuple[torch.nn.Module, torch.optim.Optimizer, list[tuple[Tensor, Tensor]]]:
    text = Characters(DATA)
    torch.manual_seed(0)
    config = GPTConfig(vocab=len(text.alphabet), seq=SEQ, n_layer=LAYERS[dtype], n_head=4, d=32)
    model = GPT(config).to(dtype)
    batches = text.batches(batch=BATCH, seq=SEQ, seed=1, device=torch.device("cpu"))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), list(islice(batches, STEPS))


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    losses = []
    for x, y in batches:
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack([loss.double() for loss in losses])


@cache
def alone(dtype: torch.dtype) -> Tensor:
    return train(*build(dtype))


def curve(rank: int, plan: str, dtype: torch.dtype, folder: str) -> Tensor:
    model, optimizer, batches = build(dtype)
    inputs = {"microbatches": dist.get_world_size()} if "pp" in plan else {}
    model, optimizer = sw.parallelize(
        model, optimizer, plan=plan, example=batches[0], **grouped(directory=folder, **inputs)
    )
    return train(model, optimizer, batches)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("size", "plan"), [(size, plan) for size, plans in PLANS.items() for plan in plans])
def test_the_curve_lies_on_that_of_one_device(pools, tmp_path, size, plan):
    dtype = DTYPES[size]
    wanted = alone(dtype)
    assert wanted[-20:].mean() < wanted[0] - 1  # it learns
    for losses in pools[size].run(curve, plan, dtype, str(tmp_path), timeout=LIMIT):
        far = (losses - wanted).abs()
        assert far.max() <= NEAR[dtype], f"step {int(far.argmax())} is off by {float(far.max()):.1e}"

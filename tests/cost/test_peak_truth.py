"""The predicted peak of a rank against what torch has really allocated, in gloo processes."""

from functools import cache

import pytest
import torch
from bench.memory import MODELS, Case, Measured, measure_case, predict
from torch import Tensor, nn

from shardwright.cost import TrainingSetup
from shardwright.memory import MemoryPeak, simulate_memory
from shardwright.rules import Analysis
from tests.runtime.ranks import run_processes

from .kept import analysed, program_of
from .random_models import random_case

Cell = tuple[str | int, str]  # a model of `bench.memory`, or the seed of a random one, and its plan
PLANS = ("dp=2", "tp=2", "sp=2", "zero1=2", "zero2=2", "zero3=2")
CELLS: list[Cell] = [(model, plan) for model in ("mlp", "gpt") for plan in ("dp=2", "tp=2", "zero3=2")]
CELLS += [("resnet", "dp=2"), *((seed, PLANS[seed % len(PLANS)]) for seed in range(18))]
CELLS += [("gpt", f"{plan},chunked_loss=8") for plan in ("dp=2", "tp=2")]
CLASSES = 32768
LOW, HIGH = 0.03, 0.10
"""How much less and more than what is allocated may be predicted. Too little lets a plan run out of memory."""
CONVOLUTION = 0.30
"""The same above it where a convolution is at the peak: how its kernel reorders tensors depends on the machine."""


def make(model: str | int) -> Case:
    return MODELS[model]() if isinstance(model, str) else random_case(model, batch=64)


def measure_all(rank: int, cells: list[Cell]) -> list[Measured]:
    return [measure_case(lambda model=model: make(model), plan) for model, plan in cells]


@pytest.fixture(scope="module")
def measured() -> dict[Cell, Measured]:
    """All cells in one pair of processes; those again of which a busy machine hid a release from the profiler."""
    by_case: dict[Cell, Measured] = {}
    for _ in range(3):
        left = [cell for cell in CELLS if cell not in by_case or not by_case[cell].complete]
        by_case.update(zip(left, run_processes(2, measure_all, left, timeout=300)[0] if left else (), strict=True))
    return by_case


@cache
def random_analysis(seed: int) -> Analysis:
    return analysed(*random_case(seed, batch=64))


def predicted(model: str | int, plan: str) -> MemoryPeak:
    if isinstance(model, str):
        return predict(model, plan)
    return simulate_memory(program_of(random_analysis(model), plan), TrainingSetup(optimizer="adamw"))


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_the_peak_of_a_rank_is_what_is_predicted(cell, measured):
    assert measured[cell].complete
    peak = predicted(*cell)
    high = CONVOLUTION if "conv" in peak.at[0] else HIGH
    assert (1 - LOW) * measured[cell].peak < peak.peak < (1 + high) * measured[cell].peak, peak


class Head(nn.Module):
    """A table of 32,768 classes, read and multiplied with."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, 32)

    def forward(self, idx: Tensor, target: Tensor) -> Tensor:
        logits = nn.functional.linear(self.table(idx), self.table.weight)
        return nn.functional.cross_entropy(logits.view(-1, CLASSES), target.view(-1))


def head() -> tuple[nn.Module, tuple[Tensor, Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    idx = torch.randint(CLASSES, (8, 32))
    return Head(), (idx, idx.clone()), {}


def measure_head(rank: int, plans: list[str]) -> list[Measured]:
    return [measure_case(head, plan) for plan in plans]


def test_chunks_cut_the_peak_by_the_share_of_the_logits() -> None:
    """At the peak there are the logits, their log_softmax and their gradient; of each an eighth is left."""
    whole, chunked = run_processes(1, measure_head, ["single", "chunked_loss=8"], timeout=300)[0]
    logits = 4 * 8 * 32 * CLASSES

    assert whole.peak > 3 * logits
    assert whole.peak - chunked.peak == pytest.approx(3 * 7 / 8 * logits, rel=HIGH)

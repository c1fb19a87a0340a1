"""What a compiled program keeps for backward and needs at its peak: as predicted, and as torch has it."""

import copy
import gc
from pathlib import Path
from typing import Any

import torch
from bench.memory import Measured, alive, measure_case, ranks_of
from torch import Tensor, nn

import shardwright as sw
from shardwright.compile import copy_to_meta
from shardwright.cost import TrainingSetup
from shardwright.cost.training import ON_CPU
from shardwright.lower import LoweredProgram
from shardwright.memory import MemoryPeak, simulate_memory
from shardwright.memory.rank_program import read_program
from shardwright.memory.timeline import MemoryTimeline
from shardwright.plan.lowering import lower
from shardwright.plan.request import PlanRequest
from shardwright.planning import make_plan
from shardwright.probe import probing
from shardwright.rules import Analysis, analyse
from tests.captures import captured
from tests.models.zoo import loss_of


def analysed(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Analysis:
    capture_result = captured(copy_to_meta(module), args, kwargs, entry="train", real=lambda: (module, args, kwargs))
    return analyse(capture_result.graph, probing(capture_result.functions))


def program_of(analysis: Analysis, plan: str = "single") -> LoweredProgram:
    made_plan = make_plan(analysis.graph, analysis, PlanRequest.read(plan), ranks_of(plan))
    return lower(analysis.graph, made_plan, analysis)


def predicted_peak(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MemoryPeak:
    return simulate_memory(program_of(analysed(module, args, kwargs)), TrainingSetup(optimizer="adamw"))


def allocated(case: tuple[nn.Module, tuple[Any, ...], dict[str, Any]]) -> Measured:
    """What torch allocates in a step on one device; again if the profiler has missed a release."""
    for _ in range(3):
        truth = measure_case(lambda: copy.deepcopy(case), "single")
        if truth.complete:
            return truth
    raise RuntimeError("the profiler missed releases three times")


def predicted(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    program = read_program(program_of(analysed(module, args, kwargs)), TrainingSetup())
    line = MemoryTimeline(program, TrainingSetup(), ON_CPU)
    line.forward()
    return line.heap.total


def saved(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], directory: Path) -> int:
    """The bytes of the storages that autograd saves and that were not there before."""
    model = sw.parallelize(module, example=(args, kwargs), plan="single", compile={"directory": directory})
    gc.collect()  # what is let go of later leaves its address to what is saved
    there = alive()
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        if _address(tensor) not in there:
            storages[_address(tensor)] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of(model(*args, **kwargs))
    assert loss.requires_grad
    storages[_address(loss)] = loss.untyped_storage()  # of some losses as large as what they are the mean of
    return sum(storage.nbytes() for storage in storages.values())


def _address(tensor: Tensor) -> int:
    return Tensor.untyped_storage(tensor).data_ptr()

"""Random models under random plans: the memory simulation against lowered programs, and against what autograd saves."""

import copy
import gc
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bench.memory import ranks_of
from torch import Tensor
from torch._subclasses import FakeTensor

import shardwright as sw
from shardwright.cluster import find
from shardwright.cost import ON_CPU, ON_GPU, TrainingSetup
from shardwright.errors import PlanError
from shardwright.ir.recompute import layers_of
from shardwright.layout import Axis, Mesh
from shardwright.lower import LoweredProgram, PlacementTask, Placer, run, transform
from shardwright.memory import rank_memory, simulate_memory, simulate_stage_memory
from shardwright.memory.heap import ACTIVATION
from shardwright.memory.rank_program import read_program
from shardwright.memory.timeline import MemoryTimeline
from shardwright.plan.constraints import read_constraints
from shardwright.plan.joint import find_plan as find_joint
from shardwright.plan.lowering import lower, lower_pipeline
from shardwright.plan.request import PlanRequest
from shardwright.plan.search_options import SearchOptions
from shardwright.planning import make_plan
from shardwright.rules import FAN, Analysis, Choices
from shardwright.storage import KINDS, SHARDED_KINDS
from tests.models.zoo import loss_of
from tests.runtime.ranks import run_ranks

from .kept import analysed
from .random_models import random_case

PLANS = ("single", "dp=2", "tp=2", "sp=2", "zero1=2", "zero2=2", "dp=2,tp=2", "dp=2,sp=2", "zero1=2,tp=2", "sp=4")
SCALARS = 64  # bytes: counts and factors that no prediction needs


@cache
def random_analysis(seed: int) -> Analysis:
    return analysed(*random_case(seed))


def saved_bytes(program: LoweredProgram) -> float:
    """What the simulation has in memory of activations when forward is through."""
    line = MemoryTimeline(read_program(program, TrainingSetup()), TrainingSetup(), ON_CPU)
    line.forward()
    return line.heap.now[ACTIVATION]


def saved_by_autograd(case: tuple[Any, ...], plan: str, ranks: int, directory: Path) -> int:
    """The bytes of storages that autograd saves on rank 0, and that were not there before."""

    def forward(rank: int) -> int:
        module, args, kwargs = copy.deepcopy(case)
        model = sw.parallelize(module, example=(args, kwargs), plan=plan, compile={"directory": directory})
        dist.barrier()  # nothing is made while one rank looks at all objects
        before = storages_alive() if rank == 0 else []  # objects, so that nothing new gets an address of theirs
        dist.barrier()
        there = {storage.data_ptr() for storage in before}
        saved: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in there:
                saved[storage.data_ptr()] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = loss_of(model(*args, **kwargs))
        assert loss.requires_grad
        pack(loss)  # of some losses as large as what they are the mean of
        return sum(storage.nbytes() for storage in saved.values())

    return run_ranks(ranks, forward)[0]


def storages_alive() -> list[torch.UntypedStorage]:
    gc.collect()
    tensors = (item for item in gc.get_objects() if issubclass(type(item), Tensor) and not isinstance(item, FakeTensor))
    return [Tensor.untyped_storage(tensor) for tensor in tensors if tensor.device.type == "cpu"]


@pytest.mark.parametrize("seed", range(16))
def test_what_is_saved_for_backward_is_what_autograd_saves(seed, tmp_path):
    plan = PLANS[seed % len(PLANS)]
    analysis, ranks = random_analysis(seed), ranks_of(plan)
    program = lower(analysis.graph, make_plan(analysis.graph, analysis, PlanRequest.read(plan), ranks), analysis)
    real = saved_by_autograd(random_case(seed), plan, ranks, tmp_path)
    assert saved_bytes(program) == pytest.approx(real, abs=SCALARS), plan


def random_task(seed: int) -> PlacementTask:
    """Any legal split of every op on one or two axes, any storage, some layers recomputed."""
    analysis, draw = random_analysis(seed % 8), random.Random(seed)
    sizes = draw.choice(((2,), (4,), (2, 2), (4, 2)))
    mesh = Mesh(axes=tuple(Axis(name=f"a{at}", size=size) for at, size in enumerate(sizes)))
    kind, parameters = draw.choice(KINDS), analysis.graph.parameters
    storage = {item.key: kind((draw.choice(mesh.names),)) for item in parameters if kind in SHARDED_KINDS}
    recompute = tuple(path for path in layers_of(analysis.graph) if draw.random() < 0.3)
    choices = random_choices(analysis, mesh, draw)
    return PlacementTask(
        graph=analysis.graph, analysis=analysis, mesh=mesh, choices=choices, storage=storage, recompute=recompute
    )


def random_choices(analysis: Analysis, mesh: Mesh, draw: random.Random) -> Choices:
    choices: dict[str, dict[str, str]] = {}
    for op in analysis.live:
        signature, choice = analysis.signatures[op.name], dict[str, str]()
        for axis in mesh.axes:
            roles = [role.name for role in signature.roles if role.fills(axis.size)]
            picked = draw.choice([*roles, *roles, FAN, None])
            if picked is None:
                continue
            try:
                signature.layouts(choice | {axis.name: picked}, mesh)
            except PlanError:  # two axes that can't share a dim
                continue
            choice[axis.name] = picked
        choices[op.name] = choice
    return choices


@pytest.mark.parametrize("seed", range(60))
def test_a_search_simulates_the_program_that_runs(seed):
    """The unchecked program of a candidate has the memory, byte for byte, of the one that is checked and emitted."""
    task = random_task(seed)
    for traits in (ON_CPU, ON_GPU):
        candidate = simulate_memory(transform(Placer(task)), TrainingSetup(), traits)
        assert candidate == simulate_memory(run(Placer(task)), TrainingSetup(), traits)


@pytest.mark.parametrize("seed", range(60))
def test_every_activation_is_released_once(seed):
    program = read_program(run(Placer(random_task(seed))), TrainingSetup())
    line = MemoryTimeline(program, TrainingSetup(), ON_CPU)
    line.forward()
    line.backward()
    assert line.heap.now[ACTIVATION] == pytest.approx(0.0, abs=SCALARS)
    assert all(refs >= 0 for refs in line.heap.refs)


@pytest.mark.parametrize("seed", range(6))
def test_a_search_simulates_the_stages_that_run(seed):
    """Of a pipeline, too, what a search was told is what the programs of its plan need."""
    analysis, training, cluster = random_analysis(seed), TrainingSetup(compute="bfloat16"), find("4xA100-80GB")
    demands = [{"stages": 2}, {"microbatches": 2}, {"schedule": ("1f1b", "gpipe", "zb")[seed % 3]}]
    result = find_joint(analysis, cluster, training, SearchOptions(constraints=read_constraints(demands)))
    assert result.pipeline is not None
    solved, trial = result.pipeline.solved, result.pipeline.trial
    programs = lower_pipeline(analysis.graph, result.plan, analysis).programs
    stages = [
        simulate_stage_memory(program, training, ON_GPU, queued=item.stage.queued)
        for program, item in zip(programs, solved.solved, strict=True)
    ]
    schedule = trial.schedule.steady(len(trial.pp_ranks), trial.microbatches)
    peaks = tuple(rank_memory(schedule, pp_rank, stages, training) for pp_rank in range(len(trial.pp_ranks)))
    assert peaks == result.pipeline.memory

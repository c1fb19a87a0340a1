"""The timeline of a step: what its peak is made of, and how plans move it."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from shardwright.cost import ON_CPU, ON_GPU, TrainingSetup
from shardwright.lower import LoweredProgram
from shardwright.memory import MemoryPeak, simulate_memory
from shardwright.memory.heap import ACTIVATION
from shardwright.memory.rank_program import read_program
from shardwright.memory.timeline import MemoryTimeline
from shardwright.plan.lowering import lower
from shardwright.plan.request import PlanRequest
from shardwright.planning import make_plan
from shardwright.rules import Analysis
from tests.models.zoo import ZOO

from .kept import analysed

LAYERS, WIDTH, PASS_PARTIAL = 8, 64, 32
WEIGHTS = 4 * LAYERS * WIDTH * WIDTH
VALUE = 4 * PASS_PARTIAL * WIDTH


class Chain(nn.Module):
    """Products and activations in a row: every number of it can be counted by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.sum()


@cache
def chain() -> Analysis:
    return analysed(Chain(), (torch.zeros(PASS_PARTIAL, WIDTH),), {})


@cache
def of_zoo(name: str, batch: int = 4) -> Analysis:
    return analysed(*ZOO[name](batch=batch))


def memory(analysis: Analysis, plan: str, ranks: int, **options) -> MemoryPeak:
    return simulate_memory(
        lowered(analysis, plan, ranks, options.pop("recompute", ())), **{"training": TrainingSetup()} | options
    )


def lowered(analysis: Analysis, plan: str, ranks: int, recompute: tuple[str, ...] = ()) -> LoweredProgram:
    made_plan = make_plan(analysis.graph, analysis, PlanRequest.read(plan), ranks)
    (stage,) = made_plan.entries["train"]
    made_plan = replace(made_plan, entries={"train": (replace(stage, recompute=recompute),)})
    return lower(analysis.graph, made_plan, analysis)


def test_what_persists_is_counted_exactly():
    peak = memory(chain(), "single", 1)
    assert (peak.parameters, peak.optimizer, peak.inputs) == (WEIGHTS, 2 * WEIGHTS, VALUE)


def test_the_parts_make_the_peak():
    peak = memory(chain(), "single", 1)
    assert peak.peak == max(peak.forward, peak.backward, peak.update)
    assert peak.at[1] in ("forward", "backward", "update")


def test_forward_ends_with_one_kept_value_for_each_layer_and_one_product():
    peak = memory(chain(), "single", 1)
    kept = (LAYERS + 1) * VALUE
    assert peak.forward == pytest.approx(peak.parameters + peak.optimizer + peak.inputs + kept, abs=8)


def test_backward_ends_with_all_gradients():
    peak = memory(chain(), "single", 1, training=TrainingSetup(optimizer="sgd"))
    assert peak.update == peak.parameters + peak.inputs + WEIGHTS


def test_an_optimizer_without_state_has_none():
    assert memory(chain(), "single", 1, training=TrainingSetup(optimizer="sgd")).optimizer == 0
    assert memory(chain(), "single", 1, training=TrainingSetup(optimizer="momentum")).optimizer == WEIGHTS


@pytest.mark.parametrize(("level", "parameters", "optimizer"), [(1, 1, 1), (2, 1, 1), (3, 0.5, 1)])
def test_zero_splits_what_it_says(level, parameters, optimizer):
    peak = memory(chain(), f"zero{level}=2", 2)
    assert peak.parameters == parameters * WEIGHTS
    assert peak.optimizer == optimizer * WEIGHTS


def test_each_level_of_zero_needs_less_before_the_next():
    forward = [memory(chain(), plan, 2).forward for plan in ("dp=2", "zero1=2", "zero2=2")]
    assert forward == sorted(forward, reverse=True)
    assert len(set(forward)) == 3


def test_gradients_in_buckets_are_there_in_forward_too():
    alone, replicas = memory(chain(), "single", 1), memory(chain(), "dp=2", 2)
    activations = alone.forward - alone.parameters - alone.optimizer - alone.inputs
    assert replicas.forward == pytest.approx(replicas.parameters * 4 + replicas.inputs + activations / 2, abs=16)


def test_accumulating_gradients_costs_their_memory_in_forward():
    once, often = memory(chain(), "single", 1), memory(chain(), "single", 1, training=TrainingSetup(accumulate=2))
    assert often.forward == once.forward + WEIGHTS


def test_half_precision_halves_what_is_kept():
    single, half = (
        memory(chain(), "single", 1),
        memory(chain(), "single", 1, training=TrainingSetup(compute="bfloat16")),
    )
    assert half.parameters == single.parameters
    kept = [peak.forward - peak.parameters - peak.optimizer for peak in (half, single)]
    assert kept[0] < 0.6 * kept[1]


def test_on_a_gpu_the_optimizer_has_a_temporary_for_every_parameter():
    cpu, gpu = memory(chain(), "single", 1), memory(chain(), "single", 1, traits=ON_GPU)
    assert cpu.update == 4 * WEIGHTS + VALUE  # a fused kernel has none
    assert gpu.update == 5 * WEIGHTS + VALUE
    others = memory(chain(), "single", 1, training=TrainingSetup(optimizer="rmsprop"))
    assert others.update == 3 * WEIGHTS + VALUE + 2 * WEIGHTS / LAYERS


def test_modules_that_are_recomputed_keep_what_goes_in():
    analysis = of_zoo("gpt", 64)
    plain = memory(analysis, "single", 1)
    again = memory(analysis, "single", 1, recompute=("blocks.0", "blocks.1"))
    assert again.forward < 0.75 * plain.forward
    assert again.peak < plain.peak


def test_a_models_own_checkpoints_are_the_same_as_recomputing_those_modules():
    written = memory(of_zoo("checkpointed_gpt", 64), "single", 1)
    recomputed = memory(of_zoo("gpt", 64), "single", 1, recompute=("blocks.0", "blocks.1"))
    assert written.peak == pytest.approx(recomputed.peak, rel=0.01)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "sp=2", "zero3=2"])
@pytest.mark.parametrize("name", ["gpt", "dropout_gpt", "resnet", "hf_t5", "checkpointed_gpt"])
def test_nothing_is_left_over_after_a_step(name, plan):
    """Every storage of an activation is released once, whatever the way through the model."""
    analysis = of_zoo(name)
    program = read_program(lowered(analysis, plan, 2), TrainingSetup())
    line = MemoryTimeline(program, TrainingSetup(), ON_CPU)
    line.forward()
    line.backward()
    inputs = sum(
        tensor.bytes for tensor in program.tensors if tensor.fixed and tensor.gradient and tensor.parameter is None
    )
    assert line.heap.now[ACTIVATION] == pytest.approx(inputs, abs=1)
    assert all(refs >= 0 for refs in line.heap.refs)

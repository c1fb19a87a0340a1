"""What a rank keeps for backward grows with the stages, not with the microbatches, and what was sent is let go."""

import time
import weakref

import pytest
import torch

from shardwright.layout import Mesh, replicated
from shardwright.runtime.algorithms.random import Randomness
from shardwright.runtime.model.program import Program
from shardwright.runtime.pipeline import (
    PipelineLoop,
    PipelineOutput,
    PipelineSpec,
    PlacedStage,
    RunningPipeline,
    StageCrossing,
)
from shardwright.runtime.world import Moment
from shardwright.schedule import forward_only, one_f_one_b
from tests.runtime.ranks import run_processes

from . import chain
from .test_autograd import ready


class Saved:
    """A tensor that autograd keeps, counted as long as it is kept."""

    live = peak = 0

    def __init__(self, tensor):
        self.tensor = tensor
        Saved.live += 1
        Saved.peak = max(Saved.peak, Saved.live)

    def __del__(self):
        Saved.live -= 1


def kept(rank, kind, pp_ranks, counts):
    """The most tensors that autograd kept at a time in a step, for each number of microbatches."""
    collected = []
    for microbatches in counts:
        rows = 3 * microbatches
        built = ready(rank, kind, pp_ranks, microbatches, rows=rows)
        Saved.live = Saved.peak = 0
        with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
            loss = built.running(chain.batch(rows=rows))[0]
        assert Saved.live == 0
        loss.backward()
        collected.append(Saved.peak)
    return collected


@pytest.mark.parametrize("pp_ranks", ["2", "4"])
def test_1f1b_keeps_as_many_microbatches_as_there_are_stages(pp_ranks):
    results = run_processes(int(pp_ranks), kept, "1f1b", pp_ranks, (1, 4, 8, 16))
    for rank, (result, *many) in enumerate(results):
        assert len(set(many)) == 1
        assert many[0] == result * (int(pp_ranks) - rank)


def test_gpipe_keeps_all():
    for result, four, sixteen in run_processes(2, kept, "gpipe", "2", (1, 4, 16)):
        assert (four, sixteen) == (4 * result, 16 * result)


# -- outputs that were sent --------------------------------------------------------------------

WIDE = 1 << 16


class Memory:
    """Counts outputs by their memory, as long as anybody holds on to it."""

    live = peak = 0

    @classmethod
    def count(cls, tensor):
        cls.live += 1
        cls.peak = max(cls.peak, cls.live)
        weakref.finalize(tensor.untyped_storage(), cls.gone)
        return tensor

    @classmethod
    def gone(cls):
        cls.live -= 1


class Wide(Program):
    """Makes something large that its own backward does not need."""

    def forward(self, x):
        return (Memory.count(x[self.mb.index].expand(WIDE) + self.weight),)


class Narrow(Program):
    def forward(self, wide):
        time.sleep(0.005)  # slower than the other
        return (wide[:3].sum() + wide[-3:].sum(),)


def most_at_once(rank, microbatches, training):
    """How many outputs of the first stage there were at a time."""
    moment = Moment(microbatches)
    rest = (None, (), torch.device("cpu"), Randomness(), moment)
    stages = [Wide(*rest), Narrow(*rest)]
    stages[0].weight = torch.zeros((), dtype=torch.float64, requires_grad=True)
    meshes = [Mesh(axes=(), devices=(number,)) for number in range(2)]
    kind = {"dtype": torch.float64, "gradient": True}
    pipeline = PipelineSpec(
        placed=(
            PlacedStage(number=0, mesh=meshes[0], takes=(0,), gives=("wide",), stage=stages[0] if rank == 0 else None),
            PlacedStage(
                number=1, mesh=meshes[1], takes=("wide",), gives=("y",), stage=stages[1] if rank == 1 else None
            ),
        ),
        crossings=(
            StageCrossing(
                value="wide",
                sender=0,
                receiver=1,
                shape=(WIDE,),
                source_layout=replicated(1),
                target_layout=replicated(1),
                **kind,
            ),
        ),
        leaving=(PipelineOutput(value="y", stage=1, how="sum", shape=(), **kind),),
        schedule=one_f_one_b(2, microbatches),
        forward=forward_only(2, microbatches),
        moment=moment,
    )
    running = RunningPipeline(pipeline, PipelineLoop())
    with torch.set_grad_enabled(training):
        y = running((torch.arange(microbatches, dtype=torch.float64),))[0]
    assert y.item() == 6 * sum(range(microbatches))
    assert Memory.live == 0
    return Memory.peak


@pytest.mark.parametrize("training", [True, False])
def test_what_was_sent_is_let_go(training):
    most, _ = run_processes(2, most_at_once, 40, training)
    assert most <= 5

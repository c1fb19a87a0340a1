"""A spread of programs is emitted, each read back and compared: calls, reshards, loops; and faults of the emitter."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.capture import capture
from shardwright.compile import copy_to_meta
from shardwright.emit import emit
from shardwright.errors import LoweringError
from shardwright.ir import Graph
from shardwright.lower import LoweredProgram
from shardwright.plan import build_plan, parse_plan_string
from shardwright.plan.lowering import lower, lower_pipeline
from shardwright.plan.pipeline import build_pipeline
from shardwright.rules import Analysis, analyse
from tests.faults.emitter import EMITTER
from tests.faults.fault import Fault
from tests.faults.room import changed_emitter
from tests.plan.graphs import analysis_of, graph_of


class Many(nn.Module):
    """Calls that print in ways of their own, none with the arguments that are the default."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8, padding_idx=3)
        self.up = nn.ConvTranspose2d(4, 4, 2, stride=2, output_padding=1, dilation=2)
        self.conv = nn.Conv2d(4, 4, 3, padding=1, groups=2, bias=False)
        self.norm = nn.LayerNorm(8, eps=1e-3, bias=False)
        self.mix = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.25)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("variance", torch.ones(4))

    def forward(self, ids: Tensor, x: Tensor, y: Tensor) -> Tensor:
        rows = self.norm(self.table(ids))
        with torch.no_grad():
            rows = rows * self.mix(x).relu()
        rows = rows + torch.rand_like(rows) + x[:, 2].unsqueeze(1)
        rows = torch.sub(rows, x, alpha=3) + x[:, 1:, ::2].mean(1, keepdim=True).repeat(1, 4, 2)
        first, second = self.mix(rows).split((3, 5), -1)
        rows = torch.cat([second.transpose(1, 2).transpose(1, 2), first], 2) / 7
        left, right = rows.chunk(2, 2)
        rows = torch.stack([left, right], 2).permute(0, 2, 1, 3).sum(2)
        heads = rows.unsqueeze(1).expand(-1, 2, -1, -1)
        heads = F.scaled_dot_product_attention(heads, heads, heads.roll(1, 2), is_causal=True, scale=0.3)
        picture = F.pad(self.drop(heads).reshape(-1, 1, 4, 4).expand(-1, 4, -1, -1), (1, 0, 0, 1), value=0.5)
        picture = F.batch_norm(self.conv(picture), self.mean, self.variance, training=True, momentum=0.2)
        picture = F.gelu(picture, approximate="tanh").clamp(min=-1.0, max=2.0)
        picture = torch.where(picture > 0.1, picture, -(picture**2))
        picture = self.up(picture[..., 1:, :]).softmax(2)
        scores = torch.einsum("bchw,bkhw->bck", picture, picture).flatten(1)[:, :6]
        smooth = F.cross_entropy(scores, y, label_smoothing=0.1, ignore_index=2)
        plain = F.cross_entropy(scores, y, reduction="sum")
        distance = F.mse_loss(scores, scores.cumsum(1), reduction="sum")
        return smooth + plain + distance + torch.addmm(scores, scores, scores.t() @ scores, beta=0.5, alpha=2).sum()


class Largest(nn.Module):
    """A number without a gradient that all rows decide: each rank has the largest of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        return (x * self.scale / n.amax()).sum()


def graph_and_facts(name: str) -> tuple[Graph, Analysis]:
    """Of a model above, or of one of the zoo."""
    if name == "many":
        args = (torch.randint(0, 12, (4, 4)), torch.randn(4, 4, 8), torch.randint(0, 6, (4,)))
        graph = capture(copy_to_meta(Many()), args, {}).graph
    elif name == "largest":
        graph = capture(copy_to_meta(Largest()), (torch.randn(4, 6), torch.arange(8).view(4, 2)), {}).graph
    else:
        return graph_of(name, 4), analysis_of(name, 4)
    return graph, analyse(graph)


@lru_cache
def programs(name: str, plan: str) -> tuple[LoweredProgram, ...]:
    """What a plan makes of a model."""
    graph, analysis = graph_and_facts(name)
    request = parse_plan_string(plan)
    if request.stages:
        return lower_pipeline(graph, build_pipeline(graph, request, analysis, "", 2), analysis).programs
    return (lower(graph, build_plan(graph, request, analysis), analysis),)


SPREAD = (
    ("many", "single"),
    ("largest", "dp=2"),
    ("gpt", "dp=2,tp=2"),
    ("gpt", "sp=2"),
    ("gpt_odd_vocab", "tp=2"),
    ("dropout_gpt", "dp=2,tp=2"),
    ("gpt", "zero3=2,recompute"),
    ("resnet", "dp=2"),
    ("autocast_mlp", "tp=2"),
    ("gpt_ignore", "pp=2,dp=2"),
)


@pytest.mark.parametrize(("name", "plan"), SPREAD)
def test_what_is_emitted_is_read_back(name: str, plan: str) -> None:
    for program in programs(name, plan):
        emitted = emit(program)
        assert f"class {emitted.class_name}(Program):" in emitted.text


def test_the_largest_of_all_ranks_is_asked_for_by_name() -> None:
    (program,) = programs("largest", "dp=2")
    assert 'comm.all_reduce(amax, self.dp, op="max")' in emit(program).text


@pytest.mark.parametrize("fault", EMITTER, ids=str)
def test_a_fault_of_the_emitter_is_refused_when_a_model_is_compiled(fault: Fault) -> None:
    every = [program for name, plan in SPREAD for program in programs(name, plan)]
    with changed_emitter(fault.file, fault.text) as emitter, pytest.raises(LoweringError):
        any(emitter.emit(program) is None for program in every)  # one after the other, up to the first that is refused

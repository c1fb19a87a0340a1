"""What all microbatches need: found before the first where inputs alone decide it, refused where they do not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright.errors import LoweringError
from shardwright.lower import LoweredProgram
from shardwright.plan.request import PlanRequest
from shardwright.plan.search_options import SearchOptions
from shardwright.runtime import SplitDim
from shardwright.runtime.collectives import comm
from shardwright.verify import compile_program

PASS_PARTIAL = 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))

    def net(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x).tanh()).tanh())

    def rows(self, x: Tensor) -> Tensor:
        return self.net(x).square().mean(1)


def x(**options) -> Tensor:
    return torch.randn(PASS_PARTIAL, 6, **options)


def programs_of(
    module: nn.Module, *args: Tensor, plan: str = "single", microbatches: int = 4
) -> tuple[LoweredProgram, ...]:
    size = 1 if plan == "single" else 2
    request = PlanRequest.read(plan, options=SearchOptions(microbatches=microbatches))
    return compile_program(module, args, {}, request, size).programs


def early_of(module: nn.Module, *args: Tensor, plan: str = "single") -> list[tuple[str, tuple[str, ...]]]:
    """How each value of the prologue is reduced, and over which axes of devices."""
    return [(value.how, value.axes) for program in programs_of(module, *args, plan=plan) for value in program.early]


class Masked(Net):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return (self.rows(x) * mask).sum() / mask.sum()


class Clamped(Net):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return (self.rows(x) * mask).sum() / mask.sum().clamp(min=1)


class Scaled(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.rows(x / x.abs().max()).mean()


class Centred(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.rows(x - x.mean(0, keepdim=True)).mean()


class Counted(Net):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), target)


class Checkpointed(Net):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.scaled, x, use_reentrant=False).mean()

    def scaled(self, x: Tensor) -> Tensor:
        return self.rows(x / x.abs().max())


@pytest.mark.parametrize("plan", ["single", "pp=2", "dp=2"])
@pytest.mark.parametrize(
    ("net", "more", "how"),
    [
        (Masked, (torch.ones(PASS_PARTIAL),), "sum"),
        (Clamped, (torch.ones(PASS_PARTIAL),), "sum"),
        (Scaled, (), "max"),
        (Centred, (), "sum"),
        (Counted, (torch.zeros(PASS_PARTIAL, dtype=torch.long),), "sum"),
    ],
)
def test_what_inputs_alone_decide_is_found_before_the_first_microbatch(net, more, how, plan):
    axes = ("dp",) if plan == "dp=2" else ()

    assert early_of(net(), x(), *more, plan=plan) == [(how, axes)]


def test_a_prologue_asks_for_the_inputs_that_it_needs_and_forward_does_without_its_ops():
    (program,) = programs_of(Masked(), x(), torch.ones(PASS_PARTIAL))

    assert [value.path for value in program.prologue_inputs] == ["mask"]
    assert [op.target for op in program.prologue] == ["comm.shard", "aten.sum.default"]
    makers = {name: op for op in program.body for name in op.outputs}
    (division,) = (op for op in program.body if op.target == "aten.div.Tensor")
    assert program.early[0].value == division.inputs[1]
    assert program.early[0].value not in makers
    assert sum(op.target == "aten.sum.default" for op in program.body) == 1, "that of the losses"


def test_without_microbatches_there_is_none():
    (program,) = programs_of(Masked(), x(), torch.ones(PASS_PARTIAL), microbatches=1)

    assert not program.early and not program.prologue


class Weighted(Net):
    """The divisor has parameters in it."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.a(x).sigmoid().mean(1)
        return (self.rows(x) * weight).sum() / weight.sum()


class Standardized(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.rows(h / h.std(0)).mean()


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.rows(self.norm(x)).mean()


def centred_over_ranks(h: Tensor, part: SplitDim) -> Tensor:
    total = comm.replicate(comm.all_reduce(h.sum(0), part.group), part.group)
    return h - total / part.size


@sw.register_op("n=centred d -> n d", algorithms={"n": centred_over_ranks})
def centred(h: Tensor) -> Tensor:
    return h - h.mean(0)


class CustomAlgorithm(Net):
    """The algorithm of a custom op communicates over the batch dim."""

    def forward(self, x: Tensor) -> Tensor:
        return self.rows(centred(self.a(x))).mean()


class Contrastive(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.net(x)
        return F.cross_entropy(h @ h.T, torch.arange(PASS_PARTIAL))


class Middle(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.rows(x).median()


@pytest.mark.parametrize("plan", ["single", "pp=2"])
@pytest.mark.parametrize(
    ("net", "op"),
    [
        (Weighted, "/ div (aten.div.Tensor)"),
        (Standardized, "/ std (aten.std"),
        (Normed, "norm / _native_batch_norm_legit_functional"),
        (CustomAlgorithm, "/ centred"),
        (Contrastive, "/ matmul"),
        (Middle, "/ median (aten.median.default)"),
        (Checkpointed, "/ div (aten.div.Tensor)"),
    ],
)
def test_what_would_have_to_see_other_microbatches_is_refused_with_its_line_and_two_ways_out(net, op, plan):
    with pytest.raises(LoweringError) as error:
        programs_of(net(), x(), plan=plan)

    message = str(error.value)
    assert op in message and "test_prologue.py:" in message
    assert "microbatches=1" in message and 'semantics="local"' in message


def test_gradients_that_would_go_back_to_inputs_are_not_lost():
    """The mean of an input that wants a gradient hands one back to every row, in all microbatches."""
    with pytest.raises(LoweringError, match="/ sub"):
        programs_of(Centred(), x(requires_grad=True))

"""What an op's arguments become on a rank: slices and sections of split dims, keys of random ops, losses."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.capture import capture
from shardwright.errors import LoweringError
from shardwright.ir import Op
from shardwright.layout import Block, Shard
from shardwright.lower import LoweredProgram, Size
from shardwright.ops.localizing import one_cut
from shardwright.plan import build_plan, parse_plan_string
from shardwright.plan.lowering import lower
from shardwright.rules import analyse
from tests.parity.threaded import compare


class Halves(nn.Module):
    """One product, cut in halves by slices, in sections by a split, and again by a negative start."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        both = self.up(x)
        gated = both[..., 8:] * both[..., :8].tanh() + both[..., -8:]
        first, two = self.up(x).split(8, -1)
        return self.down(gated + first * two[..., :].exp()).square().sum()


def program_of(module: nn.Module, args: tuple[Tensor, ...], plan: str) -> LoweredProgram:
    graph = capture(module, args, {}).graph
    analysis = analyse(graph)
    return lower(graph, build_plan(graph, parse_plan_string(plan), analysis), analysis)


def first(program: LoweredProgram, target: str) -> list[Op]:
    return [op for op in program.body if op.target == target]


def local(size: object, parts: int) -> int:
    """The number that a size is on the first rank."""
    if not isinstance(size, Size):
        return int(size)  # type: ignore[call-overload]
    total = 0
    for section in size.sections:
        product = 1
        for factor in section:
            product *= factor.size // (parts if factor.axes else 1)
        total += product
    return total


def test_one_of_equal_parts_keeps_its_place_among_the_parts() -> None:
    program = program_of(Halves(), (torch.randn(4, 6),), "tp=2")

    spans = [(local(op.argument("start") or 0, 2), op.argument("end")) for op in first(program, "aten.slice.Tensor")]

    assert [(start, None if end is None else local(end, 2)) for start, end in spans] == [(4, None), (0, 4), (4, None)]


@pytest.mark.parametrize("plan", ["tp=2", "dp=2", "single"])
def test_slices_and_sections_of_a_split_dim_are_those_of_one_device(plan: str) -> None:
    compare(Halves(), (torch.randn(4, 6),), plan)


class Sections(nn.Module):
    """Sections of a dim that no axis cuts, of a value whose rows an axis cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(7))

    def forward(self, x: Tensor) -> Tensor:
        few, many = (x * self.scale).split((2, 5), 1)
        return (few.sum(1) * many.square().mean(1)).sum()


def test_sections_have_the_sizes_of_their_dim() -> None:
    (split,) = first(program_of(Sections(), (torch.randn(4, 7),), "dp=2"), "aten.split_with_sizes.default")
    assert tuple(local(size, 2) for size in split.argument("split_sizes")) == (2, 5)
    compare(Sections(), (torch.randn(4, 7),), "dp=2")


class Grouped(nn.Module):
    """Groups of channels that are made of two atoms, of which an axis takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 6)
        self.conv = nn.Conv1d(16, 16, 1, groups=4)

    def forward(self, x: Tensor) -> Tensor:
        halves = self.up(x).view(-1, 2, 8).tanh()
        return self.down(self.conv(halves.reshape(-1, 16, 1)).flatten(1)).square().sum()


def test_a_rank_has_its_share_of_the_groups_of_a_convolution() -> None:
    (conv,) = first(program_of(Grouped(), (torch.randn(4, 6),), "tp=2"), "aten.conv1d.default")
    ((outer, inner),) = conv.argument("groups").sections
    assert [(factor.size, factor.axes) for factor in (outer, inner)] == [(2, ("tp",)), (2, ())]
    compare(Grouped(), (torch.randn(4, 6),), "tp=2")


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(F.dropout(self.up(x), 0.3), 0.3).sum()


def test_every_dropout_has_a_key_of_its_own_and_the_cuts_of_its_value() -> None:
    left, two = first(program_of(Dropped(), (torch.randn(4, 6),), "dp=2"), "runtime.dropout")
    assert left.argument("op_key") != two.argument("op_key")
    assert [(dim, cut.axis) for dim, cut in left.argument("splits")] == [(0, "dp")]


class Losses(nn.Module):
    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.up, self.reduction = nn.Linear(6, 5), reduction

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.up(x)
        distance = F.mse_loss(logits, logits.detach().roll(1, 1), reduction=self.reduction)
        return F.cross_entropy(logits, y, reduction=self.reduction).sum() + distance.sum()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
def test_losses_of_split_rows_are_those_of_the_batch(reduction: str, plan: str) -> None:
    compare(Losses(reduction), (torch.randn(4, 6), torch.randint(0, 5, (4,))), plan)


@pytest.mark.parametrize(("reduction", "plan"), [("mean", "single"), ("sum", "dp=2"), ("none", "dp=2")])
def test_a_loss_stays_torchs_own_where_nothing_is_counted_over_ranks(reduction: str, plan: str) -> None:
    program = program_of(Losses(reduction), (torch.randn(4, 6), torch.randint(0, 5, (4,))), plan)
    assert len(first(program, "aten.cross_entropy_loss.default")) == 1


def test_cuts_that_are_not_one_after_the_other_are_refused_with_a_remedy() -> None:
    program = program_of(Sections(), (torch.randn(4, 7),), "dp=2,tp=2")
    cuts = [Shard(axis="dp", blocks=(Block(2, 4, 3),)), Shard(axis="tp", blocks=(Block(1, 5, 1),))]
    with pytest.raises(LoweringError, match="split them on one axis"):
        one_cut(program, program.body[0], "classes", cuts)

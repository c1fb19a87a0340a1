"""Losses over split rows and split classes against torch on the whole batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.errors import InputError, LayoutError
from shardwright.layout import Axis, Block, Mesh, Shard, chunk_bounds
from shardwright.runtime.algorithms import losses
from shardwright.runtime.collectives import blocks, comm
from shardwright.runtime.world import Groups
from tests.runtime.ranks import run_ranks


@dataclass(frozen=True)
class Case:
    """One batch, its options, and how it is split: rows over dp, classes over tp."""

    options: dict[str, Any]
    dp: int = 2
    tp: int = 2
    rows: int = 8
    classes: int = 12
    inner: tuple[int, ...] = ()
    sharding: Shard | None = None
    weighted: bool = False
    ignored: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float64

    def data(self) -> tuple[Tensor, Tensor, Tensor | None]:
        generator = torch.Generator().manual_seed(7)
        logits = torch.randn(self.rows, self.classes, *self.inner, generator=generator, dtype=torch.float64) * 4
        target = torch.randint(self.classes, (self.rows, *self.inner), generator=generator)
        target[list(self.ignored)] = self.options.get("ignore_index", -100)
        weight = torch.rand(self.classes, generator=generator, dtype=torch.float64) if self.weighted else None
        return logits.to(self.dtype), target, weight if weight is None else weight.to(self.dtype)


def on_ranks(rank: int, case: Case) -> tuple[Tensor, Tensor, list[str]]:
    mesh = Mesh(axes=(Axis(name="dp", size=case.dp), Axis(name="tp", size=case.tp)))
    groups = Groups(mesh)
    dp, tp = groups["dp"], groups["tp"]
    logits, target, weight = case.data()
    start, length = chunk_bounds(case.rows, dp.size, dp.index)
    mine = logits.narrow(0, start, length)
    if case.tp > 1:
        mine = blocks.shard(mine, 1, case.sharding or blocks.plain(case.classes), tp.size, tp.index)
    mine = mine.clone().requires_grad_()
    with comm.recording() as issued:
        loss = losses.cross_entropy(
            mine,
            target.narrow(0, start, length),
            samples=dp,
            classes=tp if case.tp > 1 else None,
            sharding=case.sharding,
            size=case.classes,
            weight=weight,
            **case.options,
        )
        if loss.ndim:
            loss.sum().backward()
        else:
            loss.backward()
    assert mine.grad is not None
    return loss.detach(), mine.grad, [kind for kind, _, _ in issued]


def on_one(case: Case) -> tuple[Tensor, Tensor]:
    logits, target, weight = case.data()
    logits.requires_grad_()
    loss = F.cross_entropy(logits, target, weight, **case.options)
    loss.sum().backward()
    assert logits.grad is not None
    return loss.detach(), logits.grad


def assert_parity(case: Case, tolerance: float = 1e-12) -> None:
    results = run_ranks(case.dp * case.tp, on_ranks, case)
    loss, gradient = on_one(case)

    shares = [results[at * case.tp][0] for at in range(case.dp)]
    actual = torch.cat(shares) if loss.ndim else torch.stack(shares).sum(0)
    torch.testing.assert_close(actual, loss, rtol=0, atol=tolerance, equal_nan=True)
    for rank, (share_of_loss, dx, _) in enumerate(results):
        torch.testing.assert_close(share_of_loss, shares[rank // case.tp], rtol=0, atol=0, equal_nan=True)
        start, length = chunk_bounds(case.rows, case.dp, rank // case.tp)
        expected = gradient.narrow(0, start, length)
        if case.tp > 1:
            expected = blocks.shard(expected, 1, case.sharding or blocks.plain(case.classes), case.tp, rank % case.tp)
        torch.testing.assert_close(dx, expected, rtol=0, atol=tolerance, equal_nan=True)


def penalty(loss: Tensor, x: Tensor) -> Tensor:
    """The gradient of the squared gradient."""
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    return second


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2}, {"reduction": "sum"}], ids=str)
def test_split_classes_have_the_second_derivative_of_the_whole(options: dict[str, Any]) -> None:
    case = Case(options, dp=1, tp=2, weighted=True, ignored=(1,))

    def body(rank: int) -> Tensor:
        tp = Groups(Mesh(axes=(Axis(name="tp", size=2),)))["tp"]
        logits, target, weight = case.data()
        mine = blocks.shard(logits, 1, blocks.plain(case.classes), 2, tp.index).clone().requires_grad_()
        loss = losses.cross_entropy(mine, target, classes=tp, size=case.classes, weight=weight, **options)
        return penalty(loss, mine)

    logits, target, weight = case.data()
    logits.requires_grad_()
    wanted = penalty(F.cross_entropy(logits, target, weight, **options), logits)
    torch.testing.assert_close(torch.cat(run_ranks(2, body), 1), wanted, rtol=0, atol=1e-12)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"label_smoothing": 0.1},
    {"label_smoothing": 0.3, "reduction": "sum"},
    {"ignore_index": 3},
]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (1, 3), (2, 2), (3, 1)])
def test_cross_entropy_is_the_one_of_the_whole_batch(dp: int, tp: int, options: dict[str, Any], weighted: bool) -> None:
    assert_parity(Case(options, dp=dp, tp=tp, weighted=weighted, ignored=(0, 5, 6)))


def test_a_rank_with_nothing_but_ignored_labels() -> None:
    assert_parity(Case({}, dp=2, tp=2, ignored=(0, 1, 2, 3)))
    assert_parity(Case({"label_smoothing": 0.1}, dp=4, tp=1, ignored=(0, 1, 4), weighted=True))


def test_no_label_at_all_is_not_a_number_as_in_torch() -> None:
    case = Case({}, dp=2, tp=2, ignored=tuple(range(8)))
    assert run_ranks(4, on_ranks, case)[0][0].isnan()
    assert on_one(case)[0].isnan()


def test_uneven_rows_and_more_target_dims() -> None:
    assert_parity(Case({}, dp=3, rows=7, ignored=(1,)))
    assert_parity(Case({"label_smoothing": 0.2}, inner=(3, 2), weighted=True, ignored=(0, 1)))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_classes_cut_unevenly_in_blocks_and_with_an_empty_shard(smoothing: float) -> None:
    options = {"label_smoothing": smoothing}
    uneven = Shard(axis="tp", blocks=(Block(1, 11, 1),))
    empty = Shard(axis="tp", blocks=(Block(1, 2, 5),))
    sections = Shard(axis="tp", blocks=(Block(2, 3, 1), Block(1, 3, 2)))
    assert_parity(Case(options, dp=1, tp=3, classes=11, sharding=uneven, weighted=True))
    assert_parity(Case(options, dp=1, tp=4, classes=10, sharding=empty, weighted=True))
    assert_parity(Case(options, dp=2, tp=2, classes=12, sharding=sections))


def test_half_precision_over_split_classes_is_as_good_as_torch() -> None:
    assert_parity(Case({}, dtype=torch.bfloat16), tolerance=2e-2)


def test_split_classes_reduce_twice_and_never_gather() -> None:
    results = run_ranks(4, on_ranks, Case({}))
    assert results[0][2] == ["all_reduce"] * 3  # max, sums; the count over dp


def one_row(rank: int) -> Tensor:
    tp = Groups(Mesh(axes=(Axis(name="tp", size=2),)))["tp"]
    logits = torch.arange(6.0, dtype=torch.float64)
    return losses.cross_entropy(comm.shard(logits, 0, tp), torch.tensor(4), classes=tp)


def test_one_row_without_a_batch_dim() -> None:
    expected = F.cross_entropy(torch.arange(6.0, dtype=torch.float64), torch.tensor(4))
    for loss in run_ranks(2, one_row):
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)


def probabilities(rank: int, logits: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    dp = Groups(Mesh(axes=(Axis(name="dp", size=2),)))["dp"]
    with pytest.raises(InputError, match="class probabilities"):
        losses.cross_entropy(logits, target, classes=dp)
    mine = slice(0, 4) if rank == 0 else slice(4, 5)
    return losses.cross_entropy(logits[mine], target[mine], samples=dp, weight=weight, label_smoothing=0.1)


def test_class_probabilities_over_split_rows() -> None:
    logits = torch.randn(5, 3, dtype=torch.float64)
    target = torch.rand(5, 3, dtype=torch.float64)
    weight = torch.rand(3, dtype=torch.float64)

    shares = run_ranks(2, probabilities, logits, target, weight)

    expected = F.cross_entropy(logits, target, weight, label_smoothing=0.1)
    torch.testing.assert_close(sum(shares), expected, rtol=0, atol=1e-12)


def negative_log(rank: int, logp: Tensor, target: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    dp = Groups(Mesh(axes=(Axis(name="dp", size=2),)))["dp"]
    mine = logp[rank * 3 : rank * 3 + 3].clone().requires_grad_()
    loss = losses.nll_loss(mine, target[rank * 3 : rank * 3 + 3], samples=dp, weight=weight)
    loss.backward()
    assert mine.grad is not None
    return loss.detach(), mine.grad


@pytest.mark.parametrize("weighted", [False, True])
def test_nll_loss_over_split_rows(weighted: bool) -> None:
    logp = torch.randn(6, 4, dtype=torch.float64).log_softmax(1).requires_grad_()
    target = torch.tensor([0, -100, -100, 3, 1, -100])
    weight = torch.rand(4, dtype=torch.float64) if weighted else None

    results = run_ranks(2, negative_log, logp.detach(), target, weight)

    expected = F.nll_loss(logp, target, weight)
    expected.backward()
    torch.testing.assert_close(sum(loss for loss, _ in results), expected.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.cat([dx for _, dx in results]), logp.grad, rtol=0, atol=1e-12)


def whole_mean(rank: int, ignored: tuple[int, ...], weighted: bool, smoothing: float) -> tuple[Tensor, Tensor, list]:
    case = Case(options={"label_smoothing": smoothing}, tp=1, ignored=ignored, weighted=weighted)
    dp = Groups(Mesh(axes=(Axis(name="dp", size=2),)))["dp"]
    logits, target, weight = case.data()
    start, length = chunk_bounds(case.rows, 2, dp.index)
    mine = logits.narrow(0, start, length).clone().requires_grad_()
    with comm.recording() as issued:
        actual = losses.cross_entropy(
            mine, target.narrow(0, start, length), samples=dp, weight=weight, reduced=True, **case.options
        )
    (3 * actual).backward()
    return actual.detach(), mine.grad, issued


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ignored", [(), (0, 1, 2), (0, 1, 2, 3)])
def test_the_mean_itself_takes_one_collective(ignored, weighted, smoothing) -> None:
    case = Case(options={"label_smoothing": smoothing}, tp=1, ignored=ignored, weighted=weighted)
    expected, gradient = on_one(case)

    ranks = run_ranks(2, whole_mean, ignored, weighted, smoothing)

    assert all([kind for kind, _, _ in issued] == ["all_reduce"] for _, _, issued in ranks)
    for rank, _, _ in ranks:
        torch.testing.assert_close(rank, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(torch.cat([value for _, value, _ in ranks]), 3 * gradient, rtol=1e-13, atol=1e-15)


def test_a_count_may_be_given_for_many_microbatches() -> None:
    logits, target, _ = Case({}, ignored=(0, 5)).data()
    count = losses.count_labels(target)

    shares = [losses.cross_entropy(logits[i : i + 2], target[i : i + 2], count=count) for i in range(0, 8, 2)]

    torch.testing.assert_close(sum(shares), F.cross_entropy(logits, target), rtol=0, atol=1e-12)


def test_a_large_sum_fits_though_the_dtype_is_half() -> None:
    logits = torch.full((9000, 2), 0.0, dtype=torch.float16)
    logits[:, 1] = 30
    loss = losses.cross_entropy(logits, torch.zeros(9000, dtype=torch.long))
    assert loss.dtype is torch.float16
    assert loss.item() == 30


def misfit(rank: int) -> None:
    tp = Groups(Mesh(axes=(Axis(name="tp", size=2),)))["tp"]
    with pytest.raises(LayoutError, match="holds 3 of 7 classes"):
        losses.cross_entropy(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long), classes=tp, size=7)
    with pytest.raises(RuntimeError, match="a target is not in 6 classes"):
        losses.cross_entropy(torch.zeros(2, 3), torch.tensor([0, 6]), classes=tp)


def test_what_does_not_fit_is_refused() -> None:
    run_ranks(2, misfit)

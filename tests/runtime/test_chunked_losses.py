"""A linear and its cross entropy in chunks of rows, against torch on the whole batch and the whole logits."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.errors import InputError, LayoutError
from shardwright.layout import Axis, Block, Mesh, Shard, chunk_bounds
from shardwright.runtime.algorithms.chunked_losses import STEPS, linear_cross_entropy, logsumexp
from shardwright.runtime.collectives import blocks, comm
from shardwright.runtime.world import Groups
from tests.runtime.ranks import run_ranks

F64 = torch.float64


@dataclass(frozen=True)
class Case:
    """One batch, how its loss is taken, and how it is split: rows over dp, classes over tp."""

    chunks: int = 3
    dp: int = 1
    tp: int = 1
    shape: tuple[int, ...] = (10,)
    width: int = 5
    classes: int = 12
    options: dict[str, Any] = field(default_factory=dict)
    steps: tuple[tuple[Any, ...], ...] = ()
    slices: tuple[tuple[int, int, int, int], ...] = ()
    bias: bool = False
    weighted: bool = False
    z_loss: str | None = None
    ignored: float = 0.0
    sharding: Shard | None = None
    seed: int = 0

    def data(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        x = torch.randn(*self.shape, self.width, generator=generator, dtype=F64) * 2
        rows = x[self.rows()].shape[:-1]
        target = torch.randint(self.classes, rows, generator=generator)
        dropped = torch.rand(rows, generator=generator) < self.ignored
        return {
            "x": x,
            "weight": torch.randn(self.classes, self.width, generator=generator, dtype=F64),
            "bias": torch.randn(self.classes, generator=generator, dtype=F64),
            "target": target.masked_fill(dropped, self.options.get("ignore_index", -100)),
            "class_weight": torch.rand(self.classes, generator=generator, dtype=F64),
            "of_loss": torch.randn(rows, generator=generator, dtype=F64),
        }

    def rows(self) -> tuple[slice, ...]:
        index = [slice(None)] * len(self.shape)
        for dim, start, end, step in self.slices:
            index[dim] = slice(start, end, step)
        return tuple(index)


def total(case: Case, loss: Tensor, lse: Tensor | None, data: dict[str, Tensor], all_rows: int) -> Tensor:
    """A number of all that comes out, with another gradient for each row, and a loss scale."""
    loss = (loss * data["of_loss"].view(loss.shape)).sum() if loss.ndim else loss
    return 3.0 * (loss if lse is None else loss + 0.1 * lse.square().sum() / all_rows)


def on_one(case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    data = case.data()
    leaves = {name: data[name].requires_grad_() for name in ("x", "weight", *(["bias"] if case.bias else []))}
    logits = F.linear(data["x"], data["weight"], leaves.get("bias"))[case.rows()]
    for name, *arguments in case.steps:
        logits = STEPS[name](logits, *arguments)
    flat = logits.reshape(-1, case.classes)
    weight = data["class_weight"] if case.weighted else None
    loss = F.cross_entropy(flat, data["target"].reshape(-1), weight, **case.options)
    lse = torch.logsumexp(flat, -1) if case.z_loss else None
    result = total(case, loss, lse, data, len(flat))
    result.backward()
    return result.detach(), {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def on_ranks(rank: int, case: Case) -> tuple[Tensor, dict[str, Tensor], list[str]]:
    groups = Groups(Mesh(axes=(Axis(name="dp", size=case.dp), Axis(name="tp", size=case.tp))))
    dp, tp = groups["dp"], groups["tp"]
    data = case.data()
    everything = data["target"].numel()
    start, length = chunk_bounds(case.shape[0], dp.size, dp.index)
    for name in ("x", "target", "of_loss"):
        data[name] = data[name].narrow(0, start, length)
    sharding = case.sharding or blocks.plain(case.classes)
    for name in ("weight", "bias"):
        data[name] = blocks.shard(data[name], 0, sharding, tp.size, tp.index)
    leaves = {name: data[name].clone().requires_grad_() for name in ("x", "weight", *(["bias"] if case.bias else []))}
    with comm.recording() as issued:
        result = linear_cross_entropy(
            leaves["x"], leaves["weight"], data["target"], bias=leaves.get("bias"), chunks=case.chunks,
            slices=case.slices, steps=case.steps, logsumexp=case.z_loss, samples=dp if case.dp > 1 else None,
            classes=tp if case.tp > 1 else None, size=case.classes,
            sharding=sharding if case.sharding or case.classes % case.tp else None,
            class_weight=data["class_weight"] if case.weighted else None, **case.options,
        )  # fmt: skip
    loss, lse = result if isinstance(result, tuple) else (result, None)
    own = total(case, loss, lse, data, everything)
    own.backward()
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return own.detach(), gradients, [kind for kind, _, _ in issued]


def check(case: Case) -> list[list[str]]:
    """Run a case on its ranks and compare the sums over dp and the shards over tp; returns what ranks sent."""
    wanted, of_wanted = on_one(case)
    results = run_ranks(case.dp * case.tp, on_ranks, case)
    sharding = case.sharding or blocks.plain(case.classes)
    for tp in range(case.tp):
        torch.testing.assert_close(sum(results[dp * case.tp + tp][0] for dp in range(case.dp)), wanted, **TIGHT)
    for name, gradient in of_wanted.items():
        if name == "x":  # a sum over the classes, and cut by rows
            parts = [sum(results[dp * case.tp + tp][1]["x"] for tp in range(case.tp)) for dp in range(case.dp)]
            torch.testing.assert_close(torch.cat(parts), gradient, **TIGHT)
        else:
            for tp in range(case.tp):
                summed = sum(results[dp * case.tp + tp][1][name] for dp in range(case.dp))
                torch.testing.assert_close(summed, blocks.shard(gradient, 0, sharding, case.tp, tp), **TIGHT)
    return [sent for _, _, sent in results]


TIGHT: dict[str, Any] = {"rtol": 1e-11, "atol": 1e-12}


def drawn(seed: int) -> Case:
    """A case at random."""
    draw = random.Random(seed)
    dp, tp = draw.choice([(1, 1), (1, 2), (2, 1), (2, 2), (1, 3), (3, 1)])
    shape = draw.choice([(6,), (7, 3), (8, 2), (6, 5), (12, 4)])
    reduction = draw.choice(["mean", "mean", "sum", "none"])
    options: dict[str, Any] = {"reduction": reduction}
    if draw.random() < 0.5:
        options["label_smoothing"] = draw.choice([0.1, 0.5, 1.0])
    if draw.random() < 0.3:
        options["ignore_index"] = draw.choice([0, 3, -1])
    steps = draw.choice([(), (), (("to", "float64"),), (("div", 3.0), ("tanh",), ("mul", 3.0)), (("mul", 0.5),)])
    slices = ((1, draw.choice([0, 1]), shape[1] - draw.choice([0, 1]), 1),) if len(shape) > 1 else ()
    slices = slices if slices and slices[0][1] < slices[0][2] and draw.random() < 0.5 else ()
    return Case(
        chunks=draw.randint(1, 9), dp=dp, tp=tp, shape=shape, classes=draw.choice([6, 12, 13]), options=options,
        steps=steps, slices=slices, bias=draw.random() < 0.5, weighted=draw.random() < 0.4,
        z_loss=draw.choice([None, "rows", "flat"]), ignored=draw.choice([0.0, 0.3]), seed=seed,
    )  # fmt: skip


@pytest.mark.parametrize("block", range(8))
def test_random_calls_are_those_of_torch(block: int) -> None:
    for seed in range(block * 40, (block + 1) * 40):
        check(drawn(seed))


def test_uneven_shards_of_classes() -> None:
    sharding = Shard(axis="tp", blocks=(Block(outer=2, size=3, inner=2),))
    check(Case(tp=2, sharding=sharding, options={"label_smoothing": 0.2}, weighted=True, z_loss="flat"))


def test_all_labels_of_a_rank_are_ignored() -> None:
    check(Case(dp=2, shape=(6,), ignored=0.7, seed=3, options={"label_smoothing": 0.1}))


def test_classes_are_reduced_once_whatever_the_chunks() -> None:
    for chunks in (1, 10):
        sent = check(Case(chunks=chunks, tp=2, options={"reduction": "sum", "label_smoothing": 0.1}))
        assert sent == [["all_reduce", "all_reduce"]] * 2


def test_logits_of_minus_infinity_on_one_rank_only() -> None:
    """A rank all of whose classes are masked must not turn the row into NaN."""
    bias = torch.tensor([-torch.inf] * 3 + [0.0] * 3, dtype=F64)
    x, weight = torch.randn(4, 5, dtype=F64), torch.randn(6, 5, dtype=F64)
    target = torch.tensor([3, 4, 5, 3])

    def run(rank: int) -> Tensor:
        tp = Groups(Mesh(axes=(Axis(name="tp", size=2),)))["tp"]
        own = slice(3 * tp.index, 3 * tp.index + 3)
        result = linear_cross_entropy(x, weight[own], target, chunks=2, bias=bias[own], classes=tp)
        assert isinstance(result, Tensor)
        return result

    wanted = F.cross_entropy(F.linear(x, weight, bias), target)
    for loss in run_ranks(2, run):
        torch.testing.assert_close(loss, wanted)


def test_bfloat16_sums_in_float32() -> None:
    """Chunks of a narrow dtype add up as well as one matmul does: within the rounding of the result."""
    torch.manual_seed(0)
    x, weight = torch.randn(256, 16, dtype=torch.bfloat16), torch.randn(40, 16, dtype=torch.bfloat16)
    target = torch.randint(40, (256,))
    exact = weight.double().requires_grad_()
    F.cross_entropy(F.linear(x.double(), exact), target, reduction="sum").backward()
    assert exact.grad is not None
    errors = []
    for chunks in (1, 32):
        leaf = weight.clone().requires_grad_()
        steps = (("to", "float32"),)
        loss = linear_cross_entropy(x, leaf, target, chunks=chunks, steps=steps, reduction="sum")
        assert isinstance(loss, Tensor) and loss.dtype == torch.float32
        loss.backward()
        assert leaf.grad is not None and leaf.grad.dtype == torch.bfloat16
        errors.append(float((leaf.grad.double() - exact.grad).abs().max()))
    assert errors[1] < 2 * errors[0]


def test_a_gradient_of_a_gradient_is_refused() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    loss = linear_cross_entropy(x, torch.randn(5, 3), torch.tensor([0, 1, 2, 3]), chunks=2)
    assert isinstance(loss, Tensor)
    with pytest.raises(InputError, match="leave chunked_loss out"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_targets_that_are_no_classes_are_refused() -> None:
    x, weight = torch.randn(4, 3), torch.randn(5, 3)
    with pytest.raises(RuntimeError, match="a target is not in 5 classes"):
        linear_cross_entropy(x, weight, torch.tensor([0, 1, 2, 5]), chunks=2)
    with pytest.raises(InputError, match="not one class for each"):
        linear_cross_entropy(x, weight, torch.rand(4, 5), chunks=2)
    with pytest.raises(InputError, match="not one class for each"):
        linear_cross_entropy(x, weight, torch.tensor([0, 1]), chunks=2)


def test_a_wrong_number_of_classes_is_refused() -> None:
    def run(rank: int) -> None:
        tp = Groups(Mesh(axes=(Axis(name="tp", size=2),)))["tp"]
        x, weight, target = torch.randn(4, 3), torch.randn(5, 3), torch.zeros(4).long()
        linear_cross_entropy(x, weight, target, chunks=2, classes=tp, size=12)

    with pytest.raises(LayoutError, match="of 12 classes"):
        run_ranks(2, run)


@pytest.mark.parametrize("keepdim", [False, True])
def test_logsumexp_of_split_classes_twice_differentiated(keepdim: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 8, dtype=F64)

    def number(lse: Tensor) -> Tensor:
        return (lse * torch.arange(1.0, 4.0, dtype=F64).view(-1, *[1] * (lse.ndim - 1))).square().sum()

    def derivatives(lse: Tensor, leaf: Tensor, group: Any = None) -> tuple[Tensor, Tensor, Tensor]:
        (first,) = torch.autograd.grad(number(lse), leaf, create_graph=True)
        squares = first.square().sum()
        squares = squares if group is None else comm.all_reduce(squares, group)
        (second,) = torch.autograd.grad(squares, leaf)
        return lse.detach(), first.detach(), second

    def run(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        tp = Groups(Mesh(axes=(Axis(name="tp", size=2),)))["tp"]
        mine = x[:, 4 * tp.index : 4 * tp.index + 4].clone().requires_grad_()
        return derivatives(logsumexp(mine, -1, tp, keepdim=keepdim), mine, tp)

    leaf = x.clone().requires_grad_()
    wanted = derivatives(torch.logsumexp(leaf, -1, keepdim=keepdim), leaf)
    results = run_ranks(2, run)
    for rank, (lse, first, second) in enumerate(results):
        own = slice(4 * rank, 4 * rank + 4)
        torch.testing.assert_close(lse, wanted[0])
        torch.testing.assert_close(first, wanted[1][:, own])
        torch.testing.assert_close(second, wanted[2][:, own])

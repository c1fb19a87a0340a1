"""The sentences of the design's section 4 about microbatches, each with a module that the naive way gets wrong.

The naive way is what a loop over microbatches does: call the model on each, average the losses. Each test shows that
this really gives another number, and that the compiled program gives the right one, on one device and on two stages.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.errors import LoweringError
from shardwright.parallelize import parallelize
from shardwright.verify import verify
from tests.options import grouped
from tests.parity.threaded import apart
from tests.runtime.ranks import run_ranks

ROWS, PARTS = 8, 4
PLANS = ("single", "pp=2")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))

    def net(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x).tanh()).tanh())


def x() -> Tensor:
    return torch.randn(ROWS, 6)


def check(net: nn.Module, args: tuple[Tensor, ...], plan: str, **options) -> None:
    inputs = {"steps": 2, "method": "threads", "microbatches": PARTS, **options}
    report = verify(net, plan, example=args, **grouped(**inputs))
    assert report.passed, str(report)


def naive(net: nn.Module, args: tuple[Tensor, ...], split: Callable[[Tensor], bool] = lambda value: True) -> bool:
    """Whether the losses of microbatches, averaged, are another number than the loss of the batch."""
    parts = [argument.chunk(PARTS) if split(argument) else (argument,) * PARTS for argument in args]
    losses = torch.stack([net(*rows) for rows in zip(*parts, strict=True)])
    return apart(losses.nanmean(), net(*args))


# Means.


class IgnoredLabels(Net):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), target)


LABELS = torch.tensor([0, 1, -100, -100, 3, -100, 2, 5])  # 2, 0, 1 and 2 of them count


@pytest.mark.parametrize("plan", PLANS)
def test_a_mean_over_labels_divides_by_those_that_count_in_all_microbatches(plan):
    net, args = IgnoredLabels(), (x(), LABELS)
    assert naive(net, args)

    check(net, args, plan)


@pytest.mark.parametrize("plan", PLANS)
def test_also_if_labels_have_weights(plan):
    class Weighted(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("share", torch.rand(6) + 0.1)

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(self.net(x), target, weight=self.share)

    net, args = Weighted(), (x(), LABELS)
    assert naive(net, args)

    check(net, args, plan)


@pytest.mark.parametrize("plan", PLANS)
def test_two_such_means_that_are_added_have_each_their_count(plan):
    class Two(Net):
        def forward(self, x: Tensor, first: Tensor, other: Tensor) -> Tensor:
            y = self.net(x)
            return F.cross_entropy(y, first) + 0.3 * F.cross_entropy(y, other)

    net, args = Two(), (x(), LABELS, LABELS.flip(0).roll(1))
    assert naive(net, args)

    check(net, args, plan)


class MaskedMean(Net):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return (self.net(x).square().mean(1) * mask).sum() / mask.sum()


MASK = torch.tensor([1.0, 1, 0, 1, 0, 1, 1, 1])


@pytest.mark.parametrize("plan", [*PLANS, "pp=2,dp=2"])
def test_a_mean_under_a_mask_is_a_ratio_of_two_sums_over_all_microbatches(plan):
    net, args = MaskedMean(), (x(), MASK)
    assert naive(net, args)

    check(net, args, plan, microbatches=2 if "dp" in plan else PARTS)


@pytest.mark.parametrize("plan", PLANS)
def test_what_inputs_alone_decide_is_that_of_the_whole_batch(plan):
    class Scaled(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.net((x - x.mean(0)) / x.abs().max()).square().mean()

    net, args = Scaled(), (x() + torch.arange(ROWS)[:, None],)
    assert naive(net, args)

    check(net, args, plan)


@pytest.mark.parametrize("plan", PLANS)
def test_a_sum_stays_a_sum_and_a_mean_a_mean(plan):
    class Both(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = self.net(x)
            return y.square().sum() + y.mean()

    net, args = Both(), (x(),)
    assert naive(net, args), "an average of sums is no sum"

    check(net, args, plan)


# What microbatches do not cut.


@pytest.mark.parametrize("plan", PLANS)
def test_a_term_of_weights_alone_counts_once_and_not_once_a_microbatch(plan):
    class Regularized(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.net(x).square().sum() + 0.1 * self.a.weight.square().sum()

    net, args = Regularized(), (x(),)
    parts = sum(net(rows) for rows in args[0].chunk(PARTS))
    assert apart(parts, net(*args)), "losses that are added up count the weights four times"

    check(net, args, plan)


@pytest.mark.parametrize("plan", PLANS)
def test_places_in_the_batch_are_those_of_the_whole_batch(plan):
    class Placed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.place = nn.Embedding(ROWS, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x + self.place(torch.arange(x.shape[0]))).square().mean()

    net, args = Placed(), (x(),)
    assert naive(net, args)

    check(net, args, plan)


@pytest.mark.parametrize("plan", PLANS)
def test_an_index_that_inputs_alone_decide_is_looked_up_in_the_whole(plan):
    class Shuffled(Net):
        def forward(self, x: Tensor, order: Tensor) -> Tensor:
            return (self.net(x) * x[order]).mean()

    net, args = Shuffled(), (x(), torch.tensor([7, 3, 0, 1, 6, 2, 5, 4]))

    check(net, args, plan)


class Dropping(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x, 0.5, self.training)
        return self.net(x).square().mean() + F.dropout(self.a.weight, 0.5, self.training).sum()


class Noisy(Net):
    def forward(self, x: Tensor) -> Tensor:
        return (self.net(x + torch.randn_like(x)) * torch.rand(6)).square().mean()


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("net", [Dropping, Noisy])
def test_what_is_drawn_is_drawn_for_the_whole_batch(net, plan):
    """`verify` draws for the whole batch: microbatches have their rows of that, and all of what is not cut."""
    check(net(), (x(),), plan)


def test_microbatches_draw_other_masks():
    """In earnest, not as verify draws: equal rows are dropped differently in each microbatch."""

    class Dropped(Net):
        def forward(self, x: Tensor) -> dict:
            kept = F.dropout(self.net(x), 0.5, self.training)
            return {"loss": kept.mean(), "kept": kept}

    results = on_ranks(Dropped(), (torch.ones(ROWS, 6),), "pp=2", lambda model, args: model(*args)["kept"] != 0)

    for kept in results:
        patterns = {tuple(map(bool, rows.flatten())) for rows in kept.chunk(PARTS)}
        assert len(patterns) > 1
    assert torch.equal(results[0], results[1]), "all ranks see the same"


def test_what_is_drawn_for_the_whole_batch_is_drawn_once():
    class Level(Net):
        def forward(self, x: Tensor) -> dict:
            level = torch.rand(()) + 0 * self.net(x).mean(1)
            return {"loss": level.mean(), "level": level}

    for level in on_ranks(Level(), (x(),), "pp=2", lambda model, args: model(*args)["level"].detach()):
        assert (level == level[0]).all()


def on_ranks(net: nn.Module, args: tuple[Tensor, ...], plan: str, use: Callable, **options) -> list:
    """What a function of the parallel model finds on every rank."""
    folder = tempfile.mkdtemp(prefix="section4-")

    def run(rank: int):
        model = parallelize(
            copy.deepcopy(net), plan=plan, **grouped(directory=folder, **{"microbatches": PARTS, **options})
        )
        return use(model, args)

    return run_ranks(2, run)


@pytest.mark.parametrize("plan", PLANS)
def test_a_stage_may_read_a_weight_without_training_it(plan):
    """The last stage trains it, the first reads it, and its gradient is that of the one that has one."""

    class Stopped(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.net(x @ self.c.weight.detach()).square().mean()

    net, args = Stopped(), (x(),)
    (gradient,) = torch.autograd.grad(net(*args), [net.c.weight])
    assert bool(gradient.any())

    check(net, args, plan)


# What they can't do.


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.norm(x)).square().mean()


def test_batch_norm_is_refused_with_its_line_and_runs_on_batches_of_their_own_if_asked():
    net, args = Normed().double(), (x().double(),)
    assert naive(copy.deepcopy(net), args)

    def gradients(model, args):
        model(*args).backward()
        return {key: p.grad for key, p in model.named_parameters() if p.grad is not None}

    with pytest.raises(LoweringError, match=r"norm / _native_batch_norm.*at test_section4_time\.py:\d+"):
        on_ranks(net, args, "pp=2", gradients)

    wanted = copy.deepcopy(net)
    for rows in args[0].chunk(PARTS):
        (wanted(rows) / PARTS).backward()
    for result in on_ranks(net, args, "pp=2", gradients, microbatch_semantics="local"):
        assert result
        for key, gradient in result.items():
            torch.testing.assert_close(gradient.as_subclass(Tensor), wanted.get_parameter(key).grad, rtol=1e-10, atol=0)


def test_a_smaller_last_batch_runs_in_as_many_microbatches_as_it_divides_by():
    net = IgnoredLabels().double()

    def use(model, args):
        return [model(args[0][:rows], args[1][:rows]).detach() for rows in (8, 6, 5, 2)]

    args = (x().double(), LABELS)
    wanted = [net(args[0][:rows], args[1][:rows]) for rows in (8, 6, 5, 2)]
    for result in on_ranks(net, args, "pp=2", use):
        torch.testing.assert_close(result, wanted, rtol=1e-12, atol=0)


# Outputs.


@pytest.mark.parametrize("plan", ["pp=2", "pp=2,dp=2"])
def test_a_value_may_be_several_outputs_and_any_value_may_be_one(plan):
    class Telling(Net):
        def forward(self, x: Tensor) -> dict:
            h = self.a(x).tanh()
            loss = self.c(self.b(h)).square().mean()
            return {"loss": loss, "again": loss, "h": h, "h2": h, "x": x, "weight": self.b.weight, "n": 3, "none": None}

    check(Telling(), (x(),), plan, microbatches=2, loss=lambda out: out["loss"])


@pytest.mark.parametrize("plan", ["zero2=2", "tp=2", "dp=2"])
def test_microbatches_need_no_stages(plan):
    check(IgnoredLabels(), (x(), LABELS), plan, microbatches=2)


@pytest.mark.parametrize("plan", ["pp=1+2,zero1", "pp=2+1,zero2", "pp=1+2,tp", "pp=2+1,sp"])
def test_unequal_stages(plan):
    check(IgnoredLabels(), (x(), LABELS), plan, optimizer="adamw", microbatches=2)


@pytest.mark.parametrize("plan", ["pp=2,eager", "pp=2,interleaved=1", "pp=3"])
def test_other_schedules(plan):
    check(MaskedMean(), (x(), MASK), plan)

"""Every backward leaves `.grad` what a single device would have."""

from __future__ import annotations

import warnings

import pytest
import torch

from shardwright.errors import InputError
from shardwright.layout import REPLICATE, make_layout
from shardwright.runtime.parameters.gradient_sync import GradientSync
from shardwright.runtime.parameters.sharded import Untouched, make_parameter, raw_gradient
from shardwright.runtime.world import Groups
from shardwright.storage import ParameterSpec
from tests.runtime.little import Shards, Single, assert_same, batch, mesh_of, single_gradients
from tests.runtime.ranks import run_processes, run_ranks

TINY = {"bucket_mb": 1e-4, "first_mb": 1e-5}
MESHES = [(2, 1), (3, 1), (4, 1), (2, 2), (1, 2), (1, 4)]


def expected(steps=1, clear=False, scale=1.0):
    model = Single()
    for step in range(steps):
        if clear:
            model.zero_grad()
        (model(*batch(step)) * scale).backward()
    return single_gradients(model)


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize(("dp", "tp"), MESHES)
@pytest.mark.parametrize("options", [TINY, {}])
def test_one_backward_equals_a_single_device(dp, tp, level, options):
    """The regularizer counts once, the tied weight has the sum, the idle one none, the frozen one none."""

    def body(rank):
        model = Shards(mesh_of(dp, tp), level)
        GradientSync(model.pairs, model.groups, **options)
        model.loss(*batch()).backward()
        return model.whole_gradients()

    want = expected()
    assert want["idle"] is None
    assert want["frozen"] is None
    for got in run_ranks(dp * tp, body):
        assert_same(got, want)


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("quiet", [False, True])
def test_accumulation(level, quiet):
    def body(rank):
        model = Shards(mesh_of(2, 2), level)
        sync = GradientSync(model.pairs, model.groups, **TINY)
        for step in range(3):
            if quiet and step < 2:
                with sync.no_sync():
                    model.loss(*batch(step)).backward()
            else:
                model.loss(*batch(step)).backward()
        return model.whole_gradients()

    for got in run_ranks(4, body):
        assert_same(got, expected(3))


def test_without_sync_gradients_are_local():
    """What no_sync claims to save is really not done."""

    def body(rank):
        model = Shards(mesh_of(2))
        sync = GradientSync(model.pairs, model.groups)
        with sync.no_sync():
            model.loss(*batch()).backward()
        return raw_gradient(model.p["w1"])

    first, second = run_ranks(2, body)
    assert not torch.allclose(first, second)


@pytest.mark.parametrize("level", [0, 2])
def test_no_sync_after_a_synced_backward_and_flush(level):
    def body(rank):
        model = Shards(mesh_of(2), level)
        sync = GradientSync(model.pairs, model.groups, **TINY)
        model.loss(*batch(0)).backward()
        with sync.no_sync():
            model.loss(*batch(1)).backward()
            model.loss(*batch(2)).backward()
        sync.flush()
        sync.flush()
        return model.whole_gradients()

    for got in run_ranks(2, body):
        assert_same(got, expected(3))


def test_clearing_pending_gradients_clears_them():
    def body(rank):
        model = Shards(mesh_of(2))
        sync = GradientSync(model.pairs, model.groups)
        model.loss(*batch(5)).backward()
        with sync.no_sync():
            model.loss(*batch(6)).backward()
        for parameter in model.parameters():
            parameter.grad = None
        with sync.no_sync():
            model.loss(*batch(0)).backward()
        model.loss(*batch(1)).backward()
        return model.whole_gradients()

    for got in run_ranks(2, body):
        assert_same(got, expected(2))


def test_pending_gradient_of_a_parameter_that_the_next_backward_does_not_use():
    def body(rank):
        model = Shards(mesh_of(2))
        sync = GradientSync(model.pairs, model.groups)
        with sync.no_sync():
            model.loss(*batch()).backward()
        share = model.groups["dp"].index == 0
        with Untouched():  # as the model itself does
            loss = model.p["scale"] * (1.0 if share else 0.0)
        loss.backward()
        return model.whole_gradients()

    want = expected()
    want["scale"] = want["scale"] + 1.0
    for got in run_ranks(2, body):
        assert_same(got, want)


@pytest.mark.parametrize("level", [0, 2])
def test_two_forwards_one_backward_and_retain_graph(level):
    def body(rank):
        model = Shards(mesh_of(2), level)
        GradientSync(model.pairs, model.groups, **TINY)
        loss = model.loss(*batch(0)) + model.loss(*batch(1))
        loss.backward(retain_graph=True)
        loss.backward()
        return model.whole_gradients()

    model = Single()
    (2 * (model(*batch(0)) + model(*batch(1)))).backward()
    for got in run_ranks(2, body):
        assert_same(got, single_gradients(model))


def test_gradients_that_somebody_kept_are_not_overwritten():
    def body(rank):
        model = Shards(mesh_of(2))
        GradientSync(model.pairs, model.groups)
        model.loss(*batch(0)).backward()
        kept, copied = model.p["w1"].grad, model.p["w1"].grad.clone()
        for parameter in model.parameters():
            parameter.grad = None
        model.loss(*batch(1)).backward()
        assert torch.equal(kept, copied)
        assert not torch.equal(model.p["w1"].grad, copied)

    run_ranks(2, body)


def test_the_buffer_is_used_again_when_gradients_were_cleared():
    def body(rank):
        model = Shards(mesh_of(2))
        sync = GradientSync(model.pairs, model.groups)
        seen = set()
        for step in range(3):
            model.loss(*batch(step)).backward()
            seen.add(model.p["w1"].grad.data_ptr())
            for parameter in model.parameters():
                parameter.grad = None
        assert len(sync.buckets) >= 1
        return len(seen)

    assert run_ranks(2, body) == [1, 1]


def test_a_parameter_used_on_one_rank_only_has_its_gradient_on_all():
    def body(rank):
        model = Shards(mesh_of(2))
        GradientSync(model.pairs, model.groups)
        loss = model.loss(*batch())
        if rank == 1:
            with Untouched():  # as the model itself does
                loss = loss + model.p["idle"].sum() * 3
        loss.backward()
        return model.whole_gradients()

    want = expected()
    want["idle"] = torch.full((3, 2), 3.0, dtype=torch.float64)
    for got in run_ranks(2, body):
        assert_same(got, want)


def test_user_hooks_and_anomaly_mode():
    def body(rank):
        model = Shards(mesh_of(2))
        GradientSync(model.pairs, model.groups)
        calls = []
        model.p["w1"].register_hook(lambda gradient: calls.append(gradient.shape))
        if rank == 0:
            model.loss(*batch()).backward()
        else:
            with torch.autograd.set_detect_anomaly(True, check_nan=True):
                model.loss(*batch()).backward()
        assert calls == [model.p["w1"].shape]
        return model.whole_gradients()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that anomaly mode is on
        results = run_ranks(2, body)
    for got in results:
        assert_same(got, expected())


class _Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("on purpose")


@pytest.mark.parametrize("level", [0, 2])
def test_a_backward_that_raised_leaves_no_trace(level):
    def body(rank):
        model = Shards(mesh_of(2), level)
        GradientSync(model.pairs, model.groups, **TINY)
        with pytest.raises(ArithmeticError):
            model.loss(*batch(7), values={"embed": _Breaks.apply(model.p["embed"])}).backward()
        for parameter in model.parameters():
            parameter.grad = None
        model.loss(*batch()).backward()
        return model.whole_gradients()

    for got in run_ranks(2, body):
        assert_same(got, expected())


def test_what_is_not_supported_says_so():
    def body(rank):
        model = Shards(mesh_of(2))
        GradientSync(model.pairs, model.groups)
        with pytest.raises(InputError, match="create_graph"):
            model.loss(*batch()).backward(create_graph=True)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of create_graph itself
        run_ranks(2, body)


def test_sparse_gradients_are_summed_as_dense_ones():
    def body(rank):
        groups = Shards(mesh_of(2)).groups
        stored = ParameterSpec(
            keys=("e",), shape=(4, 2), dtype="float64", layout=make_layout([[], []], {"dp": REPLICATE})
        )
        table = make_parameter(torch.zeros(4, 2, dtype=torch.float64), stored, groups)
        GradientSync([(stored, table)], groups)
        with Untouched():
            lookup = torch.nn.functional.embedding(torch.tensor([rank]), table, sparse=True).sum()
        with pytest.raises(InputError, match="sparse=False"):
            torch.autograd.grad(lookup, table, retain_graph=True)
        lookup.backward()
        return table.grad

    for gradient in run_ranks(2, body):
        assert gradient.tolist() == [[1, 1], [1, 1], [0, 0], [0, 0]]


def test_removed_hooks_do_nothing():
    def body(rank):
        model = Shards(mesh_of(2))
        GradientSync(model.pairs, model.groups).remove()
        model.loss(*batch()).backward()
        return raw_gradient(model.p["w1"])

    first, second = run_ranks(2, body)
    assert not torch.allclose(first, second)


def test_buckets_follow_backward_and_are_few():
    def body(rank):
        model = Shards(mesh_of(2))
        few = GradientSync(model.pairs, model.groups)
        many = GradientSync(model.pairs, model.groups, **TINY)
        names = [entry.spec.name for bucket in many.buckets for entry in bucket.entries]
        return len(few.buckets), len(many.buckets), names

    few, many, names = run_ranks(2, body)[0]
    assert few == 1
    assert many > 3
    assert names == ["idle", "bias", "w2", "gain", "scale", "w1", "embed"]


def _on_gloo(rank, level):
    model = Shards(mesh_of(2), level)
    sync = GradientSync(model.pairs, model.groups, **TINY)
    with sync.no_sync():
        model.loss(*batch(0)).backward()
    model.loss(*batch(1)).backward()
    return model.whole_gradients()


@pytest.mark.parametrize("level", [0, 2])
def test_on_gloo(level):
    for got in run_processes(2, _on_gloo, level, timeout=200):
        assert_same(got, expected(2))


def test_one_rank_needs_no_group():
    def body(rank):
        model = Shards(mesh_of(1))
        assert GradientSync(model.pairs, Groups(mesh_of(1))).buckets == []
        model.loss(*batch()).backward()
        return model.whole_gradients()

    assert_same(run_ranks(1, body)[0], expected())

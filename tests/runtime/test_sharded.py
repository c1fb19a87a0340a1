"""Norms in the user's own loop are global and exact."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch.nn.utils import clip_grad_norm_, get_total_norm

from shardwright.errors import InputError
from shardwright.layout import REPLICATE, Axis, Block, Mesh, contiguous_shard, make_layout, make_shard
from shardwright.runtime.parameters.full_tensors import coordinates, gather_tensor, shard_tensor
from shardwright.runtime.parameters.sharded import ShardedParameter, Untouched, make_parameter, set_raw_gradient
from shardwright.runtime.world import Groups
from shardwright.storage import ParameterSpec, parse_storage, sharding_axes, wanted_groups
from tests.runtime.ranks import run_processes, run_ranks

DP, TP = Axis(name="dp", size=2), Axis(name="tp", size=2)
MESH = Mesh(axes=(DP, TP))


def make_spec(key, shape, cuts, sums=("dp",), level=0, dtype=torch.float64):
    layout, storage = make_layout(cuts, dict.fromkeys(sums, REPLICATE)), parse_storage({"dp": level} if level else {})
    return ParameterSpec(keys=(key,), shape=shape, dtype=str(dtype)[6:], layout=layout, storage=storage)


def make_specs(level, dtype=torch.float64):
    fused = make_shard(TP, [Block(3, 4, 1)])
    return [
        make_spec("qkv", (12, 3), [[fused], []], level=level, dtype=dtype),
        make_spec("proj", (3, 5), [[], [contiguous_shard(TP, 5)]], level=level, dtype=dtype),
        make_spec("norm", (3,), [[]], sums=("dp", "tp"), level=level, dtype=dtype),
        make_spec("tiny", (1, 1), [[contiguous_shard(TP, 1)], []], dtype=dtype),  # empty on tp rank 1
        make_spec("scale", (), [], sums=("dp", "tp"), level=level, dtype=dtype),
    ]


def whole_gradients(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return {it.name: torch.randn(it.shape, generator=generator, dtype=dtype) for it in make_specs(0)}


def parameters(level, full, dtype=torch.float64):
    """Parameters whose synced gradients are shards of `full`."""
    groups = Groups(MESH, wanted_groups(make_specs(level), MESH))
    collected = []
    for it in make_specs(level, dtype):
        parameter = make_parameter(shard_tensor(full[it.name] * 0, it, MESH.sizes, coordinates(groups)), it, groups)
        gradient = shard_tensor(full[it.name], it, MESH.sizes, coordinates(groups))
        if level == 2 and parameter.shard is not None:
            share = shard_tensor(full[it.name], it, MESH.sizes, coordinates(groups), parameter.shard.spread)
            set_raw_gradient(parameter.shard, share)
        else:
            set_raw_gradient(parameter, gradient)
        collected.append(parameter)
    return collected, groups


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("order", [2.0, 1.0, 3.0, float("inf")])
def test_clip_grad_norm_is_exact(level, foreach, order):
    full = whole_gradients()
    plain = [torch.nn.Parameter(torch.zeros_like(g)) for g in full.values()]
    for parameter, gradient in zip(plain, full.values(), strict=True):
        parameter.grad = gradient.clone()
    expected = clip_grad_norm_(plain, 0.5, order)

    def body(rank):
        built, groups = parameters(level, full)
        norm = clip_grad_norm_(built, 0.5, order, foreach=foreach)
        grads = []
        for parameter in built:
            owned = parameter.shard if level == 2 and parameter.shard is not None else parameter
            grads.append(gather_tensor(owned.grad, parameter.spec, groups, owned.spread))
        return norm, grads

    for norm, grads in run_ranks(4, body):
        assert type(norm) is torch.Tensor
        assert abs(norm - expected) <= 1e-12 * expected
        for got, want in zip(grads, plain, strict=True):
            assert torch.allclose(got, want.grad, rtol=0, atol=1e-14)


def test_the_optimizers_shards_have_the_same_norm():
    full = whole_gradients()
    expected = get_total_norm(list(full.values()))

    def body(rank, level):
        built, _ = parameters(level, full)
        return get_total_norm([(p.shard if p.shard is not None else p).grad for p in built])

    for level in (1, 2):
        for norm in run_ranks(4, body, level):
            assert abs(norm - expected) <= 1e-12 * expected


def test_one_collective_for_each_axis(monkeypatch):
    full = whole_gradients()
    calls = []
    real = torch.distributed.all_reduce

    def counted(tensor, *args, **kwargs):
        calls.append(tensor.numel())
        return real(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.distributed, "all_reduce", counted)

    def body(rank):
        built, _ = parameters(3, full)
        clip_grad_norm_(built, 1.0)

    run_ranks(4, body)
    assert len(calls) == 4 * 2


@pytest.mark.parametrize("order", [2.0, float("inf")])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_number_on_one_rank_shows_on_all(order, bad):
    full = whole_gradients()
    full["proj"][2, 4] = bad  # on tp rank 1 only

    def body(rank):
        built, _ = parameters(0, full)
        norm = get_total_norm([p.grad for p in built], order)
        with pytest.raises(RuntimeError, match="non-finite"):
            clip_grad_norm_(built, 1.0, order, error_if_nonfinite=True)
        return norm.item()

    results = run_ranks(4, body)
    assert all(str(norm) == str(bad) for norm in results)


@pytest.mark.parametrize("measure", [torch.norm, torch.Tensor.norm, torch.linalg.norm, torch.linalg.vector_norm])
def test_every_way_to_ask_for_a_norm(measure):
    full = whole_gradients()

    def body(rank):
        built, _ = parameters(3, full)
        return [float(measure(p.grad)) for p in built], [float(measure(p.grad) ** 2 + 1) for p in built]

    for norms, squares in run_ranks(4, body):
        for norm, square, gradient in zip(norms, squares, full.values(), strict=True):
            assert norm == pytest.approx(float(gradient.norm()), rel=1e-12)
            assert square == pytest.approx(float(gradient.norm() ** 2 + 1), rel=1e-12)


def test_norms_of_several_orders_in_one_stack():
    full = whole_gradients()
    orders = (1.0, 2.0, torch.inf, 2.0, 3.0)
    expected = torch.stack([gradient.norm(order) for gradient, order in zip(full.values(), orders, strict=True)])

    def body(rank):
        built, _ = parameters(3, full)
        return torch.stack([p.grad.norm(order) for p, order in zip(built, orders, strict=True)])

    for result in run_ranks(4, body):
        assert torch.allclose(result, expected, rtol=1e-12, atol=0)


def test_reading_the_gradient_twice_gives_one_object():
    def body(rank):
        built, _ = parameters(0, whole_gradients())
        assert built[0].grad is built[0].grad
        built[0].grad.mul_(2)
        return built[0].grad.sum()

    run_ranks(4, body)


def test_a_parameter_and_its_shard_are_cleared_together():
    def body(rank, level):
        for clear in ("parameter", "shard"):
            built, _ = parameters(level, whole_gradients())
            (built[0] if clear == "parameter" else built[0].shard).grad = None
            assert built[0].grad is None
            assert built[0].shard.grad is None
        built, _ = parameters(1, whole_gradients())
        built[0].shard.grad.zero_()
        assert not built[0].grad.any()

    run_ranks(4, body, 1)
    run_ranks(4, body, 2)


def test_copies_keep_their_place():
    def body(rank):
        built, groups = parameters(1, whole_gradients())
        copied = copy.deepcopy(built)
        assert all(type(p) is ShardedParameter and p.groups is groups for p in copied)
        copied[0].data.fill_(7)
        assert (copied[0].shard == 7).all()
        assert not (built[0] == 7).any()

    run_ranks(4, body)


def test_a_shard_is_pickled_if_it_is_whole_here():
    def body(rank):
        built, _ = parameters(1, whole_gradients())
        for parameter in built:
            file = io.BytesIO()
            if not sharding_axes(parameter.spread, MESH):
                torch.save(parameter, file)
                file.seek(0)
                loaded = torch.load(file)
                assert type(loaded) is torch.nn.Parameter
                assert torch.equal(loaded, parameter.data)
            else:
                with pytest.raises(InputError, match="is not whole here"):
                    torch.save(parameter, file)
        return [not sharding_axes(parameter.spread, MESH) for parameter in built]

    assert {kind for kinds in run_ranks(4, body) for kind in kinds} == {True, False}


def _clip_in_a_process(rank):
    built, _ = parameters(3, whole_gradients())
    return float(clip_grad_norm_(built, 0.5))


def test_clip_on_gloo():
    expected = float(get_total_norm(list(whole_gradients().values())))
    for norm in run_processes(4, _clip_in_a_process, timeout=200):
        assert norm == pytest.approx(expected, rel=1e-12)


def test_foreach_ops_give_shards_and_those_in_place_the_same_memory():
    def body(rank):
        built, _ = parameters(0, whole_gradients())
        with torch.no_grad():
            changed, fresh = torch._foreach_add_(built, 2.0), torch._foreach_mul(built, 3.0)
        kind = type(built[0].detach())
        assert {type(shard) for shard in (*changed[:2], *fresh[:2])} == {kind}, "those that are sharding"
        assert [shard.data_ptr() for shard in changed] == [shard.data_ptr() for shard in built]
        with Untouched():
            assert all(bool((shard == 6.0).all()) for shard in fresh)

    run_ranks(4, body)

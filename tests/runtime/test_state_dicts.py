"""Checkpoints: saved under one plan, loaded under another, with the original keys."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from shardwright.errors import InputError
from shardwright.runtime.optimizer.adopt import adopt
from shardwright.runtime.parameters.full_tensors import coordinates, shard_tensor
from shardwright.runtime.parameters.gradient_sync import GradientSync
from shardwright.runtime.parameters.state_dicts import (
    full_state_dict,
    load_state,
    state_dict,
)
from shardwright.runtime.parameters.state_values import ShardTensor, as_state, region_of_value
from shardwright.storage import stored_layout
from tests.runtime.little import Shards, Single, assert_same, batch, mesh_of, whole_values
from tests.runtime.ranks import run_processes, run_ranks
from tests.runtime.test_zero3 import Split

KEYS = ["embed", "head", "w1", "scale", "gain", "w2", "bias", "idle", "frozen", "count"]


def parts(model):
    return model.specs, model.p, {"count": model.count}, model.groups


@pytest.mark.parametrize("level", [0, 3])
def test_a_shard_that_is_cut_as_it_is_wanted_is_taken_as_it_is(level):
    def body(rank):
        model, kinds = Shards(mesh_of(2, 2), level), set()
        for spec in model.specs:
            layout = stored_layout(spec, model.groups.mesh.sizes)
            local = shard_tensor(
                whole_values()[spec.name], spec, model.groups.mesh.sizes, coordinates(model.groups), layout
            )
            value = as_state(local, spec, layout, model.groups)
            kinds.add(type(value))
            if isinstance(value, DTensor | ShardTensor):
                assert region_of_value(value, spec, layout, model.groups).data_ptr() == local.data_ptr()
            assert torch.equal(region_of_value(whole_values()[spec.name], spec, layout, model.groups), local)
        return any(issubclass(kind, DTensor) for kind in kinds)

    assert all(run_ranks(4, body))


def whole_by_key():
    values = whole_values()
    named = {key: values["embed" if key == "head" else key] for key in KEYS if key != "count"}
    return {**named, "count": torch.tensor(3)}


@pytest.mark.parametrize("level", [0, 3])
@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2)])
def test_values_have_whole_shapes_and_full_tensors(dp, tp, level):
    def body(rank):
        model = Shards(mesh_of(dp, tp), level)
        values = state_dict(*parts(model))
        kinds = {key: type(value).__name__ for key, value in values.items()}
        full = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in values.items()}
        return kinds, {k: tuple(v.shape) for k, v in values.items()}, full

    for kinds, shapes, full in run_ranks(dp * tp, body):
        assert list(kinds) == KEYS
        assert_same(full, whole_by_key(), atol=0)
        assert shapes == {key: tuple(value.shape) for key, value in whole_by_key().items()}
        if tp > 1:  # the rows of w1 are fused, those of idle are not
            assert kinds["w1"] == "ShardTensor"
            assert kinds["idle"] == "ShardedState"


def test_full_state_dict_everywhere_or_on_one_rank():
    def body(rank, only):
        model = Shards(mesh_of(2, 2), 3)
        return full_state_dict(*parts(model), only)

    for got in run_ranks(4, body, None):
        assert_same(got, whole_by_key(), atol=0)
    results = run_ranks(4, body, 2)
    assert [bool(got) for got in results] == [False, False, True, False]


def test_loading_whole_tensors_cuts_them():
    new = {key: value + 1 for key, value in whole_by_key().items()}

    def body(rank):
        model = Shards(mesh_of(2, 2), 3)
        load_state(new, *parts(model))
        return full_state_dict(*parts(model))

    for got in run_ranks(4, body):
        assert_same(got, new, atol=0)


def test_loading_shards_of_another_level():
    def body(rank):
        source, target = Shards(mesh_of(2, 2), 3), Shards(mesh_of(2, 2), 0)
        same = Shards(mesh_of(2, 2), 3)
        with torch.no_grad():
            for _, parameter in source.pairs:
                parameter.mul_(2)
            source.count.mul_(2)
        values = state_dict(*parts(source))
        load_state(values, *parts(target))
        load_state(values, *parts(same))
        return full_state_dict(*parts(target)), full_state_dict(*parts(same))

    want = {key: value * 2 for key, value in whole_by_key().items()}
    for first, second in run_ranks(4, body):
        assert_same(first, want, atol=0)
        assert_same(second, want, atol=0)


def test_every_fault_of_a_state_dict_is_named():
    def body(rank):
        model = Shards(mesh_of(2))
        values = whole_by_key()
        del values["w1"], values["head"]
        with pytest.raises(InputError, match=r"(?s)missing: w1.*unexpected: extra"):
            load_state({**values, "extra": torch.zeros(1)}, *parts(model))
        state = load_state({"bias": whole_by_key()["bias"], "extra": 0}, *parts(model), strict=False)
        assert state.unexpected_keys == ["extra"]
        assert "w1" in state.missing_keys

    run_ranks(2, body)


def test_a_shard_does_not_pretend_to_be_the_whole():
    def body(rank):
        model = Shards(mesh_of(1, 2))
        shard = state_dict(*parts(model))["w1"]
        assert isinstance(shard, ShardTensor)
        assert torch.equal(shard.clone().detach().local, shard.local)
        with pytest.raises(InputError, match="full_tensor"):
            shard + 1

    run_ranks(2, body)


# -- real files ---------------------------------------------------------------------------------


def _model(dp, tp, level):
    if level == 3:
        model = Split(mesh_of(dp, tp))
    else:
        model = Shards(mesh_of(dp, tp), level)
        GradientSync(model.pairs, model.groups)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    adopt(optimizer, {p: p for p in model.parameters()})
    return model, optimizer


def _steps(model, optimizer, steps):
    for step in steps:
        model.loss(*batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def _save(rank, path, plan):
    model, optimizer = _model(*plan)
    _steps(model, optimizer, range(4))
    dcp.save(state_dict(*parts(model)), checkpoint_id=path)
    return [type(value) is DTensor for value in state_dict(*parts(model)).values()]


def _load(rank, path, plan):
    model, _ = _model(*plan)
    assert_same(full_state_dict(*parts(model)), whole_by_key(), atol=0)
    values = state_dict(*parts(model))
    dcp.load(values, checkpoint_id=path)
    load_state(values, *parts(model))
    return full_state_dict(*parts(model))


PLANS = {"tp": (1, 2, 0), "dp": (2, 1, 0), "zero1": (2, 1, 1), "zero2": (2, 1, 2), "zero3": (2, 1, 3)}


def _want():
    single = Single()
    optimizer = torch.optim.AdamW([p for p in single.parameters() if p.requires_grad], lr=0.01)
    for step in range(4):
        single(*batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    values = {name: p.detach() for name, p in single.named_parameters()}
    return {**whole_by_key(), **{key: values["embed" if key == "head" else key] for key in KEYS if key != "count"}}


@pytest.mark.parametrize(("before", "after"), [("tp", "zero3"), ("tp", "dp"), ("zero1", "tp"), ("zero3", "zero2")])
def test_a_trained_model_loads_under_another_plan(before, after, tmp_path):
    """Through files of DCP's on disk. Optimizers: `tests/checkpoint/test_matrix.py`."""
    path = str(tmp_path / "checkpoint")
    run_processes(2, _save, path, PLANS[before], timeout=200)
    for got in run_processes(2, _load, path, PLANS[after], timeout=200):
        assert_same(got, _want(), atol=1e-11)


def _grow(rank, path):
    _save(rank, path, (2, 2, 3))
    dist.barrier()
    return _load(rank, path, (4, 1, 3))


def test_four_ranks_and_uneven_shares(tmp_path):
    for got in run_processes(4, _grow, str(tmp_path / "checkpoint"), timeout=200):
        assert_same(got, _want(), atol=1e-11)

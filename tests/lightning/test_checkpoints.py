"""Checkpoints of a Trainer: saved under one plan, gone on from under another."""

import pytest

from shardwright.checkpoint import open_checkpoint

from .jobs import resume, save
from .modules import Net, apart, single


@pytest.fixture(scope="module")
def saved(pools, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    names = pools[2].run(save, "tp=2", str(folder), timeout=120)[0]
    assert names == ["epoch=1.ckpt", "last.ckpt", "weights.ckpt"]  # the worse one was removed
    return folder


@pytest.mark.parametrize(("name", "plan"), [("Net", "dp=2"), ("Empty", "zero3=2")])
def test_a_run_goes_on_under_another_plan(pools, saved, name, plan):
    expected, _ = single(Net, max_epochs=4)
    tested = set()
    for parameters, test, _, _ in pools[2].run(resume, name, plan, f"{saved}/last.ckpt", timeout=120):
        assert apart(parameters, expected) < 1e-10
        tested.add(test)
    assert len(tested) == 1


def test_a_checkpoint_of_weights_has_no_optimizer(saved):
    assert open_checkpoint(saved / "weights.ckpt").said["optimizers"] == []
    assert open_checkpoint(saved / "last.ckpt").said["optimizers"] != []

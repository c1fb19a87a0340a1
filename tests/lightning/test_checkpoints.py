"""Checkpoints of a Trainer: saved under one plan, gone on from under another."""

import pytest
import torch

from shardwright.checkpoint import open_checkpoint
from shardwright.errors import CheckpointError, InputError

from .jobs import resume, save
from .modules import Net, apart, ours, quiet, rows, seeded, single, trainer, whole


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


def test_a_run_goes_on_with_fewer_ranks_and_its_module_computes(saved):
    expected, _ = single(Net, max_epochs=4)
    with quiet():
        run, net = ours("single", 1, max_epochs=4), Net().double()
        run.fit(net, rows(), rows(), ckpt_path=saved / "last.ckpt")
        assert apart(whole(run), expected) < 1e-10
        x = rows().dataset.tensors[0]
        original = Net().double()
        original.load_state_dict(expected)
        assert torch.allclose(net(x), original(x), rtol=1e-10)  # its forward is a program too
        with pytest.raises(InputError, match="blocks is a part of a parallelized model"):
            net.blocks(x)


def test_an_ordinary_checkpoint_is_validated_but_not_gone_on_from(tmp_path):
    with quiet():
        alone, net = trainer("auto", 1), seeded(Net)
        alone.fit(net, rows(), rows())
        alone.save_checkpoint(tmp_path / "plain.ckpt")
        run = ours("single", 1)
        run.validate(Net().double(), rows(), ckpt_path=tmp_path / "plain.ckpt", verbose=False)
        assert float(run.callback_metrics["val"]) == pytest.approx(float(alone.callback_metrics["val"]), rel=1e-12)
        with pytest.raises(CheckpointError, match="states of optimizers of one device"):
            ours("single", 1).fit(Net().double(), rows(), ckpt_path=tmp_path / "plain.ckpt")

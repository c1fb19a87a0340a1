"""Checkpoints of a Trainer: saved under one plan, gone on from under another."""

import pytest
import torch

from shardwright.checkpoint import open_checkpoint
from shardwright.errors import InputError

from . import modules
from .jobs import go_on, resume, save, stop
from .modules import Net, Pair, apart, ours, quiet, rows, seeded, single, trainer, whole


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
    assert open_checkpoint(saved / "weights.ckpt").state["optimizers"] == []
    assert open_checkpoint(saved / "last.ckpt").state["optimizers"] != []


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


@pytest.mark.parametrize(("name", "plan"), [("Net", "zero3=2"), ("Net", "pp=2"), ("Pair", "tp=2")])
def test_a_run_of_lightning_alone_is_gone_on_with(pools, tmp_path, name, plan):
    make = getattr(modules, name)
    with quiet():
        alone = trainer("auto", 1)
        alone.fit(seeded(make), rows(), rows())
        alone.save_checkpoint(tmp_path / "plain.ckpt")
    expected, _ = single(make, max_epochs=4)
    for parameters in pools[2].run(go_on, name, plan, str(tmp_path / "plain.ckpt")):
        assert apart(parameters, expected) < 1e-10


def test_submodules_that_are_compiled_go_on_under_another_plan(pools, tmp_path):
    expected, _ = single(Pair, max_epochs=4)
    pools[2].run(stop, "Pair", "tp=2", str(tmp_path / "half.ckpt"))
    for parameters in pools[2].run(go_on, "Pair", "dp=2", str(tmp_path / "half.ckpt")):
        assert apart(parameters, expected) < 1e-10

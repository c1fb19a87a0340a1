"""A save beside training: what is saved is the moment of the call, and training goes on."""

from __future__ import annotations

import errno
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import shardwright as sw
from shardwright.checkpoint import CheckpointFolder, disk
from shardwright.errors import CheckpointError

from .little import little, train
from .runs import assert_same, forget, make_run, steps, values


def slow(seconds, only=None):
    """Writes take long; on one rank, if it is said."""
    write = disk.AtomicFile.write

    def slowly(self, data):
        if only is None or dist.get_rank() == only:
            time.sleep(seconds)
        write(self, data)

    return mock.patch.object(disk.AtomicFile, "write", slowly)


def on_ranks(rank, plan, folder):
    run = make_run("gpt", "adamw", plan, folder)
    steps(run, "gpt", 2)
    kept = values(run[0])
    with slow(0.02):
        saving = sw.save(f"{folder}/x", run[0], run[1], schedulers=run[2], background=True)
        steps(run, "gpt", 1)
        beside = not saving.done
        on = steps(run, "gpt", 2)
        sw.save(f"{folder}/y", run[0], run[1], schedulers=run[2], background=True)  # waits for the first
        assert saving.done
        forget(run)  # the second is a copy too
        loaded = sw.load(f"{folder}/y", *run[:2], schedulers=run[2])  # waits for the second
    assert loaded.path.name == "y"
    sw.load(f"{folder}/x", run[0], run[1], schedulers=run[2])
    assert_same(values(run[0]), kept, 0.0)
    steps(run, "gpt", 1)
    return beside, on, steps(run, "gpt", 2)


@pytest.mark.parametrize("plan", ["tp=2", "pp=2"])
def test_training_goes_on_and_the_moment_is_kept(pools, tmp_path, plan):
    for beside, on, again in pools[2].run(on_ranks, plan, str(tmp_path), timeout=120):
        assert beside
        assert again == on


def failing(rank, folder):
    """A disk that is full on one rank only."""
    run = make_run("mlp", "momentum", "dp=2", folder)
    steps(run, "mlp", 1)
    checkpoints = CheckpointFolder(f"{folder}/run")
    checkpoints.save(1, run[0], run[1])
    write = disk.AtomicFile.write

    def full(self, data):
        if rank == 1:
            raise OSError(errno.ENOSPC, "No space left on device", str(self.path))
        write(self, data)

    seen = []
    for background in (False, True):
        with mock.patch.object(disk.AtomicFile, "write", full):
            try:
                checkpoints.save(2, run[0], run[1], background=background)
                steps(run, "mlp", 1)
                checkpoints.wait()
            except CheckpointError as error:
                seen.append(str(error))
    dist.barrier()
    loaded = checkpoints.load(run[0], run[1])
    return seen, loaded.step, sorted(path.name for path in checkpoints.path.iterdir())


def test_an_error_of_one_rank_is_one_on_all_and_loses_nothing(pools, tmp_path):
    for seen, step, names in pools[2].run(failing, str(tmp_path), timeout=120):
        assert len(seen) == 2
        assert all("rank-00001.safetensors" in message and "No space left" in message for message in seen)
        assert (step, names) == (1, [".lock", "latest", "step-000001"])


def test_an_error_surfaces_once_at_the_next_call(tmp_path):
    net, optimizer = little()
    train(net, optimizer, 1)
    with mock.patch.object(disk.AtomicFile, "write", side_effect=OSError(errno.EIO, "the disk is broken")):
        saving = sw.save(tmp_path / "x", net, optimizer, background=True)
        while not saving.done:
            time.sleep(0.01)
    with pytest.raises(CheckpointError, match="the disk is broken"):
        sw.save(tmp_path / "y", net, optimizer)
    assert list(tmp_path.iterdir()) == []
    sw.save(tmp_path / "y", net, optimizer)
    assert [path.name for path in tmp_path.iterdir()] == ["y"]


def test_one_process_saves_beside_training_too(tmp_path):
    net, optimizer = little()
    train(net, optimizer, 2)
    generator = torch.get_rng_state()
    kept = {key: tensor.clone() for key, tensor in net.state_dict().items()}
    with slow(0.05):
        saving = sw.save(tmp_path / "x", net, optimizer, background=True)
        on = train(net, optimizer, 3)
        assert not saving.done
    assert saving.wait() == tmp_path / "x"
    net, optimizer = little(3)
    sw.load(tmp_path / "x", net, optimizer)
    assert all(torch.equal(net.state_dict()[key], value) for key, value in kept.items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert train(net, optimizer, 3) == on

"""Killed at any moment of a save, or with a full disk: the last good checkpoint loads."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import signal
import sys
import time

import pytest
import torch

import shardwright as sw
from shardwright.checkpoint import CheckpointFolder, disk, verify
from shardwright.checkpoint.folder import checkpoints_in, latest_in
from shardwright.errors import CheckpointError

from .little import little, train

EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"}


def forked(run):
    """Run something in a fork of this process; how it ended, as waitpid says it."""
    child = os.fork()
    if child == 0:
        try:
            run()
        finally:
            os._exit(7)
    return os.waitpid(child, 0)[1]


def die_at(number):
    """Kill this process before the n-th thing that it does to the disk: opens, moves, removals, writes."""
    left = [number]

    def count(*_):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(lambda event, args: count() if event in EVENTS else None)
    write = disk.AtomicFile.write

    def counted(self, data):
        count()
        write(self, data[: len(data) // 2])
        count()
        write(self, data[len(data) // 2 :])

    disk.AtomicFile.write = counted


def marked(step):
    """A run whose every number is its step, so that a mix of two would show."""
    net, optimizer = little()
    train(net, optimizer, 1)
    with torch.no_grad():
        for value in [*net.parameters(), *(item for state in optimizer.state.values() for item in state.values())]:
            value.fill_(step)
    return net, optimizer


def step_of(path):
    net, optimizer = little(5)
    loaded = sw.load(path, net, optimizer)
    numbers = {float(x) for parameter in net.parameters() for x in parameter.detach().flatten()}
    numbers |= {float(x) for state in optimizer.state.values() for value in state.values() for x in value.flatten()}
    assert len(numbers) == 1
    return int(numbers.pop()), loaded


def test_killed_before_everything_that_a_save_does(tmp_path):
    """In a folder that keeps two: pointer, names and removals included."""
    folder = CheckpointFolder(tmp_path, keep_last=2)
    for step in (1, 2):
        folder.save(step, *marked(step))
    moments, ended = 0, None
    while ended != 7 << 8:
        moments += 1

        def run(moment=moments):
            checkpoints, newest = CheckpointFolder(tmp_path, keep_last=2), marked(3)
            die_at(moment)
            checkpoints.save(3, *newest)

        ended = forked(run)
        assert ended in (signal.SIGKILL, 7 << 8)
        named = latest_in(tmp_path)
        assert step_of(named)[0] == int(named.name[-6:]) in (2, 3)
        for path in checkpoints_in(tmp_path):
            verify(path)
        CheckpointFolder(tmp_path)  # the next start
        assert not [path.name for path in tmp_path.iterdir() if path.suffix]
        if (tmp_path / "step-000003").exists() and ended == signal.SIGKILL:
            (tmp_path / "latest").write_text("step-000002\n")
            disk.remove(tmp_path / "step-000003")
        if not (tmp_path / "step-000001").exists() and ended == signal.SIGKILL:
            CheckpointFolder(tmp_path).save(1, *marked(1))
            (tmp_path / "latest").write_text("step-000002\n")
    assert moments > 25
    assert sorted(path.name for path in checkpoints_in(tmp_path)) == ["step-000002", "step-000003"]


def test_killed_while_it_replaces_one_of_the_same_name(tmp_path):
    sw.save(tmp_path / "x", *marked(0))
    seen, moment, ended = set(), 0, None
    while ended != 7 << 8:
        moment += 1

        def run(moment=moment):
            newest = marked(moment)
            die_at(moment)
            sw.save(tmp_path / "x", *newest)

        ended = forked(run)
        step, _ = step_of(tmp_path / "x")
        assert step in (moment, max(seen, default=0))
        seen.add(step)
    assert moment > 15
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def keep_saving(path):
    torch.set_num_threads(1)
    step = 0
    folder = CheckpointFolder(path, keep_last=1)
    while True:
        step += 1
        folder.save(step, *marked(step), background=step % 2 == 0)


def test_killed_twenty_times_at_random(tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    chance = random.Random(0)
    for number in range(20):
        path = tmp_path / str(number)
        process = context.Process(target=keep_saving, args=(path,))
        process.start()
        deadline = time.monotonic() + 60
        while latest_in(path) is None:
            assert time.monotonic() < deadline and process.is_alive()
            time.sleep(0.01)
        time.sleep(chance.uniform(0.0, 0.15))
        process.kill()
        process.join()
        named = latest_in(path)
        assert step_of(named)[0] == int(named.name[-6:]) > 0


# -- a full disk ---------------------------------------------------------------------------------


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("after", [0, 1, 5000, 20000, 30000])
def test_a_full_disk_loses_nothing(tmp_path, monkeypatch, after, background):
    folder = CheckpointFolder(tmp_path, keep_last=1)
    folder.save(1, *marked(1))
    write, room = disk.AtomicFile.write, [after]

    def full(self, data):
        room[0] -= len(data)
        if room[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device", str(self.path))
        write(self, data)

    with monkeypatch.context() as patch:
        patch.setattr(disk.AtomicFile, "write", full)
        with pytest.raises(CheckpointError, match=r"step-000002 could not be saved: No space left on device"):
            folder.save(2, *marked(2), background=background).wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "latest", "step-000001"]
    assert step_of(latest_in(tmp_path))[0] == 1
    folder.save(2, *marked(2))
    assert step_of(latest_in(tmp_path))[0] == 2

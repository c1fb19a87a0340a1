"""A run's folder has one writer: a second run is refused, and what a killed one leaves is taken over."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from shardwright.checkpoint import folder_lock
from shardwright.checkpoint.folder import CheckpointFolder
from shardwright.checkpoint.folder_lock import acquire, has_other_writer
from shardwright.errors import CheckpointError
from shardwright.runtime.collectives.processes import machine_name, runs
from tests.checkpoint.little import little

from .lives import losses_in
from .runs import by_hand, close, losses, trainer

ROOT = Path(__file__).parents[2]


def _hold(folder: Path, ready, locks: bool) -> None:
    if not locks:
        without_locks()
    acquire(folder)
    ready.set()
    time.sleep(600)


def without_locks(*_: object) -> None:
    """As on a file system that has none."""

    def lockf(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    fcntl.lockf = lockf  # type: ignore[assignment]


@pytest.fixture
def holder(tmp_path):
    """Starts a process that holds the folder."""
    processes = []

    def start(locks: bool = True):
        context = multiprocessing.get_context("fork")
        ready = context.Event()
        process = context.Process(target=_hold, args=(tmp_path, ready, locks))
        process.start()
        processes.append(process)
        assert ready.wait(60)
        return process

    yield start
    for process in processes:
        process.kill()
        process.join()


@pytest.mark.parametrize("locks", [True, False])
def test_a_second_writer_is_refused_and_told_who_has_it(tmp_path, monkeypatch, holder, locks):
    process = holder(locks)
    if not locks:
        monkeypatch.setattr(fcntl, "lockf", fcntl.lockf)
        without_locks()
    with pytest.raises(CheckpointError, match=rf"is in use by another run: process {process.pid} on .*since 20"):
        acquire(tmp_path, patience=1.0)
    assert has_other_writer(tmp_path) and has_other_writer(tmp_path / "checkpoints")


@pytest.mark.parametrize("locks", [True, False])
def test_the_folder_of_a_killed_writer_is_free(tmp_path, monkeypatch, holder, locks):
    process = holder(locks)
    process.kill()
    process.join()
    if not locks:
        monkeypatch.setattr(fcntl, "lockf", fcntl.lockf)
        without_locks()
    assert json.loads((tmp_path / ".lock").read_text())["process"] == process.pid
    acquire(tmp_path, patience=0.0).release()
    assert (tmp_path / ".lock").read_text() == ""


def test_a_writer_that_ends_within_a_moment_is_waited_for(tmp_path, holder):
    process = holder()
    started = time.monotonic()
    threading.Timer(1.0, process.kill).start()
    acquire(tmp_path, patience=60.0).release()
    assert time.monotonic() - started >= 0.9


def test_a_writer_on_another_machine_lives_as_long_as_it_renews(tmp_path, monkeypatch):
    """Even where the kernel's lock could be had, since that may be of one machine only."""
    monkeypatch.setattr(folder_lock, "LEASE", 2.0)
    other = {"machine": "elsewhere/1/2", "process": 7, "started": "1", "token": "x", "since": "2026-01-01"}
    (tmp_path / ".lock").write_text(json.dumps(other))
    ended = multiprocessing.get_context("fork").Event()

    def renew() -> None:
        while not ended.wait(0.1):
            os.utime(tmp_path / ".lock")

    process = multiprocessing.get_context("fork").Process(target=renew)
    process.start()
    try:
        with pytest.raises(CheckpointError, match="process 7 on elsewhere, since 2026-01-01"):
            acquire(tmp_path, patience=3.0)
    finally:
        ended.set()
        process.join()
    start = time.monotonic()
    acquire(tmp_path, patience=0.0).release()
    assert time.monotonic() - start >= 2.0, "it was watched before it was taken for dead"


def test_a_writer_that_was_taken_for_dead_ends(tmp_path, holder, monkeypatch):
    process = holder()
    other = {"machine": machine_name(), "process": os.getpid(), "token": "mine"}
    (tmp_path / ".lock").write_text(json.dumps(other))
    process.join(60)
    assert process.exitcode == 1


def test_a_folder_is_this_process_own_more_than_once(tmp_path):
    lock = acquire(tmp_path)
    assert acquire(tmp_path) is lock and acquire(tmp_path / "checkpoints") is lock
    assert not has_other_writer(tmp_path) and not has_other_writer(tmp_path / "checkpoints")
    lock.release()


def test_checkpoints_in_the_folder_of_another_run_are_read_but_not_written(tmp_path, holder, monkeypatch):
    monkeypatch.setattr(folder_lock, "PATIENCE", 0.5)
    net, optimizer = little()
    folder = CheckpointFolder(tmp_path)
    folder.save(1, net, optimizer)
    for lock in list(folder_lock._locks.values()):
        lock.release()
    holder()
    half = tmp_path / "step-000002.part"
    half.mkdir()
    other = CheckpointFolder(tmp_path)
    assert half.exists(), "what the other run is writing stays"
    assert other.load(net, optimizer).step == 1
    with pytest.raises(CheckpointError, match="is in use by another run"):
        other.save(3, net, optimizer)


def test_a_trainer_refuses_the_folder_of_one_that_runs(tmp_path, monkeypatch, holder):
    monkeypatch.setattr(folder_lock, "PATIENCE", 0.5)
    training = trainer(tmp_path)
    (tmp_path / "run").mkdir()
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=_hold, args=(tmp_path / "run", ready, True))
    process.start()
    try:
        assert ready.wait(60)
        with pytest.raises(CheckpointError, match="is in use by another run"):
            training.fit()
    finally:
        process.kill()
        process.join()
    again = trainer(tmp_path, resume="last")
    again.fit()
    close(losses(again), by_hand(2)[0])
    assert (tmp_path / "run" / ".lock").read_text() == "", "a run that has ended gives its folder free"


SCRIPT = """
import os, sys, time
from pathlib import Path
from tests.train.lives import finish, live
folder = Path(sys.argv[1])
(folder / f"rank{os.environ['RANK']}.pid").write_text(str(os.getpid()))
finish(live(folder, "dp=2", None, int(sys.argv[2]), False), folder)
"""


def started(folder: Path, steps: int, *wrapper: str) -> subprocess.Popen[bytes]:
    script = folder / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    python = [*wrapper] if wrapper else [sys.executable]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
        "--rdzv-endpoint", "127.0.0.1:0", "--no-python", *python, str(script), str(folder), str(steps),
    ]  # fmt: skip
    variables = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    with (folder / "out.txt").open("a") as out:
        return subprocess.Popen(command, cwd=ROOT, env={**os.environ, **variables}, stdout=out, stderr=out)


@pytest.mark.parametrize("wrapped", [False, True])
def test_ranks_of_a_killed_launcher_end_and_the_run_resumes(tmp_path, wrapped):
    """Also if a script stands between the launcher and the ranks, which does not notice that it is gone."""
    wrapper = tmp_path / "wrapper.sh"
    wrapper.write_text(f'#!/bin/sh\n"{sys.executable}" "$@"\n')
    wrapper.chmod(0o755)
    launcher = started(tmp_path, 100_000, *([str(wrapper)] if wrapped else []))
    try:
        deadline = time.monotonic() + 240
        while not (tmp_path / "losses").exists() or len(losses_in(tmp_path / "losses")) < 8:  # all is compiled
            assert time.monotonic() < deadline and launcher.poll() is None, (tmp_path / "out.txt").read_text()[-3000:]
            time.sleep(0.1)
    finally:
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
    ranks = [int((tmp_path / f"rank{rank}.pid").read_text()) for rank in range(2)]
    deadline = time.monotonic() + 120
    while any(map(runs, ranks)):
        assert time.monotonic() < deadline, "orphans train on"
        time.sleep(0.1)
    assert "the launcher that started this rank" in (tmp_path / "out.txt").read_text()

    steps = -(-max(step for step, _ in losses_in(tmp_path / "losses")) // 3) * 3 + 3
    assert started(tmp_path, steps).wait(300) == 0, (tmp_path / "out.txt").read_text()[-3000:]
    wanted, _ = by_hand(steps // 3)
    close(dict(losses_in(tmp_path / "losses")), wanted)

"""A run that is killed again and again, and goes on, is the run that nobody disturbed."""

import errno
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from shardwright.checkpoint import checkpoints_in, disk, verify
from shardwright.errors import CheckpointError
from shardwright.train import Checkpoints

from .lives import PLACES, Kill, losses_in, run_life
from .runs import by_hand, close, losses, parameters, trainer

KILLS = 20
PLANS = ("dp=2", "tp=2", "zero3=2", "pp=2", "single", "auto")
ROOT = Path(__file__).parents[2]


def newest(folder):
    stored = checkpoints_in(folder / "run/checkpoints")
    return max((value.step for value in stored.values()), default=0)


def test_killed_twenty_times_under_changing_plans_and_numbers_of_ranks(tmp_path):
    """Any rank, at any step, at any place in it; every loss of every life is that of the run without a kill."""
    chance = random.Random(7)
    ends = []
    for number in range(KILLS):
        plan = PLANS[number % len(PLANS)]
        size = 1 if plan == "single" else 2
        before = newest(tmp_path)
        kill = Kill(rank=chance.randrange(size), step=before + chance.randint(1, 3), place=chance.choice(PLACES))
        ended = run_life(size, tmp_path, plan, kill, 1000, chance.random() < 0.5)
        message = (tmp_path / f"rank{1 - kill.rank}.txt").read_text() if size == 2 else ""
        assert ended[kill.rank] == -9, (kill, ended, message)
        if size == 2:
            assert ended[1 - kill.rank] == 1, (kill, ended)
            assert f"rank {kill.rank} was lost" in message
        assert newest(tmp_path) >= before
        ends.append(newest(tmp_path))
    steps = -(-ends[-1] // 3) * 3 + 3  # whole epochs
    assert run_life(2, tmp_path, "dp=2", None, steps, False) == [0, 0]

    wanted, values = by_hand(steps // 3)
    seen = losses_in(tmp_path / "losses")
    assert {step for step, _ in seen} == set(range(1, steps + 1))
    for step, loss in seen:
        assert abs(loss - wanted[step]) <= 1e-10 * (1 + wanted[step]), step
    close(torch.load(tmp_path / "values.pt"), values)
    for path in checkpoints_in(tmp_path / "run/checkpoints"):
        verify(path)


def test_a_signal_to_one_process_ends_both_well_and_the_run_goes_on(tmp_path):
    def during(ranks):
        deadline = time.monotonic() + 60
        while newest(tmp_path) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(ranks[1].pid, signal.SIGTERM)

    assert run_life(2, tmp_path, "tp=2", None, 100_000, True, during=during) == [0, 0]
    done = newest(tmp_path)
    assert f"at step {done}, stopped: SIGTERM on rank 1" in (tmp_path / "run/finished").read_text()
    steps = -(-done // 3) * 3 + 3
    assert run_life(2, tmp_path, "zero3=2", None, steps, False) == [0, 0]
    wanted, values = by_hand(steps // 3)
    close(dict(losses_in(tmp_path / "losses")), wanted)
    close(torch.load(tmp_path / "values.pt"), values)


def test_torchrun_starts_a_killed_run_again(tmp_path):
    """The second rank is killed in its fourth step; the launcher starts all again, and the run goes on by itself."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--monitor-interval", "0.2",
        "-m", "tests.train.lives", str(tmp_path), "dp=2", "1",
    ]  # fmt: skip
    variables = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    wanted, values = by_hand(2)
    seen = losses_in(tmp_path / "losses")
    assert [step for step, _ in seen] == [1, 2, 3, 4, 5, 6]  # the fourth was never finished before
    close(dict(seen), wanted)
    close(torch.load(tmp_path / "values.pt"), values)


def test_a_disk_that_fills_up_in_a_run_loses_nothing(tmp_path, monkeypatch):
    wanted, values = by_hand(2)
    kept = Checkpoints(every=1, background=True)
    write, left = disk.AtomicFile.write, [40_000]

    def full(self, data):
        if self.path.name.startswith("report.html"):
            raise OSError(errno.ENOSPC, "No space left on device", str(self.path))
        left[0] -= len(data)
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device", str(self.path))
        write(self, data)

    first = trainer(tmp_path, checkpoints=kept)
    with monkeypatch.context() as patch:
        patch.setattr(disk.AtomicFile, "write", full)
        with (
            pytest.warns(UserWarning, match="the report of the run could not be written"),
            pytest.raises(CheckpointError, match="could not be saved: No space left on device"),
        ):
            first.fit()
    step = newest(tmp_path)
    assert 1 <= step < 6
    again = trainer(tmp_path, checkpoints=kept, resume="last")
    again.fit()
    close({**losses(first), **losses(again)}, wanted)
    assert min(losses(again)) == step + 1
    close(parameters(again), values)

"""`sw.launch`: functions of scripts and notebook cells on ranks, errors that come out once, nothing left behind."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import shardwright as sw
from shardwright.errors import InputError, RankError
from shardwright.runtime.collectives.processes import runs

from .ranks import run_processes


def start(fn, *args, **options):
    run_processes(1, int)  # the server that ranks are forked from is that of all tests
    return sw.launch(fn, *args, ranks=2, **options)


def test_a_closure_runs_on_all_ranks_and_the_first_result_comes_back():
    offset = 10

    def work(start):
        total = torch.tensor([float(dist.get_rank() + start + offset)])
        dist.all_reduce(total)
        return dist.get_rank(), float(total)

    assert start(work, 1) == (0, 23.0)
    assert start(work, 1, returns="all") == [(0, 23.0), (1, 23.0)]


def test_ranks_have_the_environment_of_now_and_what_torchrun_tells(monkeypatch):
    monkeypatch.setenv("SHARDWRIGHT_TEST_VARIABLE", "now")
    names = ["SHARDWRIGHT_TEST_VARIABLE", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"]
    assert start(lambda: [os.environ[name] for name in names], returns="all")[1] == ["now", "1", "1", "2", "2"]


def test_ranks_may_have_processes_of_their_own():
    def work():
        data = [torch.tensor(number) for number in range(4)]
        loader = DataLoader(data, num_workers=1, batch_size=None, collate_fn=lambda x: x)  # not picklable, so forked
        return [int(x) for x in loader]

    assert start(work) == [0, 1, 2, 3]


class Dislike(Exception):
    pass


def test_the_error_of_a_rank_is_raised_once_and_not_the_one_that_follows_from_it():
    def work():
        if dist.get_rank() == 1:
            time.sleep(0.2)
            raise Dislike("rank one does not like it")
        dist.barrier()  # fails because the other is gone

    with pytest.raises(Dislike, match="does not like it") as raised:
        start(work)
    assert "(on rank 1 of 2)" in raised.value.__notes__[0]
    assert "in work" in raised.value.__notes__[0]  # the traceback of the rank


def test_a_rank_that_is_killed_is_named():
    def work():
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    began = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 of 2 died without an error \(exit code -9"):
        start(work)
    assert time.monotonic() - began < 30


def test_the_timeout_ends_ranks_and_nothing_is_left(tmp_path):
    def work():
        (tmp_path / str(dist.get_rank())).write_text(str(os.getpid()))
        time.sleep(600)

    with pytest.raises(RankError, match=r"ranks \[0, 1\] of 2 did not end within 3"):
        start(work, timeout=3)
    assert [runs(int(path.read_text())) for path in tmp_path.iterdir()] == [False, False]


def test_a_result_that_cannot_be_sent_is_an_error():
    def work():
        return sw.parallelize(torch.nn.Linear(2, 2), plan="dp=2", example=torch.ones(2, 2))

    with pytest.raises(InputError, match="a compiled model can't be pickled"):
        start(work)


def test_launching_inside_of_a_rank_is_refused(monkeypatch):
    with pytest.raises(InputError, match=r"this process is rank \d of 2 already.*call the function itself"):
        start(lambda: sw.launch(print, ranks=2))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(InputError, match="rank 1 of 4 already, started by torchrun"):
        sw.launch(print, ranks=2)


def test_no_rank_at_all_is_refused():
    with pytest.raises(InputError, match="start at least one"):
        sw.launch(print, ranks=0)


SCRIPT = """
import os, sys, time
import torch
from torch import nn
import shardwright as sw
import linecache

print("the script runs")
torch.ones(3, requires_grad=True).sum().backward()  # after which a fork of this process could not train

cell = '''
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(self.up(x).relu()).square().mean()

def train(plan):
    torch.manual_seed(0)
    model, x = Net(), torch.randn(4, 4)
    before = model(x).item()
    return before, sw.parallelize(model, plan=plan, example=x)(x).item(), Net

def fail():
    raise ValueError("from a cell")
'''
name = "/tmp/ipykernel_1/1.py"  # in no file, as a cell of a notebook
linecache.cache[name] = (len(cell), None, cell.splitlines(True), name)
exec(compile(cell, name, "exec"))

one, two, kind = sw.launch(train, "tp=2", ranks=2)  # without a guard of __main__
assert abs(one - two) < 1e-5 and kind is Net, (one, two, kind)
try:
    sw.launch(fail, ranks=2)
except ValueError as error:
    assert 'raise ValueError("from a cell")' in error.__notes__[0], error.__notes__
print("fine", flush=True)

def stay():
    os.write(1, f"rank {os.getpid()}\\n".encode())
    time.sleep(600)

sw.launch(stay, ranks=2)
"""


def test_a_script_without_a_guard_and_a_notebook_cell_and_a_caller_that_is_killed(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    with subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, text=True, cwd=tmp_path) as script:
        lines = [script.stdout.readline().split() for _ in range(4)]
        script.kill()
    assert lines[:2] == [["the", "script", "runs"], ["fine"]]
    ranks = [int(number) for word, number in lines[2:]]
    deadline = time.monotonic() + 60
    while any(map(runs, ranks)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [number for number in ranks if runs(number)] == []

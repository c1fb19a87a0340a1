"""Errors that end a run: what people see of them under torchrun, and what a traceback leaves out."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.errors import CaptureError, InputError
from shardwright.runtime.faults.uncaught import FULL, report_uncaught, shorten, show_all

SCRIPT = '''
import sys

import torch
from torch import nn

import shardwright as sw


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        y = self.up(x)
        if "branches" in sys.argv and y.sum() > 0:
            y = y * 2
        return y.mean()


def main():
    model = sw.parallelize(Net(), example=(torch.randn(8, 8),), plan="dp=2")
    if torch.distributed.get_rank() == 1:
        raise ValueError("the file of samples is damaged")
    model(torch.randn(8, 8)).backward()


main()
'''


def run(folder: Path, *arguments: str) -> str:
    """All that somebody sees of a run that fails."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    ranks = ["--standalone", "--nproc-per-node", "2", str(script), *arguments]
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *ranks], cwd=folder, env={**os.environ, **variables},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ended.returncode == 1
    return ended.stdout


def test_an_error_of_all_ranks_is_printed_once_and_shown_last(tmp_path):
    text = run(tmp_path, "branches")
    before, _, root_cause = text.partition("Root Cause (first observed failure)")
    message = "The line decides by the values of a tensor"
    assert message in root_cause and "train.py:17" in root_cause
    printed = before[: before.index("ChildFailedError")]
    assert printed.count(message) == 1
    assert re.search(r"rank \d: shardwright.errors.CaptureError: can't capture Net at .*train.py:17 \(rank", printed)
    ours = printed[: printed.index("multiprocessing/api.py")]
    assert len(ours.splitlines()) < 30
    assert "torch/export" not in ours and "shardwright/capture" not in ours


def test_an_error_of_one_rank_is_the_root_cause(tmp_path):
    _, _, last = run(tmp_path).partition("Root Cause (first observed failure)")
    assert "ValueError: the file of samples is damaged" in last
    assert "rank      : 1" in last


class Branching(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x


def refused() -> CaptureError:
    with pytest.raises(CaptureError) as raised:
        sw.parallelize(Branching(), example=(torch.randn(2, 2),), plan="single")
    return raised.value


def test_what_export_raised_is_left_out_and_can_be_shown():
    error = refused()
    text = "".join(traceback.format_exception(error))
    assert "torch/export" not in text
    show_all(error)
    assert "torch/export" in "".join(traceback.format_exception(error))


def test_the_frames_of_the_user_stay():
    error = refused()
    shorten(error)
    files = {frame.filename for frame in traceback.extract_tb(error.__traceback__)}
    assert __file__ in files
    assert not any("shardwright/capture" in file or "/torch/" in file for file in files)
    assert FULL in "".join(traceback.format_exception(error))


@pytest.mark.parametrize(("first", "prints"), [(0, True), (None, True), (1, False)])
def test_the_first_rank_with_an_error_prints_it(first, prints, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    printed = []
    report_uncaught(InputError("no batch"), 0, lambda digest: first, lambda *error: printed.append(error))
    assert bool(printed) == prints
    line = "rank 0: shardwright.errors.InputError: no batch (rank 1 prints all of it)\n"
    assert capsys.readouterr().err == ("" if prints else line)
    assert ("prints all of it" in (tmp_path / "error.json").read_text()) == (not prints)


def test_an_error_file_that_cannot_be_written_does_not_hide_the_error(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "missing" / "error.json"))
    printed = []
    report_uncaught(InputError("no batch"), 0, lambda digest: 0, lambda *error: printed.append(error))
    assert printed
    assert "could not be written" in capsys.readouterr().err

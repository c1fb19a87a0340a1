"""A folder of checkpoints: names, the pointer, what is kept, and what a start tidies up."""

from __future__ import annotations

import shutil

import pytest

from shardwright.checkpoint import CheckpointFolder
from shardwright.errors import CheckpointError, InputError

from .little import little


def names(folder):
    return sorted(path.name for path in folder.path.glob("[!.]*"))


def fill(folder, values):
    for step, value in enumerate(values, start=1):
        folder.save(step, *little(), metrics={} if value is None else {"loss": value})


def test_names_and_the_pointer(tmp_path):
    folder = CheckpointFolder(tmp_path / "new" / "run")
    assert folder.load(*little()) is None
    fill(folder, [3.0, 2.0])
    assert names(folder) == ["latest", "step-000001", "step-000002"]
    assert (folder.path / "latest").read_text() == "step-000002\n"
    assert folder.load(*little()).step == 2
    assert folder.load(*little(), which=1).step == 1
    assert folder.load(*little(), which="step-000001").step == 1
    with pytest.raises(CheckpointError, match="step-000009 does not exist; there are step-000001, step-000002"):
        folder.load(*little(), which=9)


def test_the_last_and_the_best_are_kept(tmp_path):
    folder = CheckpointFolder(tmp_path, keep_last=2, keep_best=2, metric="loss")
    fill(folder, [5.0, 1.0, 4.0, 2.0, 9.0, float("nan"), None])
    assert names(folder) == ["latest", "step-000002", "step-000004", "step-000006", "step-000007"]
    assert folder.load(*little(), which="best").step == 2
    most = CheckpointFolder(tmp_path, metric="loss", mode="max")
    assert most.best().name == "step-000004"


def test_all_are_kept_by_default(tmp_path):
    folder = CheckpointFolder(tmp_path)
    fill(folder, [None] * 4)
    assert len(names(folder)) == 5


def test_a_lost_pointer_is_the_newest(tmp_path):
    folder = CheckpointFolder(tmp_path)
    fill(folder, [None, None])
    for text in ("step-000777\n", "", "../elsewhere"):
        (tmp_path / "latest").write_text(text)
        assert folder.find().name == "step-000002"
    (tmp_path / "latest").unlink()
    assert folder.find().name == "step-000002"


def test_a_start_removes_what_is_half_written(tmp_path):
    fill(CheckpointFolder(tmp_path), [None, None])
    shutil.copytree(tmp_path / "step-000002", tmp_path / "step-000003.part")
    (tmp_path / "step-000003.part" / "manifest.json").unlink()
    shutil.copytree(tmp_path / "step-000001", tmp_path / "step-000001.old")
    (tmp_path / "step-000002").rename(tmp_path / "step-000002.old")  # killed between two moves
    (tmp_path / "latest.part").write_text("step-0")
    (tmp_path / "notes.txt").write_text("mine")
    folder = CheckpointFolder(tmp_path)
    assert names(folder) == ["latest", "notes.txt", "step-000001", "step-000002"]
    assert folder.load(*little()).step == 2


def test_what_makes_no_sense_is_refused(tmp_path):
    with pytest.raises(InputError, match="keep_last=0"):
        CheckpointFolder(tmp_path, keep_last=0)
    with pytest.raises(InputError, match="needs a metric"):
        CheckpointFolder(tmp_path, keep_best=1)
    with pytest.raises(InputError, match="mode='most'"):
        CheckpointFolder(tmp_path, mode="most")
    fill(CheckpointFolder(tmp_path), [None])
    with pytest.raises(InputError, match="needs a metric"):
        CheckpointFolder(tmp_path).load(*little(), which="best")

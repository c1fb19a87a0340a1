"""Files and folders that have their name only when they are whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.checkpoint import disk
from shardwright.errors import CheckpointError


def test_a_text_takes_the_place_of_another_and_leaves_nothing_beside_it(tmp_path):
    for text in ("one", "two"):
        disk.replace_text(tmp_path / "latest", text)
        assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("latest", text)]


def test_a_digest_is_that_of_all_that_was_written(tmp_path):
    message = disk.write_text(tmp_path / "a", "one two")
    assert message == disk.digest_of(tmp_path / "a") and message.size == 7
    assert disk.write_text(tmp_path / "b", "one tvo") != message
    large = tmp_path / "large"
    large.write_bytes(b"x" * (disk.CHUNK + 1))
    assert disk.digest_of(large).size == disk.CHUNK + 1


def folder(path: Path, mark: bool = True) -> Path:
    path.mkdir()
    (path / "data").write_text(path.name)
    if mark:
        (path / "mark").write_text("")
    return path


def test_a_draft_gets_its_name_when_it_is_finished(tmp_path):
    path = folder(tmp_path / "x")
    (tmp_path / "x.part").mkdir()
    (tmp_path / "x.part" / "left").write_text("of a crash")

    builder = disk.begin(path, "mark")
    assert list(builder.iterdir()) == [] and (path / "data").read_text() == "x"
    (builder / "data").write_text("new")
    disk.finish(path)

    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert (path / "data").read_text() == "new"


@pytest.mark.parametrize("beside", ["x.part", "x.old"])
def test_what_a_crash_left_beside_its_name_is_found_and_kept(tmp_path, beside):
    folder(tmp_path / beside)
    assert disk.find_folder(tmp_path / "x", "mark") == tmp_path / beside

    disk.begin(tmp_path / "x", "mark")

    assert (tmp_path / "x" / "data").read_text() == beside
    assert disk.find_folder(tmp_path / "x", "mark") == tmp_path / "x"


def test_an_empty_folder_may_be_taken_and_one_with_something_else_may_not(tmp_path):
    (tmp_path / "x").mkdir()
    disk.begin(tmp_path / "x", "mark")
    folder(tmp_path / "y", mark=False)
    (tmp_path / "z").write_text("a file")
    for name in ("y", "z"):
        with pytest.raises(CheckpointError, match="exists and is not a checkpoint"):
            disk.begin(tmp_path / name, "mark")


def test_an_empty_folder_makes_room_for_what_a_crash_left(tmp_path):
    (tmp_path / "x").mkdir()
    folder(tmp_path / "x.old")
    disk.begin(tmp_path / "x", "mark")
    assert (tmp_path / "x" / "data").read_text() == "x.old"


def test_a_folder_is_removed_with_what_an_earlier_removal_left(tmp_path):
    folder(tmp_path / "x")
    folder(tmp_path / "x.old")
    disk.remove(tmp_path / "x")
    folder(tmp_path / "y.part")
    disk.remove(tmp_path / "y.part")
    assert list(tmp_path.iterdir()) == []

"""Digests are compared by the ranks in turn, those of small files by all."""

from __future__ import annotations

import pytest

import shardwright as sw
from shardwright.checkpoint import open_checkpoint
from shardwright.checkpoint.loading import STATE
from shardwright.checkpoint.ranks import CheckpointRanks
from shardwright.errors import CheckpointError

from .little import little


def refused(path, rank: int | None) -> bool:
    meeting = None if rank is None else CheckpointRanks(None)
    if meeting is not None:
        meeting.rank, meeting.size = rank, 2
    try:
        open_checkpoint(path, meeting)
    except CheckpointError as error:
        return "is damaged" in str(error)
    return False


def flip(path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_one_of_two_ranks_reads_a_large_file_and_none_if_nothing_is_to_be_checked(tmp_path):
    sw.save(tmp_path / "x", *little())
    assert not any(refused(tmp_path / "x", rank) for rank in (None, 0, 1))
    (large,) = (tmp_path / "x").glob("*.safetensors")

    flip(large)

    assert sorted(refused(tmp_path / "x", rank) for rank in (0, 1)) == [False, True]
    assert not refused(tmp_path / "x", None)


def test_a_small_file_is_read_by_all(tmp_path):
    sw.save(tmp_path / "x", *little())
    (tmp_path / "x" / STATE).write_text((tmp_path / "x" / STATE).read_text() + " ")
    assert all(refused(tmp_path / "x", rank) for rank in (None, 0, 1))


def test_what_fails_on_one_rank_is_raised_as_it_is_where_there_is_one(tmp_path):
    def fails():
        raise ZeroDivisionError("in here")

    with pytest.raises(ZeroDivisionError):
        CheckpointRanks(None).together(fails)
    assert CheckpointRanks(None).together(lambda: 3) == 3

"""Where a checkpoint is written must be seen by all ranks."""

from __future__ import annotations

from unittest import mock

import pytest

import shardwright as sw
from shardwright.checkpoint import disk
from shardwright.errors import CheckpointError

from .little import little


def test_a_folder_that_this_rank_does_not_see_is_named(tmp_path):
    unseen = mock.patch.object(disk, "begin", return_value=tmp_path / "of another machine")
    with unseen, pytest.raises(CheckpointError, match=r"is missing here: .*all ranks share"):
        sw.save(tmp_path / "x", *little())
    sw.save(tmp_path / "x", *little())

"""A damaged checkpoint is told from one beside it that is whole."""

from __future__ import annotations

import os

import shardwright as sw
from shardwright.checkpoint.manifest import MANIFEST, damage, unlisted_files

from .little import little


def test_the_newest_one_comes_first_and_the_newest_intact_one_is_named(tmp_path):
    net, optimizer = little()
    for age, name in enumerate(("c", "a", "d", "b")):
        sw.save(tmp_path / name, net, optimizer)
        os.utime(tmp_path / name / MANIFEST, (10**9 - age, 10**9 - age))
    (tmp_path / "notes").mkdir()

    assert [file.name for file in unlisted_files(tmp_path / "a")] == ["c", "d", "b"]
    (tmp_path / "c" / MANIFEST).write_text("{}")
    os.utime(tmp_path / "c" / MANIFEST, (10**9, 10**9))
    assert damage(tmp_path / "a", ["x is short"]).endswith(
        f"  - x is short\n{tmp_path / 'd'} is complete: load that one"
    )


def test_where_none_is_intact_the_error_says_so(tmp_path):
    sw.save(tmp_path / "a", *little())
    assert damage(tmp_path / "a", ["x"]).endswith("no other checkpoint next to it is complete")

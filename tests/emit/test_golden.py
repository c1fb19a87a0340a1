"""The emitted text, letter by letter, so that a change of it is looked at.

After a wanted change: SHARDWRIGHT_UPDATE=1 pytest tests/emit/test_golden.py, and read the diff.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.emit.emitted import pipeline_texts, text_of

GOLDEN = Path(__file__).parent.parent / "golden"


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("gpt", "tp=2"),
        ("gpt", "dp=2,tp=2"),
        ("gqa_fused", "tp=2"),
        ("gqa_fused", "tp=4"),
        ("gpt", "zero3=2"),
        ("resnet", "dp=2"),
        ("gpt", "zero3=2,recompute"),
        ("gpt", "dp=2,tp=2,chunked_loss=4"),
    ],
)
def test_the_text_is_the_one_that_was_last_looked_at(name, plan):
    path = GOLDEN / f"{name}-{plan.replace('=', '').replace(',', '-')}.py.txt"
    text = text_of(plan, name)
    if os.environ.get("SHARDWRIGHT_UPDATE"):
        path.write_text(text)

    assert text == path.read_text()


def test_so_are_the_texts_of_a_pipelines_stages():
    path = GOLDEN / "gpt-pp2-zb.py.txt"
    text = "\n\n".join(pipeline_texts("pp=2,zb", 2))
    if os.environ.get("SHARDWRIGHT_UPDATE"):
        path.write_text(text)

    assert text == path.read_text()

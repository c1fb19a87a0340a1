"""The scripts of docs/coming_from run on two ranks as they stand there; old and new ones end with the same weights."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.launched import launch

FOLDER = Path(__file__).parents[2] / "docs" / "coming_from"
PAGES = sorted(path.stem for path in FOLDER.glob("*.md") if path.stem != "index")
SCRIPT = re.compile(r"<!-- (before: runs|before: parses|after) -->\n```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def scripts(page: str) -> dict[str, str]:
    return dict(SCRIPT.findall((FOLDER / f"{page}.md").read_text()))


def run(text: str, folder: str) -> None:
    os.chdir(folder)
    os.environ["TORCHELASTIC_RUN_ID"] = "docs"  # by which Lightning knows torchrun
    exec(compile(text, "train.py", "exec"), {"__name__": "__main__"})
    sys.stdout.flush()
    os._exit(0)  # the weights are compared; in forked processes DDP's threads may keep one from ending


def printed(text: str, folder: Path) -> str:
    folder.mkdir()
    first, second = launch(2, run, text, str(folder), folder=folder)
    assert (first.code, second.code) == (0, 0), first.text + second.text
    (line,) = re.findall(r"^(?:norm of the weights: |loss )(\S+)$", first.text, re.MULTILINE)
    return line


@pytest.mark.parametrize("page", PAGES)
def test_old_and_new_script(page, tmp_path):
    texts = scripts(page)
    old = texts.get("before: runs")
    new = printed(texts["after"], tmp_path / "new")
    if old is None:
        compile(texts["before: parses"], page, "exec")
        assert 0 < float(new) < 10
    else:
        assert printed(old, tmp_path / "old") == new

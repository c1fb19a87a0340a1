"""The site builds without a warning, and the pages that a newcomer reads do what they say."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from shardwright.cli import main, make_parser
from shardwright.cli.arguments import COMMANDS
from tests.launched import launch

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md"))
SCRIPT = re.compile(r"<!-- file: (\S+) -->\n```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
RUN = re.compile(
    r"<!-- run -->\n((?:    [^\n]*\n)+)(?:(?:(?!<!-- run).)*?<!-- output( has)? -->\n```text\n(.*?)^```)?",
    re.MULTILINE | re.DOTALL,
)


class Fetched(HTMLParser):
    """What a browser fetches for a page: scripts, styles, fonts, pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in ("script", "img", "iframe") or (tag == "link" and values.get("rel") != "canonical"):
            self.addresses += [address for key in ("src", "href") if (address := values.get(key))]


def test_the_site_builds_and_fetches_nothing(tmp_path):
    """With warnings as errors: links, anchors, pages that are not in the navigation."""
    command = [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "-q", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "COLUMNS": "80"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in tmp_path.rglob("*.html"):
        reader = Fetched()
        reader.feed(page.read_text())
        assert not [address for address in reader.addresses if "//" in address], page
    assert "@import" not in "".join(path.read_text() for path in tmp_path.rglob("*.css"))
    api = (tmp_path / "reference.html").read_text()
    assert "optimizer steps" in api and "sw.parallelize" in api
    assert "--constraints FILE" in (tmp_path / "cli.html").read_text()


def test_the_pictures_are_those_that_are_drawn():
    names = runpy.run_path(str(DOCS / "site" / "pictures.py"))
    for path, svg in names["drawn"]():
        assert path.read_text(encoding="utf-8") == svg, f"python docs/site/pictures.py draws another {path.name}"


def commands(page: Path) -> list[tuple[str, str, str]]:
    """The commands of a page that are run, with the output that is shown below."""
    return [(block.strip(), has, output) for block, has, output in RUN.findall(page.read_text())]


@pytest.mark.parametrize("page", [DOCS / name for name in ("quickstart.md", "eight_gpus.md", "many_nodes.md")], ids=str)
def test_the_commands_of_a_page_run(page, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    for name, text in SCRIPT.findall((DOCS / "quickstart.md").read_text()):
        (tmp_path / name).write_text(text)
    assert commands(page)
    for command, has, output in commands(page):
        words = shlex.split(command)
        if words[0] == "shardwright":
            assert main(words[1:]) == 0
            printed = capfd.readouterr().out
        else:
            assert words[:3] == ["torchrun", "--standalone", "--nproc-per-node=2"]
            ranks = launch(2, run_script, str(tmp_path), words[3:], folder=tmp_path)
            assert [rank.code for rank in ranks] == [0, 0], ranks
            printed = ranks[0].text
        if has:
            assert output.strip() in " ".join(printed.split())
        elif output:
            assert rounded(printed) == rounded(output)
    sys.modules.pop("train", None)


def run_script(folder: str, words: list[str]) -> None:
    os.chdir(folder)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def rounded(text: str) -> list[tuple[str, float]]:
    """Steps with their losses; the last digits are those of another machine."""
    return [
        (step, pytest.approx(float(loss), rel=0.02, abs=2e-4))
        for step, loss in re.findall(r"step (\d+)  loss (\S+)", text)
    ]


INDENTED = re.compile(rf"^    (?:torchrun .*)?(shardwright (?:{'|'.join(COMMANDS)}) .*?)(?:   .*)?$", re.MULTILINE)
SHOWN = [(page.stem, line) for page in PAGES for line in INDENTED.findall(page.read_text()) if "..." not in line]


@pytest.mark.parametrize(("page", "line"), SHOWN)
def test_every_command_that_is_shown_parses(page, line):
    words = shlex.split(line, comments=True)[1:]
    if words[0] != "train":
        assert make_parser().parse_args(words).command == words[0]

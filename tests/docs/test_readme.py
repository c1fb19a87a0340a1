"""What the README shows is true: its Python runs, its commands parse, its generated code is generated.

After a change of generated code that you want: SHARDWRIGHT_UPDATE=1 pytest tests/docs/test_readme.py.
"""

from __future__ import annotations

import os
import re
import shlex
import textwrap
from pathlib import Path

import pytest
import torch

from shardwright.cli import make_parser
from tests.models.zoo import ZOO
from tests.runtime.ranks import run_ranks

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "README.md"
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
GENERATED = re.compile(r"(<!-- from tests/golden/(\S+) -->\n```python\n)(.*?)(?=^```$)", re.MULTILINE | re.DOTALL)
LINES = re.findall(r"^    (shardwright .*)$", PAGE.read_text(), re.MULTILINE)
COMMANDS = [shlex.split(line, comments=True)[1:] for line in LINES]


def block_with(text: str) -> str:
    (block,) = (block for block in PYTHON.findall(PAGE.read_text()) if text in block)
    return block


def attention_of(golden: str) -> str:
    """The generated method of a layer, up to the first residual."""
    method = golden[golden.index("    def block(") :]
    return textwrap.dedent(method[: re.search(r"^        x = .*\n", method, re.MULTILINE).end()])


def test_the_generated_code_is_generated():
    page = PAGE.read_text()
    ((_, name, shown),) = GENERATED.findall(page)
    wanted = attention_of((ROOT / "tests" / "golden" / name).read_text())
    if os.environ.get("SHARDWRIGHT_UPDATE"):
        PAGE.write_text(GENERATED.sub(lambda block: block[1] + wanted, page))
        shown = wanted

    assert shown == wanted


def test_a_script_with_the_one_line_trains_on_four_ranks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cases = [ZOO["gpt"]() for _ in range(4)]

    def rank(number):
        module, args, _ = cases[number]
        optimizer = torch.optim.AdamW(module.parameters())
        names = {"torch": torch, "model": module, "optimizer": optimizer, "x": args[0], "y": args[1]}
        exec(block_with("sw.parallelize(model"), {**names, "batches": [args, args]})
        return next(iter(optimizer.state.values()))["step"].item()

    assert run_ranks(4, rank) == [2.0] * 4


@pytest.mark.parametrize("text", ["sw.verify(", "sw.plan("])
def test_other_snippets_run(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module, (x, y), _ = ZOO["gpt"]()
    names = {"model": module, "x": x, "y": y, "plan": "tp=2"}
    exec("import shardwright as sw\n" + block_with(text), names)
    if text == "sw.plan(":
        assert Path("plan.json").exists() and names["plan"].size == 8


@pytest.mark.parametrize("words", [words for words in COMMANDS if words[0] != "train"], ids=" ".join)
def test_commands_parse(words):
    assert make_parser().parse_args(words).command == words[0]


def test_every_command_is_shown_or_explained_elsewhere():
    assert {words[0] for words in COMMANDS} >= {"train", "plan", "explain", "diff", "calibrate"}

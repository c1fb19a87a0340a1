"""The intermediate texts in docs/design.md are those that the compiler makes today.

After a change that you want: SHARDWRIGHT_UPDATE=1 pytest tests/docs/test_architecture.py, and read the diff.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from tests.docs.architecture import texts
from tests.house.test_imports import MAY_IMPORT, NO_TORCH

PAGE = Path(__file__).parents[2] / "docs" / "design.md"
BLOCK = re.compile(
    r"(<!-- made by tests/docs/architecture\.py: (\w+) -->\n```\w+\n)(.*?)(?=^```$)", re.MULTILINE | re.DOTALL
)


def test_the_texts_of_the_page_are_made_by_the_compiler():
    by_key, page = {name: text.strip() + "\n" for name, text in texts().items()}, PAGE.read_text()
    if os.environ.get("SHARDWRIGHT_UPDATE"):
        PAGE.write_text(BLOCK.sub(lambda block: block[1] + by_key[block[2]], page))
        page = PAGE.read_text()

    shown = {name: text for _, name, text in BLOCK.findall(page)}

    assert shown == by_key


def test_the_table_of_packages_has_all_of_them_in_the_order_of_their_imports():
    table = PAGE.read_text().split("## Packages")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?`) \| .* \| (yes|no) \|$", table, re.MULTILINE)
    listed = {
        name: torch for cell, torch in rows for name in re.findall(r"`(\w+)(?:\.py|/)`", cell)
    }  # fmt: skip

    assert set(listed) == set(MAY_IMPORT)
    for number, name in enumerate(listed):
        assert set(MAY_IMPORT[name].split()) <= set(list(listed)[:number]), name
    assert {name for name, torch in listed.items() if torch == "no"} == NO_TORCH

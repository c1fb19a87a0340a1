"""What mkdocs builds of this repository beside the pages in docs/: the API, the command line, and files of the root.

    ::: sw.parallelize        becomes the signature and the docstring
    ::: train/options.Profile  the same of a name in a module of shardwright
    $$$ plan                  becomes `shardwright plan --help`

Files of the root (CHANGELOG.md, CONTRIBUTING.md, SECURITY.md) are pages too, and links to them lead there.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
ROOT_PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md"}
WIDTH = 100


def on_files(files: Files, config: Any) -> Files:
    """Pages made of files of the root, whose links are relative to it."""
    for name, page in ROOT_PAGES.items():
        text = re.sub(r"\]\(docs/", "](", (ROOT / name).read_text(encoding="utf-8"))
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in the API and the helps, and lead links to files of the root to their pages."""
    markdown = re.sub(r"^::: (\S+)$", lambda match: documented(match[1]), markdown, flags=re.MULTILINE)
    markdown = re.sub(r"^\$\$\$ (.*)$", lambda match: helped(match[1].split()), markdown, flags=re.MULTILINE)
    for name, page in ROOT_PAGES.items():
        markdown = markdown.replace(f"](../{name}", f"]({page}")
    return markdown


def documented(name: str) -> str:
    """The signature and the docstring of a public name."""
    module, _, attribute = name.rpartition(".")
    target = getattr(importlib.import_module("shardwright" if module == "sw" else f"shardwright.{module}"), attribute)
    shown = name if module == "sw" else attribute
    text = inspect.cleandoc(target.__doc__ or "")
    assert text, f"{name} has no docstring"
    return f"### {shown}\n\n```python\n{signature(shown, target)}\n```\n\n```text\n{text}\n```\n"


def signature(shown: str, target: Any) -> str:
    """As it is called: one line if it fits, else a parameter on each."""
    parameters = inspect.signature(target).parameters.values()
    words, keyword = [], False
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword:
            words.append("*")
            keyword = True
        words.append(re.sub(r": '([^']*)'(?= =|$)| at 0x[0-9a-f]+", r": \1", str(parameter)))
    line = f"{shown}({', '.join(words)})"
    return line if len(line) <= WIDTH else f"{shown}(\n" + "".join(f"    {word},\n" for word in words) + ")"


def helped(words: list[str]) -> str:
    """The help of a command, as it prints it in 80 columns."""
    from shardwright.cli.arguments import make_parser
    from shardwright.cli.train_help import help_of_train

    if words[:1] == ["train"]:
        text = help_of_train(" ".join(words[1:]) or "settings")
    else:
        parser: Any = make_parser()
        for word in words:
            (commands,) = (action for action in parser._actions if action.dest in ("command", "action"))
            parser = commands.choices[word]
        text = parser.format_help()
    return f"```text\n{text.rstrip()}\n```\n"

"""`shardwright train --help`: the settings of `sw.Trainer` on one screen, and one of them in full.

    shardwright train --help               every setting, a line each
    shardwright train --help optimization  what is in a group
    shardwright train --help all           as jsonargparse lists them, with all types: hundreds of lines

The texts are those of the docstrings, read from the source: importing the trainer would import torch.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from ..errors import InputError, meant

SOURCE = Path(__file__).parents[1]
GROUPS = {
    "loader": ("train/options.py", "LoaderOptions"),
    "optimization": ("train/options.py", "OptimizationOptions"),
    "validation": ("train/options.py", "ValidationOptions"),
    "checkpoints": ("train/options.py", "Checkpoints"),
    "logging": ("train/options.py", "LoggingOptions"),
    "pipeline": ("options.py", "PipelineOptions"),
    "compile": ("options.py", "CompileOptions"),
}
"""Settings that are groups, with the dataclass of each."""
WIDTH = 79
HEAD = """\
usage: shardwright train CONFIG.yaml [--SETTING VALUE ...]

Train a model from a config file. Its keys are the settings below; on the
command line they override it. Docs: docs/training.md.
"""
TAIL = """
Settings with dots are in groups: --optimization.clip_norm 1.0.
  shardwright train --help optimization    what is in a group
  shardwright train --help all             everything, with types
"""
MODE = "fit, validate, compile (write plan and code only) or profile"


def asked_help(words: Sequence[str]) -> str:
    """What help is asked for: "settings", the name of one, or "" if none is."""
    for at, word in enumerate(words):
        if word in ("-h", "--help"):
            after = words[at + 1] if at + 1 < len(words) else ""
            return after if after and not after.startswith("-") else "settings"
        if word.startswith("--help="):
            return word.partition("=")[2] or "settings"
    return ""


def help_of_train(shown: str) -> str:
    """The help that is asked for."""
    if shown == "settings":
        rows = [("mode", MODE), *settings().items()]
        return "\n".join([HEAD, *(row for name, about in rows for row in _row(f"--{name}", about)), TAIL])
    if shown == "all":
        from .train import train_parser

        return train_parser().format_help()
    name = shown.removeprefix("--").partition(".")[0]
    if name in GROUPS:
        head, _, table = _docstring(*GROUPS[name]).partition("\n")
        fields = re.findall(r"^(\w[\w, ]*?)(?:  +|\n +)(.*(?:\n +.*)*)", table, re.MULTILINE)
        lines = [line for field, about in fields for line in _row(field, " ".join(about.split()))]
        return "\n".join([f"--{name}.KEY VALUE, or {name}: {{key: value}} in the file", "", head, "", *lines])
    if name in settings():
        return "\n".join(_row(f"--{name}", settings()[name]))
    raise InputError(f"there is no setting {name!r}{meant(name, [*settings(), 'all'])}")


@cache
def settings() -> dict[str, str]:
    """Every setting of `sw.Trainer` with what it is, from its docstring."""
    text = _docstring("train/trainer.py", "Trainer")
    rows = re.findall(r"^    (\w+): ((?:.|\n        )+)", text, re.MULTILINE)
    return {name: " ".join(about.split()) for name, about in rows}


def _docstring(file: str, name: str) -> str:
    tree = ast.parse((SOURCE / file).read_text(encoding="utf-8"))
    (node,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return inspect.cleandoc(ast.get_docstring(node, clean=False) or "")


def _row(name: str, about: str) -> Iterator[str]:
    """A setting and what it is, in two columns."""
    lines = textwrap.wrap(about, WIDTH - 20)
    if len(name) > 17:
        yield f"  {name}"
        name = ""
    yield f"  {name:<17} {lines[0]}"
    yield from (f"{'':<20}{line}" for line in lines[1:])

"""Generated text, and its files on disk: by content, so that nothing stale is reused.

What runs is the text in memory; files are for people and debuggers. They are written into folders of our own only:
no symbolic link is followed, and a folder that another user owns is refused, since what is shown would be theirs.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from ..capture import ImportedFunction, without_collection
from ..emit import emit
from ..errors import InputError
from ..formats import OwnFolders
from ..ir import Graph
from ..layout import Layout
from ..lower import LoweredProgram
from ..plan import Plan
from ..plan.lowering import lower
from ..probe import probing
from ..rules import Analysis, analyse
from ..runtime.model.program import load_text

_REMEDY = "pass another with compile=CompileOptions(directory=...)"
_FOLDERS = OwnFolders(content="generated code", remedy=_REMEDY)


@dataclass(frozen=True, kw_only=True)
class Generated:
    """A program, its text and file, and the module that it is."""

    program: LoweredProgram
    text: str
    path: Path
    module: ModuleType


def generate(program: LoweredProgram, directory: Path, text: str | None = None) -> Generated:
    """Write the text of a program, and load it. Where it can't be written it runs all the same, with a warning."""
    text = emit(program).text if text is None else text
    path = path_of(text, directory, program)
    try:
        _FOLDERS.write(text, path)
    except OSError as error:
        warnings.warn(
            f"generated code runs from memory, since {path} can't be written: {error.strerror}; to have it in a file, "
            f"free the disk or the directory, or {_REMEDY}",
            stacklevel=2,
        )
    name = f"shardwright_generated_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    return Generated(program=program, text=text, path=path, module=load_text(text, path, name))


def write(text: str, directory: Path, program: LoweredProgram) -> Path:
    """Write a generated file; the same content has the same name."""
    path = path_of(text, directory, program)
    try:
        _FOLDERS.write(text, path)
    except OSError as error:
        raise InputError(f"{path} can't be written: {error.strerror}; choose another directory") from error
    return path


def path_of(text: str, directory: Path, program: LoweredProgram) -> Path:
    """The path of a generated file, which says what it is. A plan's name comes from a file that people edit."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    policy = program.plan_policy.replace("=", "").replace(",", "-")
    what = "_".join(part for part in (program.graph.entry.replace("-", "_"), program.title.replace(" ", "")) if part)
    return directory / _plain(f"{program.graph.name}-{policy}") / f"{_plain(what)}_{digest}.py"


def _plain(name: str) -> str:
    """A name without separators, of a length that every file system takes."""
    return re.sub(r"[^\w.+-]", "_", name, flags=re.ASCII)[:100]


def compile_graph(
    graph: Graph,
    make_plan: Callable[[Analysis], Plan],
    *,
    storage_options: Mapping[str, Layout] | None = None,
    mode: str = "global",
    functions: Mapping[str, ImportedFunction] | None = None,
) -> tuple[Plan, LoweredProgram, str]:
    """Everything after capture: atoms, plan, lowering, text. `functions` are the user's, which may be probed."""
    with without_collection():
        analysis = analyse(graph, probing(functions))
        plan = make_plan(analysis)
        program = lower(graph, plan, analysis, storage_options=storage_options, mode=mode)
        return plan, program, emit(program).text

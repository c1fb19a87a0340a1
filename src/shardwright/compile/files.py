"""Generated text, and its files on disk: by content, so that nothing stale is reused.

What runs is the text in memory; files are for people and debuggers. They are written into folders of our own only:
no symbolic link is followed, and a folder that another user owns is refused, since what is shown would be theirs.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from ..capture import ImportedFunction, without_collection
from ..emit import emit
from ..errors import InputError
from ..ir import Graph
from ..layout import Layout
from ..lower import LoweredProgram
from ..plan import Plan
from ..plan.lowering import lower
from ..probe import probing
from ..rules import Analysis, analyse
from ..runtime.model.program import load_text

_REMEDY = "pass another with compile=CompileOptions(directory=...)"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


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
        _write(text, path)
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
        _write(text, path)
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


def _write(text: str, path: Path) -> None:
    """Write a file in a folder of our own, whole or not at all, if it does not have this text already."""
    path.parent.parent.mkdir(parents=True, exist_ok=True)
    with _opened(path.parent.parent) as above:
        with suppress(FileExistsError):  # it is checked like one that is new
            os.mkdir(path.parent.name, 0o755, dir_fd=above)
        with _opened(path.parent, above) as folder:
            if _text_at(path.name, folder) != text:
                _replace(text, path, folder)


@contextmanager
def _opened(folder: Path, above: int | None = None) -> Iterator[int]:
    """A folder that is no symbolic link; what is done by its descriptor stays there, whatever its name becomes."""
    name = folder if above is None else folder.name
    if stat.S_ISLNK(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
        raise InputError(f"{folder} is a symbolic link, and generated code is not written through one; remove it, or "
                         f"{_REMEDY}")  # fmt: skip
    descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _text_at(name: str, folder: int) -> str | None:
    """The text of a file; None if there is none, or none that is ours to keep."""
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        return file.read().decode(errors="replace") if stat.S_ISREG(os.fstat(descriptor).st_mode) else None


def _replace(text: str, path: Path, folder: int) -> None:
    part = f"{path.stem}.{secrets.token_hex(4)}.part"
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644, dir_fd=folder)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            _check_ours(path.parent, os.fstat(folder), os.fstat(descriptor).st_uid, folder)
            file.write(text)
        os.replace(part, path.name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        os.unlink(part, dir_fd=folder)
        raise


def _check_ours(path: Path, folder: os.stat_result, user: int, descriptor: int) -> None:
    """See that a folder belongs to the user that our files in it belong to, and that nobody else may write to it."""
    if folder.st_uid != user:
        raise InputError(
            f"{path} belongs to another user (id {folder.st_uid}, files written now belong to {user}), who could "
            f"change what is shown of generated code; remove it, or {_REMEDY}"
        )
    if folder.st_mode & _OTHERS_WRITE:
        os.fchmod(descriptor, stat.S_IMODE(folder.st_mode) & ~_OTHERS_WRITE)


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

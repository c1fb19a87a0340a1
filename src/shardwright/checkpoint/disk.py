"""Crash-safe files: a crash at any moment leaves what was there before.

A file or folder is first written under a temporary name, synced to disk, then renamed. A folder is
renamed before it is removed, so that a half-removed one is never taken for complete:

    step-000100.part    being written
    step-000100         complete
    step-000100.old     replaced by another of the same name, or being removed
"""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from ..errors import CheckpointError

CHUNK = 2**23
PART, OLD = ".part", ".old"


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """The size of a file and the blake2b of its bytes."""

    size: int
    blake2b: str


class AtomicFile:
    """A new file that is digested as it is written, and synced to disk when the context ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("wb")
        self._hash = hashlib.blake2b(digest_size=32)
        self.size = 0

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), CHUNK):
            part = view[start : start + CHUNK]
            self._file.write(part)
            self._hash.update(part)
        self.size += len(view)

    @property
    def digest(self) -> Digest:
        return Digest(size=self.size, blake2b=self._hash.hexdigest())

    def __enter__(self) -> AtomicFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if error is None:
                self._file.flush()
                os.fsync(self._file.fileno())


def write_text(path: Path, text: str) -> Digest:
    """Write a small file that nothing reads yet."""
    with AtomicFile(path) as file:
        file.write(text.encode())
    return file.digest


def replace_text(path: Path, text: str) -> None:
    """Replace a text atomically: readers see the old or the new one."""
    draft = path.with_name(path.name + PART)
    write_text(draft, text)
    move(draft, path)


def digest_of(path: Path) -> Digest:
    """The digest of an existing file."""
    hasher, size = hashlib.blake2b(digest_size=32), 0
    with path.open("rb") as file:
        while part := file.read(CHUNK):
            hasher.update(part)
            size += len(part)
    return Digest(size=size, blake2b=hasher.hexdigest())


def sync_folder(path: Path) -> None:
    """Sync the names in a folder to disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def move(old: Path, new: Path) -> None:
    old.replace(new)
    sync_folder(new.parent)


def remove(path: Path) -> None:
    """Remove a folder; it loses its name first."""
    away = path if path.suffix in (PART, OLD) else path.with_name(path.name + OLD)
    if away != path:
        shutil.rmtree(away, ignore_errors=True)
        move(path, away)
    shutil.rmtree(away)


# -- a folder that gets its name when it is complete ------------------------------------------


def find_folder(path: Path, mark: str) -> Path | None:
    """The complete folder of a name: a crash between two renames may have left it under its temporary name.

    A folder is complete if it has the file `mark`.
    """
    candidates = (path, path.with_name(path.name + PART), path.with_name(path.name + OLD))
    return next((folder for folder in candidates if (folder / mark).is_file()), None)


def begin(path: Path, mark: str) -> Path:
    """An empty folder to write to, renamed to `path` in the end."""
    builder = path.with_name(path.name + PART)
    if path.exists() and not (path / mark).is_file() and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(f"{path} exists and is not a checkpoint; use another name, or remove it")
    complete = find_folder(path, mark)
    if complete is not None and complete != path:
        if path.exists():
            path.rmdir()  # it is empty, see above
        move(complete, path)
    shutil.rmtree(builder, ignore_errors=True)
    builder.mkdir(parents=True)
    return builder


def finish(path: Path) -> None:
    """Rename a complete draft, replacing what had its name."""
    builder, old = path.with_name(path.name + PART), path.with_name(path.name + OLD)
    sync_folder(builder)
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        move(path, old)
    move(builder, path)
    shutil.rmtree(old, ignore_errors=True)

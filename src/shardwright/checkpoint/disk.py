"""Files written so that a crash at any moment leaves what was there before.

Whatever is to have a name is first written beside it, brought to the disk, and moved there.
A folder that is taken away is first moved, so that nothing takes a half removed one for whole:

    step-000100.part    being written
    step-000100         whole
    step-000100.old     replaced by another of the same name, or on its way out
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
    """How long a file is, and the blake2b of its bytes."""

    size: int
    blake2b: str


class AtomicFile:
    """A new file that is digested as it is written. It is on the disk when the context ends."""

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
    """Put a text in the place of another: readers see one or the other."""
    draft = path.with_name(path.name + PART)
    write_text(draft, text)
    move(draft, path)


def digest_of(path: Path) -> Digest:
    """The digest of a file that is there."""
    hasher, size = hashlib.blake2b(digest_size=32), 0
    with path.open("rb") as file:
        while part := file.read(CHUNK):
            hasher.update(part)
            size += len(part)
    return Digest(size=size, blake2b=hasher.hexdigest())


def sync_folder(path: Path) -> None:
    """Bring the names in a folder to the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def move(old: Path, new: Path) -> None:
    old.replace(new)
    sync_folder(new.parent)


def remove(path: Path) -> None:
    """Take a folder away; from the first moment on it does not have its name."""
    away = path if path.suffix in (PART, OLD) else path.with_name(path.name + OLD)
    if away != path:
        shutil.rmtree(away, ignore_errors=True)
        move(path, away)
    shutil.rmtree(away)


# -- a folder that gets its name when it is whole ---------------------------------------------


def find_folder(path: Path, mark: str) -> Path | None:
    """The whole folder that a name stands for: a crash between two moves may have left it beside its name.

    A folder is whole if it has the file `mark`.
    """
    candidates = (path, path.with_name(path.name + PART), path.with_name(path.name + OLD))
    return next((folder for folder in candidates if (folder / mark).is_file()), None)


def begin(path: Path, mark: str) -> Path:
    """An empty folder to write in, for what is to be named `path`."""
    builder = path.with_name(path.name + PART)
    if path.exists() and not (path / mark).is_file() and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(f"{path} is there and is no checkpoint; take another name, or remove it")
    complete = find_folder(path, mark)
    if complete is not None and complete != path:
        if path.exists():
            path.rmdir()  # it is empty, see above
        move(complete, path)
    shutil.rmtree(builder, ignore_errors=True)
    builder.mkdir(parents=True)
    return builder


def finish(path: Path) -> None:
    """Give a whole draft its name, in the place of what had it."""
    builder, old = path.with_name(path.name + PART), path.with_name(path.name + OLD)
    sync_folder(builder)
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        move(path, old)
    move(builder, path)
    shutil.rmtree(old, ignore_errors=True)

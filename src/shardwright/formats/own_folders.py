"""Text files in folders of our own: written whole or not at all, and never through a symbolic link.

A folder that another user owns is refused, since what we read there later, or show to people, would be theirs.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import InputError

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnFolders:
    """Reads and writes `<anything>/<folder>/<file>`.

    content     what the files are, for messages: "generated code"
    remedy      what to do about a folder that is refused: "pass another with ..."
    """

    content: str
    remedy: str

    def write(self, text: str, path: Path) -> None:
        """Write a file, if it does not have this text already."""
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        with self._opened(path.parent.parent) as above:
            with suppress(FileExistsError):  # it is checked like one that is new
                os.mkdir(path.parent.name, 0o755, dir_fd=above)
            with self._opened(path.parent, above) as folder:
                if _text_at(path.name, folder) != text:
                    self._put(text, path, folder)

    def read(self, path: Path, largest: int) -> str | None:
        """The text of a file that this user wrote; None if there is none, or one that somebody else can change."""
        try:
            with self._opened(path.parent.parent) as above, self._opened(path.parent, above) as folder:
                return _text_at(path.name, folder, largest) if _is_private(os.fstat(folder)) else None
        except (OSError, InputError):
            return None

    @contextmanager
    def _opened(self, folder: Path, above: int | None = None) -> Iterator[int]:
        """A folder that is no symbolic link; what is done by its descriptor stays there, whatever its name becomes."""
        name = folder if above is None else folder.name
        if stat.S_ISLNK(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
            raise InputError(f"{folder} is a symbolic link, and {self.content} is not written through one; remove it, "
                             f"or {self.remedy}")  # fmt: skip
        descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _put(self, text: str, path: Path, folder: int) -> None:
        part = f"{path.stem}.{secrets.token_hex(4)}.part"
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644, dir_fd=folder)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                self._check_ours(path.parent, os.fstat(folder), os.fstat(descriptor).st_uid, folder)
                file.write(text)
            os.replace(part, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            os.unlink(part, dir_fd=folder)
            raise

    def _check_ours(self, path: Path, folder: os.stat_result, user: int, descriptor: int) -> None:
        """See that a folder belongs to the user that our files belong to, and that nobody else may write to it."""
        if folder.st_uid != user:
            raise InputError(
                f"{path} belongs to another user (id {folder.st_uid}, files written now belong to {user}), who could "
                f"change what is shown of {self.content}; remove it, or {self.remedy}"
            )
        if folder.st_mode & _OTHERS_WRITE:
            os.fchmod(descriptor, stat.S_IMODE(folder.st_mode) & ~_OTHERS_WRITE)


def _text_at(name: str, folder: int, largest: int | None = None) -> str | None:
    """The text of a file; None if there is none, or none that is ours to keep."""
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or (largest is not None and status.st_size > largest):
            return None
        if largest is not None and not _is_private(status):
            return None
        return file.read(-1 if largest is None else largest).decode(errors="replace")


def _is_private(status: os.stat_result) -> bool:
    """Whether a file or a folder is this user's, and nobody else may write to it."""
    return status.st_uid == os.geteuid() and not status.st_mode & _OTHERS_WRITE

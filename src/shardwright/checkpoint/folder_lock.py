"""One writer for a folder: a lock that says who holds it, and that dies with its process.

    .lock    {"machine": ..., "process": ..., "started": ..., "token": ...}, renewed every few seconds; empty if free

The kernel's lock on this file (POSIX, which forked workers don't inherit) ends with the process. Some shared file
systems have no locks, or locks of one machine only. So whoever comes also looks at what is in the file: a process of
this machine either runs or not; one of another machine is alive as long as the file is renewed. A holder that finds
another's name in the file was taken for dead, and ends, since there is one writer.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import json
import os
import sys
import threading
import time
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..runtime.collectives.processes import began, machine_name, runs

NAME = ".lock"
BEAT = 3.0  # seconds between two renewals
LEASE = 15.0  # seconds without one after which a holder on another machine counts as gone
PATIENCE = 10.0  # seconds to wait for a holder that may be about to end
_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_BUSY = {errno.EACCES, errno.EAGAIN}

_locks: dict[Path, FolderLock] = {}  # by this process; opening the file again would end the kernel's lock


class FolderLock:
    """The lock of a folder, held by this process until `release` or its end."""

    def __init__(self, folder: Path, descriptor: int, token: str) -> None:
        self.folder, self.token = folder, token
        self._file, self._process = descriptor, os.getpid()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="shardwright-lock", daemon=True)
        self._thread.start()
        atexit.register(self.release)

    def release(self) -> None:
        """Give the folder free."""
        if self._ended.is_set() or os.getpid() != self._process:
            return
        self._ended.set()
        self._thread.join()
        atexit.unregister(self.release)
        _locks.pop(self.folder, None)
        if _identity(self._file).get("token") == self.token:
            os.ftruncate(self._file, 0)
        os.close(self._file)

    def _renew(self) -> None:
        while not self._ended.wait(BEAT):
            try:
                holder = _identity(self._file)
                os.utime(self._file)
            except OSError:  # the file system is away for now; nobody else can take the folder meanwhile
                continue
            if holder.get("token") != self.token:
                sys.stderr.write(
                    f"shardwright.errors.CheckpointError: {self.folder} was taken over by {_describe(holder)} while "
                    f"this process ({os.getpid()}) did not run; it ends, since a folder has one writer\n"
                )
                sys.stderr.flush()
                os._exit(1)


def acquire(folder: Path, patience: float | None = None) -> FolderLock:
    """Take the folder, or raise and name who has it. This process may hold it already, or a folder around it."""
    folder = folder.resolve()
    known = next((_locks[path] for path in (folder, *folder.parents) if path in _locks), None)
    if known is not None:
        return known
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return _wait_for(folder, PATIENCE if patience is None else patience)
    except OSError as error:
        raise CheckpointError(f"{folder} can't be written: {error.strerror}; choose another directory") from error


def _wait_for(folder: Path, patience: float) -> FolderLock:
    until = time.monotonic() + patience
    watched = _HolderSighting()
    while True:
        descriptor = _open(folder)
        holder = _blocking(descriptor, watched)
        if holder is None:
            lock = _take(folder, descriptor)
            if lock is not None:
                return lock
        os.close(descriptor)
        if time.monotonic() > until and not watched.undecided:
            raise CheckpointError(
                f"{folder} is in use by another run: {_describe(holder or {})}; stop that run, or choose another "
                "directory"
            )
        time.sleep(0.25)


def has_other_writer(folder: Path) -> bool:
    """Whether another process may be writing to a folder, or to the run that it is part of. Nobody waits."""
    folder = folder.resolve()
    for place in (folder, folder.parent):
        if place in _locks or not (place / NAME).is_file():
            continue
        try:
            descriptor = _open(place)
        except OSError:  # nothing here is ours to tidy
            return True
        try:
            if _blocking(descriptor, _HolderSighting()) is not None:
                return True
        finally:
            os.close(descriptor)
    return False


class _HolderSighting:
    """What has been seen of a holder on another machine."""

    def __init__(self) -> None:
        self._seen: tuple[Any, float] | None = None
        self.undecided = False  # whether it may still turn out to be gone

    def is_gone(self, mark: Any) -> bool:
        now = time.monotonic()
        if self._seen is None or self._seen[0] != mark:
            self.undecided = self._seen is None
            self._seen = (mark, now)
        gone = now - self._seen[1] > LEASE
        self.undecided = self.undecided and not gone
        return gone


def _open(folder: Path) -> int:
    return os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)


def _blocking(descriptor: int, watched: _HolderSighting) -> dict[str, Any] | None:
    """Who holds a lock file; None if it can be taken. The kernel's lock is taken where there are any."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        locks = True
    except OSError as error:
        if error.errno in _BUSY:
            return _identity(descriptor)
        if error.errno not in _NO_LOCKS:
            raise
        locks = False
    holder = _identity(descriptor)
    if not holder:
        return None
    if holder.get("machine") == machine_name():
        gone = locks or not _is_alive(holder)
    else:
        gone = watched.is_gone((holder.get("token"), os.fstat(descriptor).st_mtime_ns))
    return None if gone else holder


def _is_alive(holder: dict[str, Any]) -> bool:
    number = holder.get("process")
    return isinstance(number, int) and runs(number) and began(number) == holder.get("started")


def _take(folder: Path, descriptor: int) -> FolderLock | None:
    """Write our name; None if another was faster, where there are no locks of the kernel."""
    token = uuid.uuid4().hex
    identity = {
        "machine": machine_name(), "process": os.getpid(), "started": began(os.getpid()), "token": token,
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    content = json.dumps(identity).encode()
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, content, 0)
    os.fsync(descriptor)
    if not _has_locks(descriptor):
        time.sleep(1.0)
        if _identity(descriptor).get("token") != token:
            return None
    lock = _locks[folder] = FolderLock(folder, descriptor, token)
    return lock


def _has_locks(descriptor: int) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _identity(descriptor: int) -> dict[str, Any]:
    try:
        content = json.loads(os.pread(descriptor, 4096, 0) or b"{}")
    except ValueError:  # half-written by a process that was killed
        return {}
    return content if isinstance(content, dict) else {}


def _describe(holder: dict[str, Any]) -> str:
    machine = str(holder.get("machine", "?")).partition("/")[0]
    return f"process {holder.get('process', '?')} on {machine}, since {holder.get('since', '?')}"

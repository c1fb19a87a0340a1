"""Whether other processes of this machine are alive."""

from __future__ import annotations

import functools
import os
import socket
from pathlib import Path


@functools.cache
def machine_name() -> str:
    """Where process numbers mean the same."""
    names = Path("/proc/self/ns/pid")
    return f"{socket.gethostname()}/{os.readlink(names) if names.exists() else ''}"


def runs(number: int) -> bool:
    """Whether a process of this machine is alive; one that only waits to be reaped is not."""
    try:
        os.kill(number, 0)
        status = Path(f"/proc/{number}/stat")
        return not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except (ProcessLookupError, FileNotFoundError):
        return False
    except PermissionError:
        return True

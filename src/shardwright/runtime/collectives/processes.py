"""Whether other processes of this machine are alive."""

from __future__ import annotations

import functools
import os
import socket
from pathlib import Path


@functools.cache
def machine_name() -> str:
    """The scope in which process ids are unique. Two machines may share a host name, but not a boot id."""
    names, start = Path("/proc/self/ns/pid"), Path("/proc/sys/kernel/random/boot_id")
    began = start.read_text().strip() if start.exists() else ""
    return f"{socket.gethostname()}/{began}/{os.readlink(names) if names.exists() else ''}"


def runs(number: int) -> bool:
    """Whether a process of this machine is alive; a zombie is not."""
    try:
        os.kill(number, 0)
        status = Path(f"/proc/{number}/stat")
        return not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except (ProcessLookupError, FileNotFoundError):
        return False
    except PermissionError:
        return True

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
    boot = start.read_text().strip() if start.exists() else ""
    return f"{socket.gethostname()}/{boot}/{os.readlink(names) if names.exists() else ''}"


def began(number: int) -> str:
    """When a process of this machine was started, as the kernel counts; "" if that is not known. Ids are used again."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except (OSError, IndexError):
        return ""


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

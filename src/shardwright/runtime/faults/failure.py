"""What an error of a rank is to the others: its own failure, or the consequence of another rank's."""

from __future__ import annotations

import os
import traceback

import torch.distributed as dist

import shardwright.errors
from shardwright.errors import RankError

_PACKAGE = os.path.dirname(shardwright.errors.__file__)
_SIGNS = (
    "gloo",
    "NCCL",
    "Connection closed",
    "Connection reset",
    "Socket",
    "process group",
    "timeout caused pair closure",
)


class BrokenGroupError(RankError, dist.DistError):
    """A collective over shared memory can't complete: a rank is gone, or did not enter it in time."""


class OutOfStepError(BrokenGroupError):
    """Ranks have entered different collectives of a group as the same one."""


def is_secondary_failure(error: BaseException) -> bool:
    """Whether an error is only the consequence of another rank's: a broken collective."""
    return isinstance(error, dist.DistError) or (
        type(error) is RuntimeError and any(sign in str(error) for sign in _SIGNS)
    )


def describe(error: BaseException) -> str:
    """An error in a few lines: rank, message, location."""
    frames = traceback.extract_tb(error.__traceback__)[::-1]
    theirs = [frame for frame in frames if "site-packages" not in frame.filename]
    at = next((frame for frame in theirs if not frame.filename.startswith(_PACKAGE)), theirs[0] if theirs else None)
    where = f", at {at.filename}:{at.lineno} ({at.line})" if at is not None else ""
    return f"rank {dist.get_rank()} raised {type(error).__name__}: {error}{where}"

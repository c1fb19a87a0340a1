"""How an uncaught error ends a rank: short, printed by one rank for all that have it, and where launchers look.

    an error of shardwright    printed with the frames of the user's code only and without what it came from, since its
                               message names the line and the remedy; SHARDWRIGHT_TRACEBACK=full shows everything
    any other error            printed as Python prints it
    the same on many ranks     the first rank of a machine prints it, the others its first line
    torchrun                   gets it in the rank's error file, which it prints last of all
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from types import TracebackType

import torch

from shardwright import errors
from shardwright.errors import RankError, ShardwrightError

from .. import world

FULL = "SHARDWRIGHT_TRACEBACK=full shows the frames that are left out"
_INTERNAL = tuple(os.path.dirname(str(module.__file__)) + os.sep for module in (errors, torch))
_STANDARD = os.path.dirname(os.__file__) + os.sep
_PACKAGES = ("site-packages", "dist-packages")

FirstRank = Callable[[str], int | None]
"""Which rank of this machine prints an error with some digest; None if it can't be agreed on."""

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def report_uncaught(error: Exception, rank: int, first_rank: FirstRank, print_error: Hook) -> None:
    """Print an error that ends this rank, or say which rank prints it, and leave it for the launcher."""
    if isinstance(error, ShardwrightError):
        (show_all if world.full_tracebacks() else shorten)(error)
    text = "".join(traceback.format_exception(error))
    first = first_rank(hashlib.sha256(text.encode()).hexdigest())
    if first in (rank, None):
        print_error(type(error), error, error.__traceback__)
    else:
        kind = f"{type(error).__module__}.{type(error).__name__}".removeprefix("builtins.")
        line, *_ = str(error).splitlines() or [""]
        text = f"rank {rank}: {kind}: {line} (rank {first} prints all of it)\n"
        sys.stderr.write(text)
        sys.stderr.flush()
    write_error_file(text, secondary=isinstance(error, RankError) or first not in (rank, None))


def shorten(error: ShardwrightError) -> None:
    """Leave the user's frames of a traceback, and the error itself of a chain of them."""
    left_out = error.__cause__ is not None or error.__context__ is not None
    frames, trace = list[TracebackType](), error.__traceback__
    while trace is not None:
        if _is_internal(trace.tb_frame.f_code.co_filename):
            left_out = True
        else:
            frames.append(trace)
        trace = trace.tb_next
    shortened = None
    for frame in reversed(frames):
        shortened = TracebackType(shortened, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    error.__traceback__ = shortened
    error.__cause__, error.__suppress_context__ = None, True
    if left_out and FULL not in getattr(error, "__notes__", ()):
        error.add_note(FULL)


def _is_internal(file: str) -> bool:
    """Whether a frame is of shardwright, torch or Python itself."""
    is_standard = file.startswith(_STANDARD) and not any(folder in file for folder in _PACKAGES)
    return is_standard or file.startswith((*_INTERNAL, "<"))


def show_all(error: BaseException) -> None:
    """Let Python print what an error came from, also where it was raised to stand alone."""
    chain: BaseException | None = error
    while chain is not None:
        chain.__suppress_context__ = chain.__cause__ is not None
        chain = chain.__cause__ or chain.__context__


def write_error_file(text: str, *, secondary: bool) -> None:
    """Leave an error where torchrun looks for it, in the form that it expects.

    torchrun calls the earliest error the root cause, by whole seconds: one that follows from another rank's, or repeats
    it, is a second later at least.
    """
    path = world.error_file()
    if path is None:
        return
    extra = {"py_callstack": text, "timestamp": str(int(time.time()) + secondary)}
    try:
        path.write_text(json.dumps({"message": {"message": text.strip().splitlines()[-1], "extraInfo": extra}}))
    except OSError as error:
        sys.stderr.write(f"the error could not be written to torchrun's error file {path}: {error}\n")

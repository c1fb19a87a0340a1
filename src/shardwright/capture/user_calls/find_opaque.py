"""What can't be captured, found and made opaque: the smallest submodule whose own code fails, or its parent.

An error of capture knows the submodule it came from. With CompileOptions(opaque="auto") that submodule is marked,
the user is warned, and capture tries again.
"""

from __future__ import annotations

import warnings

from torch import nn

from ...errors import CaptureError, InputError
from .opaque import MARK, OpaqueRequest, opaque_parts, opaque_request

AUTO = "_shardwright_auto"


def find_opaque(module: nn.Module, how: str) -> nn.Module:
    """Have capture leave uncompiled what it can't capture (how="auto"), or only what is marked ("marked")."""
    if how not in ("marked", "auto"):
        raise InputError(f'opaque={how!r}; use "marked" (what sw.opaque marks) or "auto" (what can\'t be captured too)')
    if how == "auto":
        vars(module)[AUTO] = True
    return module


def widen(module: nn.Module, error: CaptureError) -> bool:
    """Make opaque what stood in the way of a capture, or its parent if it was so already; whether there was such."""
    path = error.path
    marked = dict(opaque_parts(module))
    if AUTO not in vars(module) or not path:
        return False
    if path in marked:  # as it is it can't be opaque either
        vars(marked[path]).pop(MARK)
        path = path.rpartition(".")[0]
    if not path:
        return False
    reason = one_line(error)
    vars(module.get_submodule(path))[MARK] = OpaqueRequest(reason=reason)
    warnings.warn(
        f"{_python_path(path)} is not captured and runs uncompiled, replicated on every device. {reason}",
        UserWarning,
        stacklevel=4,
    )
    return True


def name_submodule(error: CaptureError) -> CaptureError:
    """The error with the submodule that it is about, as one would write it."""
    if error.path is None:
        return error
    if error.path:
        text = str(error).replace("sw.opaque(submodule)", f"sw.opaque({_python_path(error.path)})")
    else:
        own = "sw.opaque(submodule).\nIt stands in the forward of the model itself: move it to a submodule for that, or"
        own += "\ncompile heavy submodules only and leave the model as it is, with CompileOptions(parts=[...])"
        text = str(error).replace("sw.opaque(submodule)", own)
    return CaptureError(text, error.path)


def one_line(error: CaptureError) -> str:
    """An error in one line: where, the code, what is wrong."""
    where, *lines = str(error).splitlines()
    code = f" `{lines.pop(0).strip()}`" if lines and lines[0].startswith("    ") else ""
    where = where.split(" at ", 1)[-1].rsplit("/", 1)[-1] if code else where
    return f"{where}{code}{': ' if lines else ''}{' '.join(lines).split('. ')[0]}"


def _python_path(path: str) -> str:
    """A submodule as one would write it."""
    return "model" + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in path.split("."))


def notes_of(module: nn.Module) -> list[str]:
    """What was made opaque unasked, and why."""
    reasons = ((path, getattr(opaque_request(part), "reason", "")) for path, part in opaque_parts(module))
    return [f"{path} runs uncompiled, replicated on every device: {reason}" for path, reason in reasons if reason]

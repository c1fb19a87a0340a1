"""Where a traced node comes from: the module path, the user's source line, the region."""

from __future__ import annotations

import linecache
import os
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch.fx.proxy import TracerBase

from ...ir import SourceLine
from ..tracing.node_notes import REGION
from .graph_builder import OpOrigin

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_START = os.path.join(
    _OURS, "tracing", "export.py"
)  # whoever is above it in a stack called capture, and is not the model
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in [^\n]*(?:\n(?!\s*File ")\s*([^\n]*))?')
_HOUSE = re.compile(r"/transformers/(modeling_utils|utils/|integrations/|modeling_layers|masking_utils|activations)")


@contextmanager
def user_frames() -> Iterator[None]:
    """Let torch record the user's frames with every node, helper functions included (it records only `forward`s)."""
    tracer: Any = TracerBase
    original = tracer._filter_traceback_frames

    def keep(_: object, stack: traceback.StackSummary) -> traceback.StackSummary:
        start = max((at for at, frame in enumerate(stack) if frame.filename == _START), default=-1)
        frames = [frame for frame in stack[start + 1 :] if not frame.filename.startswith((_TORCH, _OURS, "<"))]
        return traceback.StackSummary.from_list(frames)

    try:
        tracer._filter_traceback_frames = keep
        yield
    finally:
        tracer._filter_traceback_frames = original


def origin_of(meta: dict[str, Any], *, no_grad: bool, autocast: str | None) -> OpOrigin:
    """The place of an exported node, from the metadata that export left on it."""
    stack = list((meta.get("nn_module_stack") or {}).items())
    path = module = owner = ""
    if stack:
        path, module = _call_path(*stack[-1]), _clean(stack[-1][1][0])
    for key, entry in stack:
        name = entry[1] if isinstance(entry[1], str) else entry[1].__module__
        if not name.startswith(("torch.nn.", "transformers.activations.")):
            owner = _call_path(key, entry)
    region = meta.get(REGION)
    lines = _lines_of(meta.get("stack_trace"))
    return OpOrigin(
        path=path, module=module, owner=owner, source=lines[-1] if lines else None, callers=lines[:-1], region=region,
        autocast=autocast, no_grad=no_grad,
    )  # fmt: skip


def _call_path(key: str, entry: tuple[str, Any]) -> str:
    """The path "blocks.0.attn@1" of the key "L__self__blocks.0.attn@1". In branches the key is a mere number."""
    key = entry[0] if key.isdigit() else key
    for prefix in ("L__self___", "L__self__", "L['self']."):
        if key.startswith(prefix):
            key = key[len(prefix) :]
    return _clean(key)


def _clean(path: str) -> str:
    path = re.sub(r"\['?([^'\]]+)'?\]", r".\1", path.removeprefix("L['self']"))
    return ".".join(part for part in path.split(".") if part and part != "_orig_mod")


def source_of(trace: str | None) -> SourceLine | None:
    """The innermost line of a stack trace that is not torch's or ours."""
    lines = _lines_of(trace)
    return lines[-1] if lines else None


@lru_cache(maxsize=4096)
def _lines_of(trace: str | None) -> tuple[SourceLine, ...]:
    """The user's lines in a stack trace, from the outermost to the innermost that says something."""
    lines: list[SourceLine] = []
    for file, line, code in _FRAME.findall(trace or ""):
        if file.startswith((_TORCH, _OURS, "<")):
            continue
        if _HOUSE.search(file) and lines and "modeling_" in lines[-1].file:
            continue
        text = code.strip() or linecache.getline(file, int(line)).strip()
        lines.append(SourceLine(file=file, line=int(line), code=text))
    return tuple(lines)

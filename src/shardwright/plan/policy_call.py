"""The call of a policy: the analysis of the graph that it is called with, and the lines that its verbs are on."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from ..ir import Graph
from ..rules import Analysis
from .constraint_kinds import ConstraintSource, Target

_ANALYSIS: ContextVar[Analysis | None] = ContextVar("_ANALYSIS", default=None)


@contextmanager
def policy_call(analysis: Analysis) -> Iterator[None]:
    """While a policy runs, its builder uses this analysis, which knows ops that were probed; a graph does not."""
    token = _ANALYSIS.set(analysis)
    try:
        yield
    finally:
        _ANALYSIS.reset(token)


def analysis_of_call(graph: Graph) -> Analysis | None:
    """The analysis of a graph that a policy is called with; None outside of such a call."""
    analysis = _ANALYSIS.get()
    return analysis if analysis is not None and analysis.graph is graph else None


def calling_line(verb: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ConstraintSource:
    """The line of the policy that calls a verb, and the call in short. For verbs only: it looks two calls up."""
    frame = sys._getframe(2)
    shown = [_shown(arg) for arg in args]
    while shown and shown[-1] in ("None", "''"):
        shown.pop()
    shown += [f"{name}={_shown(value)}" for name, value in kwargs.items() if value is not None]
    where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    return ConstraintSource(text=f"{verb}({', '.join(shown)})", where=where)


def _shown(value: Any) -> str:
    if isinstance(value, Target):
        fields = {"modules": "module", "classes": "type", "ops": "op", "lines": "line", "parameters": "parameter"}
        names = {short: getattr(value, long) for long, short in fields.items() if getattr(value, long)}
        return f"select({', '.join(f'{key}={v[0] if len(v) == 1 else v!r}' for key, v in names.items())})"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

"""Why a model could not be captured, in words that name the user's line and a way out."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator

from torch import nn

from ..errors import CaptureError
from ..ir import SourceLine
from .building.source_lines import source_of

_BRANCH = (
    "guardondatadependent", "data-dependent", "could not guard", "cannot evaluate", "dynamic control flow",
    "datadependentoutput", "dynamicoutputshape",
)  # fmt: skip
_ITEM = ("_local_scalar_dense", ".item()", "aten.item", "unbacked")


def explain(module: nn.Module, error: BaseException) -> CaptureError:
    """The error to raise for a failed trace."""
    reason = str(error).strip().split("\n\n")[0]
    where = _user_line(error) or source_of(_quoted_trace(str(error)))
    at = f" at {where.file}:{where.line}\n    {where.code}" if where else ""
    advice = _advice(str(error), type(error).__name__, reason)
    return CaptureError(f"can't capture {type(module).__name__}{at}\n{advice}", culprit(module, error))


def with_source_line(module: nn.Module, refused: CaptureError, error: BaseException) -> CaptureError:
    """A refusal that was raised while the model ran, with the line that led to it."""
    where = _user_line(error)
    if where is not None and f"{where.file}:" not in str(refused):
        name = type(module).__name__
        refused.args = (f"can't capture {name} at {where.file}:{where.line}\n    {where.code}\n{refused}",)
    if refused.path is None:
        refused.path = culprit(module, error)
    return refused


def culprit(module: nn.Module, error: BaseException) -> str:
    """The path of the innermost submodule whose code an error came from."""
    paths = {id(vars(part)): path for path, part in module.named_modules()}  # in a trace they are proxies
    innermost = ""
    for cause in causes(error):
        for frame, _ in traceback.walk_tb(cause.__traceback__):
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module):
                innermost = paths.get(id(vars(owner)), innermost)
    return innermost


def unsupported(what: str, source: SourceLine | None, remedy: str) -> CaptureError:
    """The error for something that traced but that a graph can't say."""
    at = f" at {source.file}:{source.line}\n    {source.code}\n" if source else ": "
    return CaptureError(f"can't capture the model{at}{what}. {remedy}")


def _advice(text: str, kind: str, reason: str) -> str:
    low = f"{kind} {text}".lower()
    if any(word in low for word in _BRANCH):
        return (
            "The line decides by the values of a tensor (a branch, a loop, or a shape that depends on data), and a\n"
            "graph has no values to decide by. Either write the branch with torch.cond(predicate, one, other, inputs)\n"
            "or torch.where, or keep the submodule out of the graph with sw.opaque(submodule)."
        )
    if any(word in low for word in _ITEM):
        return (
            "The line takes a number out of a tensor (.item(), .tolist(), int(tensor)), and a graph has no numbers in\n"
            "its tensors. Keep it a tensor, compute it outside of the model and pass it, or keep the submodule out of\n"
            "the graph with sw.opaque(submodule)."
        )
    kinds = re.search(r"Unsupported input type <class '([^']+)'>", text)
    if kinds is not None:
        return (
            f"An argument is a {kinds[1]}, of which nobody can tell whether it is the same at the next call. Pass\n"
            "tensors, numbers, strings, enums, dtypes, slices, or dataclasses and plain objects of these; what is\n"
            "fixed belongs into the module."
        )
    return f"{kind}: {reason}\nIf this part can't be written in another way, keep it out with sw.opaque(submodule)."


def causes(error: BaseException) -> Iterator[BaseException]:
    """An error and what it came from, outermost first."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def _user_line(error: BaseException) -> SourceLine | None:
    """The innermost frame of the user's in the traceback of an error, or of what caused it."""
    line: SourceLine | None = None
    for cause in causes(error):
        line = source_of("".join(traceback.format_tb(cause.__traceback__))) or line
    return line


def _quoted_trace(text: str) -> str:
    """Some errors of torch carry the user's frames only in their text."""
    return "\n".join(re.findall(r'File "[^"]+", line \d+, in [^\n]*(?:\n[^\n]*)?', text))

"""The right-hand side of an op's line: as its definition prints it (`OpSpec.prints`), else as `torch.ops`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..errors import LoweringError
from ..ir import Op
from ..lower import Size
from ..ops import spec_of
from ..ops.printing import Printer, Printing, fallback, operator
from .sizes import SizeNames


def returns_list(op: Op) -> bool:
    """Whether an op returns a list, be it of one tensor."""
    return spec_of(op.target).returns_list or op.target.endswith(".Sequence")


def is_user_function(op: Op) -> bool:
    """Whether an op is a function of the user's, which a file imports."""
    return op.target.startswith("call.") and spec_of(op.target).prints is None


def call_text(op: Op, names: Mapping[int, str], sizes: SizeNames, parts: Mapping[str, int]) -> str:
    """The right-hand side of an op's line."""

    def size_text(value: Any) -> str | None:
        return sizes.text(value) if isinstance(value, Size) else None

    printing = Printing(op, names, size_text, parts)
    if is_user_function(op):
        shown = ", ".join(printing.show(value) for _, value in op.arguments)
        return f"{function_name(op.target.removeprefix('call.'))}({shown})"
    if op.target.startswith("weights."):
        plain = call_text(replace(op, target=op.target.removeprefix("weights.")), names, sizes, parts)
        return f"self.weights.{plain.removeprefix('F.').removeprefix('torch.')}"
    text = _printer(op)(printing)
    if not printing.unread or op.target.startswith("comm."):
        return text
    if not op.target.startswith("aten."):
        raise LoweringError(f"{op}: generated code has no place for its argument {', '.join(printing.unread)}")
    return fallback(printing)


def _printer(op: Op) -> Printer:
    spec = spec_of(op.target)
    sign = spec.operator.get(op.target.rpartition(".")[2])
    return operator(sign) if sign is not None else spec.prints or fallback


def function_name(path: str) -> str:
    """The name of a user's function in the file. No leading underscores: a class would mangle `__main___f`."""
    return "_".join(part.strip("_") for part in path.replace("<", "").replace(">", "").split("."))

"""The deviation of two runs, and the tolerance.

    |a - b|  <=  tol * (max |b| + the model's largest gradient)

The second term is needed because some gradients are zero in exact arithmetic (the bias of a key
in attention): their rounding noise is as large as that of the other gradients, and only the model's
own scale tells how large that may be.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text
from torch import Tensor

from ..errors import ParityError, raise_all

Kind = Literal["output", "gradient", "buffer", "parameter", "eval output", "capture"]

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One compared tensor: its deviation and what is allowed. `plan` if several are compared."""

    kind: Kind
    name: str
    deviation: float
    allowed: float
    plan: str = ""

    @property
    def passed(self) -> bool:
        return self.deviation <= self.allowed

    @property
    def ratio(self) -> float:
        """The deviation relative to what is allowed."""
        if self.deviation == 0.0:
            return 0.0
        return self.deviation / self.allowed if self.allowed else math.inf


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Report:
    """Every compared tensor. Prints as a table; true if all are within tolerance."""

    title: str
    rows: tuple[Row, ...]
    tolerance: float
    notes: tuple[str, ...] = field(default=())

    @property
    def passed(self) -> bool:
        return bool(self.rows) and all(row.passed for row in self.rows)

    @property
    def worst(self) -> Row:
        """The row with the largest ratio."""
        return max(self.rows, key=lambda row: row.ratio)

    @property
    def failures(self) -> tuple[Row, ...]:
        """The tensors beyond tolerance, worst first."""
        return tuple(sorted((row for row in self.rows if not row.passed), key=lambda row: -row.ratio))

    def __bool__(self) -> bool:
        return self.passed

    def raise_on_failure(self) -> Report:
        """This report, or a ParityError that lists what differs."""
        if self.passed:
            return self
        lines = [f"{_full(row)}: {row.deviation:.2e} off, {row.allowed:.2e} allowed" for row in self.failures]
        if len(lines) > 12:
            lines = [*lines[:12], f"... and {len(lines) - 12} more"]
        advice = "find the first op that differs with shardwright.verify.first_difference(model, plan, example=...)"
        raise_all(ParityError, f"{self.title}: the program differs from the original;", [*lines, advice])
        return self

    def __rich__(self) -> Group:
        table = Table(title=self.title, title_justify="left")
        several = any(row.plan for row in self.rows)
        for name in (*(["plan"] if several else []), "compared", "tensors", "worst", "deviation", "allowed", ""):
            table.add_column(name, justify="right" if name in ("tensors", "deviation", "allowed") else "left")
        for plan, kind in dict.fromkeys((row.plan, row.kind) for row in self.rows):
            group = [row for row in self.rows if (row.plan, row.kind) == (plan, kind)]
            worst = max(group, key=lambda row: row.ratio)
            table.add_row(*([plan] if several else []), *_cells(worst, len(group)))
        for row in self.failures[:10]:
            table.add_row(*([row.plan] if several else []), *_cells(row))
        lines = [Text(note) for note in self.notes]
        return Group(table, Text(self._verdict(), style="green" if self.passed else "red"), *lines)

    def _verdict(self) -> str:
        if not self.rows:
            return "nothing was compared"
        worst = self.worst
        worst_line = f"worst: {_full(worst)}, {worst.deviation:.1e} off, {worst.allowed:.1e} allowed"
        return (
            f"{'the same' if self.passed else f'{len(self.failures)} of {len(self.rows)} tensors differ'}; {worst_line}"
        )

    def __str__(self) -> str:
        return render(self)

    __repr__ = __str__  # what a prompt shows


def _full(row: Row) -> str:
    return f"{row.kind} {row.name}" + (f" under {row.plan}" if row.plan else "")


def _cells(row: Row, count: int | None = None) -> tuple[str | Text, ...]:
    mark = Text("same", style="green") if row.passed else Text("differs", style="red")
    many = "" if count is None else str(count)
    return row.kind, many, Text(row.name), f"{row.deviation:.1e}", f"{row.allowed:.1e}", mark


def render(item: object, width: int = 120) -> str:
    """A rich renderable as plain text."""
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, legacy_windows=False).print(item)
    return out.getvalue().rstrip("\n")


def deviation(a: Tensor | None, b: Tensor | None) -> float:
    """max |a - b|; equal infinities and NaNs don't deviate; another shape, or a NaN on one side only, is infinite."""
    if a is None or b is None:
        present = a if b is None else b
        return 0.0 if present is None or not present.numel() or not bool(present.any()) else math.inf
    if a.shape != b.shape:
        return math.inf
    if not b.numel():
        return 0.0
    wide = torch.complex128 if b.is_complex() else torch.float64
    a, b = a.detach().to(wide), b.detach().to(wide)
    same = (a == b) | (a.isnan() & b.isnan())
    gap = torch.where(same, 0.0, (a - b).abs()).max()
    return math.inf if bool(gap.isnan()) else float(gap)


def largest(tensors: Iterable[Tensor | None]) -> float:
    """The largest finite absolute value."""
    most = 0.0
    for tensor in tensors:
        if tensor is not None and tensor.numel():
            size = (tensor.to(torch.uint8) if tensor.dtype is torch.bool else tensor.detach()).abs()
            most = max(most, float(torch.where(size.isfinite(), size, 0).max()))
    return most


def compare(
    kind: Kind, mine: Mapping[str, Tensor | None], original: Mapping[str, Tensor | None], scale: float, tolerance: float
) -> list[Row]:
    """A row for every tensor of the original; what only one side has deviates infinitely, unless it is zero."""
    rows = []
    for name in dict.fromkeys((*original, *mine)):
        a, b = mine.get(name), original.get(name)
        allowed = tolerance * (largest([b]) + scale)
        rows.append(Row(kind=kind, name=name, deviation=deviation(a, b), allowed=allowed))
    return rows


def worst_of(runs: Iterable[Sequence[Row]]) -> tuple[Row, ...]:
    """One row per tensor: the worst of all ranks and steps."""
    worst: dict[tuple[str, str], Row] = {}
    for rows in runs:
        for row in rows:
            known = worst.get((row.kind, row.name))
            if known is None or row.ratio > known.ratio:
                worst[row.kind, row.name] = row
    return tuple(worst.values())

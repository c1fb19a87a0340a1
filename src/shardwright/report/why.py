"""Why an op is split as it is: the cost of every alternative."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..plan import Plan
from ..plan.digest import atom_kinds
from ..plan.folding import star
from ..plan.joint import stage_alternatives
from ..plan.whatif import Alternative, WhatIfQuery, alternatives, find_ops
from ..rules import FAN, PASS_PARTIAL, Analysis
from ..verify.measure import render
from .communication import format_bytes
from .conditions import PlanConditions
from .text import format_time

MOST = 24  # alternatives that are priced

CHOICE_TEXT = {FAN: "replicated, gradient a pending sum"}


@dataclass(frozen=True, kw_only=True)
class Why:
    """The ways to split an op (or the same op of all layers), fastest first. Prints as a table."""

    query: WhatIfQuery
    ways: tuple[Alternative, ...]

    @property
    def chosen(self) -> Alternative:
        return next(way for way in self.ways if way.chosen)

    def __rich__(self) -> Group:
        return Group(*self._head(), self._table(), *self._foot())

    def __str__(self) -> str:
        return render(self)

    def _head(self) -> Iterator[RenderableType]:
        analysis, names = self.query.analysis, self.query.ops
        op = analysis.graph.by_name[names[0]]
        count = f", {len(names)} times" if len(names) > 1 else ""
        yield Text(f"{names[0] if len(names) == 1 else star(names[0])}{count}", style="bold")
        rule = analysis.signatures[op.name].rule
        values = analysis.graph.values
        shapes = ", ".join(str(list(values[name].shape)) for name in (*op.inputs, *op.outputs[:1]))
        yield Text(f"  {f'{op.source}; ' if op.source else ''}rule {rule.text if rule else 'none'}; shapes {shapes}")
        others = [way for way in self.ways if not way.chosen]
        line = f"split {self._choice_text(self.chosen.choice)}: predicted step time {format_time(self.chosen.seconds)}"
        if others:
            best = min(others, key=self._compared)
            line += f"; the best alternative {_change(self._compared(best), self.chosen.seconds)}"
            line += "" if self._staged else ", others following"
        yield Text(line)

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        table.add_column("")
        table.add_column("split")
        for head in ("alone", "", "memory", *(() if self._staged else ("if others follow", ""))):
            table.add_column(head, justify="right", no_wrap=True)
        base = self.chosen
        for way in self.ways:
            table.add_row(
                "*" if way.chosen else "",
                Text(self._choice_text(way.choice)),
                *(("can't run", "") if self._staged and math.isinf(way.seconds) else _times(way.seconds, base.seconds)),
                format_bytes(way.memory) if math.isfinite(way.memory) else "-",
                *(() if self._staged else _times(way.follow, base.seconds)),
            )
        return table

    @property
    def _staged(self) -> bool:
        return self.query.plan.is_pipeline

    def _compared(self, way: Alternative) -> float:
        """The step time by which alternatives are compared; of a plan with microbatches no other op can follow."""
        return way.seconds if self._staged else way.follow

    def _foot(self) -> Iterator[RenderableType]:
        if len(self.ways) >= MOST:
            yield Text(f"these are the {len(self.ways)} best taken alone; others were left out", style="dim")
        yield Text("* as planned. alone: predicted time and memory of a step if nothing else changes.")
        if not self._staged:
            yield Text(
                "if others follow: the step of the best plan on this mesh, within the memory limit, with this split."
            )

    def _choice_text(self, choice: Mapping[str, str]) -> str:
        """A choice as text: "dp: ma (batch), tp: n (weights)"."""
        analysis = self.query.analysis
        kinds, signature = atom_kinds(analysis), analysis.signatures[self.query.ops[0]]

        def role_text(picked: str) -> str:
            role = signature.picked(picked)
            if role is not None:
                return f"{picked} ({kinds.get(role.atom, 'other')})"
            return (
                "a pending sum passes through" if picked.startswith(PASS_PARTIAL) else CHOICE_TEXT.get(picked, picked)
            )

        return ", ".join(f"{axis}: {role_text(picked)}" for axis, picked in choice.items()) or "not split"


def why(plan: Plan, analysis: Analysis, op: str, conditions: PlanConditions) -> Why:
    """Why a plan splits an op as it does."""
    query = WhatIfQuery(
        analysis=analysis,
        cluster=conditions.cluster,
        training=conditions.training,
        plan=plan,
        ops=find_ops(analysis, plan, op),
        replica_axes=conditions.replica_axes,
        limit=conditions.limit,
    )
    ways = stage_alternatives(query, MOST) if plan.is_pipeline else alternatives(query, MOST)
    return Why(query=query, ways=ways)


def _times(seconds: float, base: float) -> tuple[str, str]:
    if not math.isfinite(seconds):
        return "does not fit", ""
    change = seconds / base - 1
    return f"{1e3 * seconds:.2f} ms", "" if abs(change) < 5e-5 else f"{100 * change:+.2f} %"


def _change(seconds: float, base: float) -> str:
    if not math.isfinite(seconds):
        return "does not fit"
    kind = "slower" if seconds >= base else "FASTER"
    return f"is {format_time(abs(seconds - base))} ({100 * abs(seconds / base - 1):.2f} %) {kind}"

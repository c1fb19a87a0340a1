"""Two plans compared: where they differ, what both cost, and what each difference costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..cluster import Cluster
from ..cost import TrainingSetup
from ..ir import Graph
from ..ir.paths import layer_of
from ..plan import Plan
from ..plan.folding import star
from ..plan.joint import price_plan
from ..probe import probing
from ..rules import Analysis, analyse
from ..storage import Replicated
from ..verify.measure import render
from .communication import format_bytes
from .conditions import PlanConditions, made_for, spelled_out
from .screen import KINDS
from .text import format_time


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """A decision in which two plans differ."""

    what: str  # "mesh", "policy", "train", "storage", ...
    name: str
    a: str
    b: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PartDifference:
    """The change in a step of the first plan if one part of the model is taken from the second: seconds and bytes."""

    name: str
    ops: int  # that are split differently
    stored: int  # parameters that are stored differently
    seconds: float
    memory: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TotalDifference:
    """A number that both plans predict: seconds, or bytes of memory."""

    what: str
    a: float
    b: float
    bytes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Difference:
    """All differences of two plans and their costs. Prints as tables; true if there are any."""

    names: tuple[str, str]
    rows: tuple[Changed, ...]
    totals: tuple[TotalDifference, ...] = ()
    parts: tuple[PartDifference, ...] = ()
    why_not: str = ""  # why parts have no cost, if it was requested

    def __bool__(self) -> bool:
        return bool(self.rows)

    def __rich__(self) -> Group:
        if not self.rows:
            return Group(Text("the plans make the same decisions"))
        parts: list[RenderableType] = [self._decisions()]
        if self.parts:
            parts += [
                Text("change in a step of the first plan with only this part taken from the second"),
                self._parts(),
            ]
        if self.why_not:
            parts.append(Text(self.why_not))
        return Group(*parts, *([self._totals()] if self.totals else []))

    def __str__(self) -> str:
        return render(self)

    __repr__ = __str__  # what a prompt shows

    def _decisions(self) -> Table:
        table = Table("", "", *self.names)
        for row in self.rows:
            table.add_row(*(Text(cell) for cell in (row.what, row.name, row.a, row.b)))
        return table

    def _parts(self) -> Table:
        table = Table("part")
        for head in ("ops", "parameters", "time", "memory"):
            table.add_column(head, justify="right")
        for part in self.parts:
            time = f"{1e3 * part.seconds:+.3f} ms" if abs(part.seconds) > 5e-7 else "the same"
            memory = f"{'+' if part.memory > 0 else '-'}{format_bytes(abs(part.memory))}"
            changed = (str(part.ops), str(part.stored), time, memory if abs(part.memory) >= 1 else "the same")
            table.add_row(Text(part.name), *changed)
        return table

    def _totals(self) -> Table:
        table = Table(title="predicted cost", title_justify="left")
        table.add_column("")
        for head in (*self.names, "difference", ""):
            table.add_column(head, justify="right")
        for total in self.totals:
            format_value = format_bytes if total.bytes else format_time
            change = total.b - total.a
            sign = "+" if change > 0 else "-" if change < 0 else ""
            part = f"{100 * change / total.a:+.1f} %" if total.a and format_value(total.a) != "0" and change else ""
            table.add_row(
                total.what, format_value(total.a), format_value(total.b), f"{sign}{format_value(abs(change))}", part
            )
        return table


def diff(
    a: Plan,
    b: Plan,
    graph: Graph | None = None,
    *,
    cluster: Cluster | str | Path | None = None,
    training: TrainingSetup | None = None,
) -> Difference:
    """Which ops and parameters two plans treat differently, and their predicted costs.

    graph       of the model: prices each part (a module of a layer, the same in all layers) that differs,
                by taking this part alone from the second plan
    cluster     to price on; default: the cluster of the first plan
    training    optimizer and precision; default: those of the first plan
    """
    difference = Difference(
        names=(f"{a.policy} ({a.name})", f"{b.policy} ({b.name})"), rows=tuple(_rows(a, b)), totals=tuple(_totals(a, b))
    )
    if graph is None or not difference:
        return difference
    why_not = _why_not(a, b, graph.entry)
    if why_not:
        return replace(difference, why_not=f"{why_not}, so no part can be taken from the second plan alone")
    (first, graph), (other, _) = spelled_out(a, graph), spelled_out(b, graph)
    conditions = made_for(first, graph.entry, cluster, training)
    return replace(difference, parts=tuple(part_costs(first, other, analyse(graph, probing()), conditions)))


def _why_not(a: Plan, b: Plan, entry: str) -> str:
    """Why no part of one plan can be put into the other; empty if it can be."""
    if [stage.mesh for stage in a.stages] != [stage.mesh for stage in b.stages]:
        return "the meshes differ" if len(a.stages) == len(b.stages) == 1 else "the stages differ"
    if (a.microbatches, a.schedule, a.local) != (b.microbatches, b.schedule, b.local):
        return "the microbatches or the schedules differ"
    parts = [[set(stage.choices) for stage in plan.entries.get(entry, ())] for plan in (a, b)]
    return "the stages differ" if len(a.stages) > 1 and parts[0] != parts[1] else ""


def part_costs(a: Plan, b: Plan, analysis: Analysis, conditions: PlanConditions) -> list[PartDifference]:
    """The cost of each part that the plans treat differently, largest change of time first."""
    entry = analysis.graph.entry
    first, other = a.choices(entry), b.choices(entry)
    ops: dict[str, list[str]] = {}
    keys: dict[str, list[str]] = {}
    for op in analysis.graph.ops:
        if dict(first.get(op.name, {})) != dict(other.get(op.name, {})):
            ops.setdefault(part_of(op.module_path), []).append(op.name)
    for key in (parameter.key for parameter in analysis.graph.parameters):
        if a.storage.get(key, Replicated()).written() != b.storage.get(key, Replicated()).written():
            keys.setdefault(part_of(key.rpartition(".")[0]), []).append(key)

    def priced(plan: Plan) -> tuple[float, float]:
        prediction = price_plan(
            analysis, conditions.cluster, conditions.training, plan, replica_axes=conditions.replica_axes
        )
        return prediction.seconds, prediction.peak_memory

    base, stages = priced(a), a.entries[entry]

    def part(name: str, plan: Plan) -> PartDifference:
        now, changed = priced(plan), (len(names.get(name, ())) for names in (ops, keys))
        time, memory = now[0] - base[0], now[1] - base[1]
        return PartDifference(name=name, ops=next(changed), stored=next(changed), seconds=time, memory=memory)

    differences = []
    for name in dict.fromkeys((*ops, *keys)):
        taken = {op: other.get(op, {}) for op in ops.get(name, ())}
        changed = tuple(
            replace(stage, choices={op: taken.get(op, choice) for op, choice in stage.choices.items()})
            for stage in stages
        )
        storage = {**a.storage, **{key: b.storage.get(key, Replicated()) for key in keys.get(name, ())}}
        differences.append(part(name, replace(a, entries={entry: changed}, storage=storage)))
    for what, name in (("recompute", "recomputation"), ("chunked_loss", "chunks of logits")):
        pairs = [(stage, getattr(in_b, what)) for stage, in_b in zip(stages, b.entries[entry], strict=True)]
        if any(_unordered(getattr(stage, what)) != _unordered(taken) for stage, taken in pairs):
            changed = tuple(replace(stage, **{what: taken}) for stage, taken in pairs)
            differences.append(part(name, replace(a, entries={entry: changed})))
    return sorted(differences, key=lambda first: -abs(first.seconds))


def _unordered(decisions: Sequence[str] | Mapping[str, int]) -> object:
    return dict(decisions) if isinstance(decisions, Mapping) else set(decisions)


def part_of(path: str) -> str:
    """The part of the model that a module is in: its path in the layer, with a star; outside of layers its path."""
    layer = layer_of(path)
    below = path[len(layer) + 1 :].split(".")[0] if layer else path
    return star(".".join(name for name in (layer, below) if name)) or "the model itself"


def _totals(a: Plan, b: Plan) -> Iterator[TotalDifference]:
    """What both plans predict for their first common specialization."""
    entry = next((entry for entry in a.predicted if entry in b.predicted), None)
    if entry is None:
        return
    total, other = a.predicted[entry], b.predicted[entry]
    for key, what in TIMES.items():
        values = total.get(key, 0.0), other.get(key, 0.0)
        if key in REQUIRED or any(values):
            yield TotalDifference(what=what, a=values[0], b=values[1])
    for key in ("peak", *KINDS):
        values = total["memory"][key], other["memory"][key]
        if any(values):
            yield TotalDifference(
                what=f"memory, {'peak' if key == 'peak' else key}", a=values[0], b=values[1], bytes=True
            )


TIMES = {
    "seconds": "step time",
    "compute": "compute",
    "blocking": "blocking communication",
    "exposed": "exposed overlapped communication",
    "bubble": "bubble and sends",
    "update": "update",
}
REQUIRED = frozenset(TIMES) - {"bubble"}


def _rows(a: Plan, b: Plan) -> Iterator[Changed]:
    for what in ("model", "policy", "cluster", "mesh", "microbatches"):
        first, other = str(getattr(a, what)), str(getattr(b, what))
        if first != other:
            yield Changed(what=what, name="", a=first, b=other)
    yield from _terms(a, b)
    for entry in dict.fromkeys((*a.entries, *b.entries)):
        yield from _changes(entry, _choices(a, entry), _choices(b, entry))
        yield from _changes(f"{entry}, backward", _recomputed(a, entry), _recomputed(b, entry), "saved")
        yield from _changes(f"{entry}, logits", _chunked(a, entry), _chunked(b, entry), "whole")
    yield from _changes("storage", _storage(a), _storage(b))
    for entry in (*a.fingerprints, *(name for name in b.fingerprints if name not in a.fingerprints)):
        first, other = a.fingerprints.get(entry, "-"), b.fingerprints.get(entry, "-")
        if first != other:
            yield Changed(what="graph", name=entry, a=first, b=other)


def _terms(a: Plan, b: Plan) -> Iterator[Changed]:
    """Where the plans were priced under different conditions."""
    for entry in (entry for entry in a.predicted if entry in b.predicted):
        first, other = a.predicted[entry]["for"], b.predicted[entry]["for"]
        for key in ("batch", "optimizer", "precision", "compute", "reduce", "accumulate"):
            if first.get(key) != other.get(key):
                yield Changed(what="priced for", name=key, a=str(first.get(key)), b=str(other.get(key)))


def _choices(plan: Plan, entry: str) -> dict[str, str]:
    stages = plan.entries.get(entry, ())
    return {name: describe_choice(choice) for stage in stages for name, choice in stage.choices.items()}


def _recomputed(plan: Plan, entry: str) -> dict[str, str]:
    paths: dict[str, str] = {}
    for stage in plan.entries.get(entry, ()):
        for path, again in stage.recomputed().items():
            paths[path] = "recomputed" if again or paths.get(path) == "recomputed" else "saved"
    return paths


def _chunked(plan: Plan, entry: str) -> dict[str, str]:
    stages = plan.entries.get(entry, ())
    return {name: f"{count} chunks" for stage in stages for name, count in stage.chunked_loss.items()}


def _storage(plan: Plan) -> dict[str, str]:
    return {
        key: ", ".join(f"{stored.title} over {axis}" for axis in stored.axes) or stored.title
        for key, stored in plan.storage.items()
    }


def _changes(what: str, a: Mapping[str, str], b: Mapping[str, str], otherwise: str = "replicated") -> list[Changed]:
    """Rows of the table of changes, equal layers merged. A plan from a file may have stars already."""
    every = dict.fromkeys((*a, *b))
    spelled_out = {star(name) for name in every if star(name) != name}
    names = [name for name in every if name not in spelled_out]
    pairs = {
        name: tuple(decisions.get(name, decisions.get(star(name), otherwise)) for decisions in (a, b)) for name in names
    }
    alike: dict[str, set[tuple[str, ...]]] = {}
    for name, pair in pairs.items():
        alike.setdefault(star(name), set()).add(pair)
    rows: dict[str, tuple[str, ...]] = {}
    for name, pair in pairs.items():
        if pair[0] != pair[1]:
            rows[star(name) if len(alike[star(name)]) == 1 else name] = pair
    return [Changed(what=what, name=name, a=first, b=other) for name, (first, other) in rows.items()]


def describe_choice(choice: Mapping[str, str]) -> str:
    """A choice as text: "dp: b, tp: n"."""
    return ", ".join(f"{axis}: {role}" for axis, role in choice.items()) or "replicated"

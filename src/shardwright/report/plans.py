"""Plans as data to look at: reading one without its model, and what is different between two."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table
from rich.text import Text

from ..errors import PlanError
from ..layout import Axis, Mesh
from ..plan import Plan, Segment
from ..plan.plan import _validate, star
from ..verify.measure import render


def read_plan(path: str | Path) -> Plan:
    """A plan file as it stands there, names with stars and all: to be read, not to be lowered."""
    try:
        data = json.loads(Path(path).read_text())
    except OSError as error:
        raise PlanError(f"{path} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise PlanError(f"{path} is not JSON: {error}") from error
    _validate(data, path)
    mesh = Mesh(axes=tuple(Axis(name=name, size=size) for name, size in data["mesh"].items()))
    entries = {
        entry: tuple(Segment(mesh=mesh, choices=s["choices"], recompute=tuple(s["recompute"])) for s in segments)
        for entry, segments in data["entries"].items()
    }
    if not entries:
        raise PlanError(f"{path} has no entry, so it says nothing")
    return Plan(
        model=data["model"], policy=data["policy"], cluster=data["cluster"], fingerprints=data["fingerprints"],
        entries=entries, storage={key: tuple(held.items()) for key, held in data["storage"].items()},
        microbatches=data["microbatches"], notes=tuple(data["notes"]), predicted=data["predicted"],
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """Something that two plans decide differently."""

    what: str  # "mesh", "policy", "train", "storage", ...
    name: str
    a: str
    b: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Everything that two plans decide differently. Prints as a table; true if there is anything."""

    names: tuple[str, str]
    rows: tuple[Changed, ...]

    def __bool__(self) -> bool:
        return bool(self.rows)

    def __rich__(self) -> Table | Text:
        if not self.rows:
            return Text("the plans decide the same")
        table = Table("", "", *self.names)
        for row in self.rows:
            table.add_row(*(Text(cell) for cell in (row.what, row.name, row.a, row.b)))
        return table

    def __str__(self) -> str:
        return render(self)


def diff(a: Plan, b: Plan) -> Difference:
    """Which ops and parameters two plans treat differently."""
    rows: list[Changed] = []
    for what in ("model", "policy", "cluster", "mesh", "microbatches"):
        one, other = str(getattr(a, what)), str(getattr(b, what))
        if one != other:
            rows.append(Changed(what=what, name="", a=one, b=other))
    for entry in dict.fromkeys((*a.entries, *b.entries)):
        rows += _changes(entry, _choices(a, entry), _choices(b, entry))
        rows += _changes(f"{entry}, backward", _recomputed(a, entry), _recomputed(b, entry), "kept")
    rows += _changes("storage", _storage(a), _storage(b))
    for entry in (*a.fingerprints, *(name for name in b.fingerprints if name not in a.fingerprints)):
        one, other = a.fingerprints.get(entry, "-"), b.fingerprints.get(entry, "-")
        if one != other:
            rows.append(Changed(what="graph", name=entry, a=one, b=other))
    return Difference(names=(f"{a.policy} ({a.name})", f"{b.policy} ({b.name})"), rows=tuple(rows))


def _choices(plan: Plan, entry: str) -> dict[str, str]:
    held = plan.entries[entry][0].choices if entry in plan.entries else {}
    return {name: said(choice) for name, choice in held.items()}


def _recomputed(plan: Plan, entry: str) -> dict[str, str]:
    held = plan.entries[entry][0].recomputed() if entry in plan.entries else {}
    return {path: "recomputed" if again else "kept" for path, again in held.items()}


def _storage(plan: Plan) -> dict[str, str]:
    return {key: ", ".join(f"ZeRO-{level} over {axis}" for axis, level in held) for key, held in plan.storage.items()}


def _changes(what: str, a: Mapping[str, str], b: Mapping[str, str], otherwise: str = "whole") -> list[Changed]:
    """Rows for what differs, layers that differ alike as one. A plan read from a file may have stars already."""
    every = dict.fromkeys((*a, *b))
    spelled_out = {star(name) for name in every if star(name) != name}
    names = [name for name in every if name not in spelled_out]
    pairs = {name: tuple(held.get(name, held.get(star(name), otherwise)) for held in (a, b)) for name in names}
    alike: dict[str, set[tuple[str, ...]]] = {}
    for name, pair in pairs.items():
        alike.setdefault(star(name), set()).add(pair)
    rows: dict[str, tuple[str, ...]] = {}
    for name, pair in pairs.items():
        if pair[0] != pair[1]:
            rows[star(name) if len(alike[star(name)]) == 1 else name] = pair
    return [Changed(what=what, name=name, a=one, b=other) for name, (one, other) in rows.items()]


def said(choice: Mapping[str, str]) -> str:
    """A choice in words: "dp: b, tp: n"."""
    return ", ".join(f"{axis}: {role}" for axis, role in choice.items()) or "whole"

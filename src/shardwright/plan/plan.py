"""The plan: every decision, as data. A JSON file that people can read, compare and edit.

Ops are named by module path and kind. Where all layers of a list are split alike, the
file says it once, with a star: "blocks.*.attn.qkv / linear". So does the list of modules
that are run again in backward: "blocks.*" if all blocks are.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..errors import PlanError, raise_all
from ..ir import Graph
from ..ir.paths import prefixes
from ..layout import Axis, Mesh

VERSION = 1

Choices = Mapping[str, Mapping[str, str]]
"""For each op, on which axis it is split on which role."""


def _frozen(choices: Choices) -> Choices:
    return MappingProxyType({name: MappingProxyType(dict(held)) for name, held in choices.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Ops that run on one mesh. For now a plan has one segment with all ops."""

    mesh: Mesh
    choices: Choices
    recompute: tuple[str, ...] = ()  # modules whose insides are not kept, but run again in backward

    def __post_init__(self) -> None:
        object.__setattr__(self, "choices", _frozen(self.choices))

    def recomputed(self) -> dict[str, bool]:
        """For every module that an op's name is in, and every entry: whether it is an entry of `recompute`."""
        wished = set(self.recompute)
        names = dict.fromkeys(re.sub(r"@\d+", "", name.partition(" / ")[0]) for name in self.choices)
        return {path: path in wished for name in (*names, *self.recompute) for path in (*prefixes(name), name)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that was decided for a model on a cluster."""

    model: str
    policy: str
    cluster: str
    fingerprints: Mapping[str, str]  # of the graph of each entry
    entries: Mapping[str, tuple[Segment, ...]]
    storage: Mapping[str, tuple[tuple[str, int], ...]] = field(default_factory=dict)
    microbatches: int = 1
    notes: tuple[str, ...] = ()
    predicted: Mapping[str, Any] = field(default_factory=dict)
    as_read: bool = False  # without its model: names have the stars of the file, and what is not split is not listed

    @property
    def mesh(self) -> Mesh:
        return next(iter(self.entries.values()))[0].mesh

    def choices(self, entry: str) -> Choices:
        """The ops that are split. A segment also lists those that are not, so that no star takes them in."""
        return MappingProxyType({name: held for name, held in self.entries[entry][0].choices.items() if held})

    @property
    def name(self) -> str:
        """Eight digits that stand for this plan."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:8]

    def check_against(self, graph: Graph) -> None:
        """Refuse a graph that this plan was not made for, and say what changed."""
        known = self.fingerprints.get(graph.entry)
        if known is None or known == graph.fingerprint:
            return
        there = {*graph.by_name, *map(star, graph.by_name)}
        missing = [name for name in self.choices(graph.entry) if name not in there]
        said = [f"the plan splits {name}, which the model does not have" for name in missing[:8]]
        if not missing:
            said = ["the ops have the same names, but they are connected otherwise, or a parameter has another shape"]
        raise_all(
            PlanError,
            f"this plan was made for another graph of {self.model} (fingerprint {known}, the model has "
            f"{graph.fingerprint}); make a new plan for the model as it is now:",
            said,
        )

    def to_json(self) -> str:
        return json.dumps(self._as_dict(), indent=1, sort_keys=False) + "\n"

    def _as_dict(self) -> dict[str, Any]:
        folded: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict if self.as_read else fold
        return {
            "version": VERSION,
            "model": self.model,
            "policy": self.policy,
            "cluster": self.cluster,
            "mesh": {axis.name: axis.size for axis in self.mesh.axes},
            "microbatches": self.microbatches,
            "fingerprints": dict(sorted(self.fingerprints.items())),
            "storage": {key: dict(held) for key, held in sorted(folded(self.storage).items())},
            "entries": {
                entry: [
                    {
                        "choices": {k: dict(v) for k, v in folded(s.choices).items() if v},
                        "recompute": list(s.recompute) if self.as_read else fold_paths(s),
                    }
                    for s in segments
                ]
                for entry, segments in self.entries.items()
            },
            "notes": list(self.notes),
            "predicted": dict(self.predicted),
        }

    def save(self, path: str | Path) -> None:
        """Write the file whole or not at all."""
        path = Path(path)
        draft = path.with_name(path.name + ".part")
        draft.write_text(self.to_json())
        draft.replace(path)


_NUMBER = re.compile(r"(?<![\w*])\d+(?=[./@ ]|$)")


def star(name: str) -> str:
    """A name with stars for layer numbers; the number of an op in its module stays."""
    path, slash, kind = name.partition(" / ")
    return _NUMBER.sub("*", path) + slash + kind


def fold(held: Mapping[str, Any]) -> dict[str, Any]:
    """Names that differ only in layer numbers and have the same entry, said once with a star."""
    stars: dict[str, set[str]] = {}
    for name, value in held.items():
        stars.setdefault(star(name), set()).add(json.dumps(_plain(value), sort_keys=True))
    return {star(name) if len(stars[star(name)]) == 1 else name: value for name, value in held.items()}


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def unfold(held: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """The reverse of `fold`, for the names that there are."""
    found: dict[str, Any] = {}
    used: set[str] = set()
    for name in names:
        for key in (name, star(name)):
            if key in held:
                found[name] = held[key]
                used.add(key)
                break
    unknown = [f"{key!r} names nothing in the model" for key in held if key not in used]
    raise_all(PlanError, "the plan does not fit the model:", unknown)
    return found


def fold_paths(segment: Segment) -> list[str]:
    """The entries of `recompute`, with a star where all modules of one kind are entries."""
    known = {name.partition(" / ")[0] for name in segment.choices}
    spelled_out = not any("*" in name for name in known)  # else the plan was read without its model
    folded = fold(segment.recomputed()) if spelled_out else segment.recomputed()
    return [path for path, held in folded.items() if held]


def unfold_paths(held: list[str], paths: list[str]) -> tuple[str, ...]:
    """The reverse of `fold_paths`, for the modules that there are."""
    return tuple(unfold(dict.fromkeys(held, True), paths))


def load(path: str | Path, graph: Graph) -> Plan:
    """Read a plan file for a graph; every fault of the file is named at once."""
    return read(Path(path).read_text(), graph, path)


def read(text: str, graph: Graph, path: str | Path = "the plan") -> Plan:
    """Read the text of a plan file for a graph."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise PlanError(f"{path} is not JSON: {error}") from error
    _validate(data, path)
    mesh = Mesh(axes=tuple(Axis(name=name, size=size) for name, size in data["mesh"].items()))
    ops = [op.name for op in graph.ops]
    entries: dict[str, tuple[Segment, ...]] = {}
    for entry, segments in data["entries"].items():
        if entry == graph.entry:
            known = data["fingerprints"].get(entry)
            if known == graph.fingerprint or known is None:
                held = [
                    Segment(
                        mesh=mesh,
                        choices={name: {} for name in ops} | unfold(s["choices"], ops),
                        recompute=unfold_paths(s["recompute"], list(graph.under)),
                    )
                    for s in segments
                ]
                entries[entry] = tuple(held)
            else:
                loose = Segment(mesh=mesh, choices=segments[0]["choices"])
                Plan(
                    model=data["model"],
                    policy="",
                    cluster="",
                    fingerprints=data["fingerprints"],
                    entries={entry: (loose,)},
                ).check_against(graph)
    keys = [key for parameter in graph.parameters for key in parameter.keys]
    storage = {
        key: tuple((axis, level) for axis, level in held.items()) for key, held in unfold(data["storage"], keys).items()
    }
    return Plan(
        model=data["model"],
        policy=data["policy"],
        cluster=data["cluster"],
        fingerprints=data["fingerprints"],
        entries=entries,
        storage=storage,
        microbatches=data["microbatches"],
        notes=tuple(data["notes"]),
        predicted=data["predicted"],
    )


_SCHEMA: dict[str, type] = {
    "version": int,
    "model": str,
    "policy": str,
    "cluster": str,
    "mesh": dict,
    "microbatches": int,
    "fingerprints": dict,
    "storage": dict,
    "entries": dict,
    "notes": list,
    "predicted": dict,
}


def _validate(data: Any, path: str | Path) -> None:
    if not isinstance(data, dict):
        raise PlanError(f"{path} is not a plan: it holds a {type(data).__name__}, not an object")
    faults = [f"{key!r} is missing" for key in _SCHEMA if key not in data]
    faults += [f"{key!r} is unknown" for key in data if key not in _SCHEMA]
    faults += [
        f"{key!r} should be a {kind.__name__}, is {type(data[key]).__name__}"
        for key, kind in _SCHEMA.items()
        if key in data and not isinstance(data[key], kind)
    ]
    if data.get("version") not in (None, VERSION):
        faults.append(f"it has version {data['version']}, this program reads version {VERSION}")
    if isinstance(data.get("mesh"), dict):
        faults += [f"axis {k!r} has size {v!r}" for k, v in data["mesh"].items() if not isinstance(v, int) or v < 1]
    if isinstance(data.get("entries"), dict):
        for entry, segments in data["entries"].items():
            if not isinstance(segments, list) or not all(
                isinstance(s, dict) and {"choices", "recompute"} == set(s) for s in segments
            ):
                faults.append(f"entry {entry!r} should be a list of objects with 'choices' and 'recompute'")
    raise_all(PlanError, f"{path} is not a valid plan:", faults)

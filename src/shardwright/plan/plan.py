"""The plan: every decision, as data. A JSON file that people can read, compare and edit.

Ops are named by module path and kind. Where all layers of a list are split alike, the
file says it once, with a star: "blocks.*.attn.qkv / linear". So does the list of modules
that are recomputed in backward: "blocks.*" if all blocks are. A plan of several stages says
for each which devices run it and which ops it has, by module where it has all of one.
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

from ..cluster import Cluster
from ..errors import PlanError, raise_all
from ..ir import Graph
from ..ir.paths import prefixes
from ..layout import Mesh
from ..rules import Choices
from ..storage import Storage
from .folding import cover, fold, star

VERSION = 2


def _frozen(choices: Choices) -> Choices:
    return MappingProxyType({name: MappingProxyType(dict(choice)) for name, choice in choices.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStage:
    """Ops that run on one mesh. `choices` names all of them, also those that are not split."""

    mesh: Mesh
    choices: Choices
    recompute: tuple[str, ...] = ()  # activation checkpointing: modules that are recomputed in backward
    chunked_loss: Mapping[str, int] = field(default_factory=dict)  # losses whose logits are made in chunks of rows
    listed: tuple[str, ...] = ()  # its ops as a file lists them, if it was read without its model

    def __post_init__(self) -> None:
        object.__setattr__(self, "choices", _frozen(self.choices))
        object.__setattr__(self, "chunked_loss", MappingProxyType(dict(self.chunked_loss)))

    def folded_recompute(self) -> list[str]:
        """The entries of `recompute`, with a star where all modules of one kind are entries."""
        known = {name.partition(" / ")[0] for name in self.choices}
        spelled_out = not any("*" in name for name in known)  # else the plan was read without its model
        folded = fold(self.recomputed()) if spelled_out else self.recomputed()
        return [path for path, is_entry in folded.items() if is_entry]

    def recomputed(self) -> dict[str, bool]:
        """For every module that an op's name is in, and every entry: whether it is an entry of `recompute`."""
        entries = set(self.recompute)
        names = dict.fromkeys(re.sub(r"@\d+", "", name.partition(" / ")[0]) for name in self.choices)
        return {path: path in entries for name in (*names, *self.recompute) for path in (*prefixes(name), name)}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan:
    """Everything that was decided for a model on a cluster."""

    model: str
    policy: str
    cluster: str
    fingerprints: Mapping[str, str]  # of the graph of each entry
    entries: Mapping[str, tuple[PlanStage, ...]]
    storage: Mapping[str, Storage] = field(default_factory=dict)  # of each parameter, if any is sharded for storage
    microbatches: int = 1
    schedule: str = ""  # of the pipeline, if there are several stages or microbatches: "1f1b", ...
    steps: Mapping[str, Any] | None = None  # a custom schedule in full, as `Schedule.to_json` says it
    local: bool = False  # each microbatch is a batch of its own (PipelineOptions(semantics="local"))
    batch_norm: str = "global"  # or "local": statistics of a rank's own samples (CompileOptions(batch_norm="local"))
    notes: tuple[str, ...] = ()
    predicted: Mapping[str, Any] = field(default_factory=dict)
    made_for: Cluster | None = field(default=None, compare=False, repr=False)  # prices reshards; not in the file
    as_read: bool = False  # without its model: names have the stars of the file, and what is not split is not listed

    def __repr__(self) -> str:
        parts = [f"{self.policy or 'custom'} for {self.model}", f"{self.size} device{'s' if self.size > 1 else ''}"]
        parts += [f"mesh {self.mesh}"] if self.mesh.axes else []
        parts += [f"{len(self.stages)} stages"] if len(self.stages) > 1 else []
        parts += [f"{self.microbatches} microbatches"] if self.microbatches > 1 else []
        seconds = next((entry["seconds"] for entry in self.predicted.values() if "seconds" in entry), None)
        parts += [f"predicted {seconds:.3g} s/step"] if seconds is not None else []
        return f"Plan({', '.join(parts)})"

    @property
    def stages(self) -> tuple[PlanStage, ...]:
        """Those of the first entry, which decides where parameters are held."""
        return next(iter(self.entries.values()))

    @property
    def mesh(self) -> Mesh:
        """The mesh of the first stage."""
        return self.stages[0].mesh

    @property
    def size(self) -> int:
        """How many devices there are in all stages."""
        return len({device for stage in self.stages for device in stage.mesh.devices})

    @property
    def is_pipeline(self) -> bool:
        """Whether it runs by a schedule: in several stages, or in microbatches."""
        return len(self.stages) > 1 or self.microbatches > 1

    def choices(self, entry: str) -> Choices:
        """The ops that are split. A stage also lists those that are not, so that no star takes them in."""
        choices = {name: choice for stage in self.entries[entry] for name, choice in stage.choices.items()}
        return MappingProxyType({name: choice for name, choice in choices.items() if choice})

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
        differences = [f"the plan splits {name}, which the model does not have" for name in missing[:8]]
        if not missing:
            differences = [
                "the ops have the same names, but they are connected otherwise, or a parameter has another shape"
            ]
        raise_all(
            PlanError,
            f"this plan was made for another graph of {self.model} (fingerprint {known}, the model has "
            f"{graph.fingerprint}); make a new plan for the model as it is now:",
            differences,
        )

    def _repr_html_(self) -> str:
        """The report on it, which a notebook shows."""
        from ..report import report  # which stands above plans, and which nothing but a notebook needs here

        return report(self).frame

    def to_json(self) -> str:
        return json.dumps(self._as_dict(), indent=1, sort_keys=False) + "\n"

    def _as_dict(self) -> dict[str, Any]:
        folded: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict if self.as_read else fold
        pipeline: dict[str, Any] = {"schedule": self.schedule, "local": self.local} if self.is_pipeline else {}
        pipeline |= {"steps": dict(self.steps)} if self.steps is not None else {}
        return {
            "version": VERSION,
            "model": self.model,
            "policy": self.policy,
            "cluster": self.cluster,
            "mesh": {axis.name: axis.size for axis in self.mesh.axes},
            "microbatches": self.microbatches,
            **pipeline,
            **({"batch_norm": self.batch_norm} if self.batch_norm != "global" else {}),
            "fingerprints": dict(sorted(self.fingerprints.items())),
            "storage": {key: stored.written() for key, stored in sorted(folded(self.storage).items())},
            "entries": {
                entry: [
                    {
                        **(self._place(stages, number) if len(stages) > 1 else {}),
                        "choices": {k: dict(v) for k, v in folded(s.choices).items() if v},
                        "recompute": list(s.recompute) if self.as_read else s.folded_recompute(),
                        **({"chunked_loss": dict(s.chunked_loss)} if s.chunked_loss else {}),
                    }
                    for number, s in enumerate(stages)
                ]
                for entry, stages in self.entries.items()
            },
            "notes": list(self.notes),
            "predicted": dict(self.predicted),
        }

    def _place(self, stages: tuple[PlanStage, ...], number: int) -> dict[str, Any]:
        """Where a stage of several runs, and which ops it has."""
        mesh, own = stages[number].mesh, stages[number].choices
        others = [name for at, stage in enumerate(stages) if at != number for name in stage.choices]
        return {
            "mesh": {axis.name: axis.size for axis in mesh.axes},
            "devices": list(mesh.devices),
            "ops": list(stages[number].listed) if self.as_read else cover(own, others),
        }

    def save(self, path: str | Path) -> None:
        """Write the file whole or not at all."""
        path = Path(path)
        builder = path.with_name(path.name + ".part")
        builder.write_text(self.to_json())
        builder.replace(path)

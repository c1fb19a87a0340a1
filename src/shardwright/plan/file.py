"""Plan files, read and checked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import LayoutError, PlanError, raise_all
from ..formats import parse_json, raise_faults, read_json
from ..ir import Graph
from ..layout import Axis, Mesh
from ..lower.chunked_loss import unknown_losses
from ..storage import Storage, parse_storage
from .folding import uncover, unfold, unfold_paths
from .plan import Plan, PlanStage
from .schema import plan_faults, upgraded


def load(path: str | Path, graph: Graph) -> Plan:
    """Read a plan file for a graph; every fault of the file is named at once."""
    return _plan(read_json(path, PlanError), graph, path)


def read(text: str, graph: Graph, path: str | Path = "the plan") -> Plan:
    """Read the text of a plan file for a graph."""
    return _plan(parse_json(text, path, PlanError), graph, path)


def _plan(data: Any, graph: Graph, path: str | Path) -> Plan:
    data = validated(data, path)
    entries: dict[str, tuple[PlanStage, ...]] = {}
    for entry, stages in data["entries"].items():
        if entry == graph.entry:
            known = data["fingerprints"].get(entry)
            if known != graph.fingerprint and known is not None:
                _refuse(data, entry, graph)
            entries[entry] = _stages(data, stages, graph, path)
    keys = [key for parameter in graph.parameters for key in parameter.keys]
    storage = read_storage(unfold(data["storage"], keys), path)
    return Plan(
        model=data["model"],
        policy=data["policy"],
        cluster=data["cluster"],
        fingerprints=data["fingerprints"],
        entries=entries,
        storage=storage,
        microbatches=data["microbatches"],
        schedule=data.get("schedule", ""),
        steps=data.get("steps"),
        local=data.get("local", False),
        batch_norm=data.get("batch_norm", "global"),
        notes=tuple(data["notes"]),
        predicted=data["predicted"],
    )


def read_storage(written: Mapping[str, Any], path: str | Path) -> dict[str, Storage]:
    """How a plan file stores each parameter."""
    storage: dict[str, Storage] = {}
    faults: list[str] = []
    for key, axes in written.items():
        try:
            storage[key] = parse_storage(axes)
        except LayoutError as error:
            faults.append(f"{key}: {error}")
    raise_all(PlanError, f"{path} stores parameters in ways that there are not:", faults)
    return storage


def mesh_of(data: Mapping[str, Any], stage: Mapping[str, Any]) -> Mesh:
    """The mesh of a stage: its own, or the plan's if there is one stage."""
    axes = stage.get("mesh", data["mesh"])
    named = tuple(Axis(name=name, size=size) for name, size in axes.items())
    return Mesh(axes=named, devices=tuple(stage.get("devices", ())))


def _stages(data: Any, entries: list[Any], graph: Graph, path: str | Path) -> tuple[PlanStage, ...]:
    names = [op.name for op in graph.ops]
    parts = [uncover(stage["ops"], names) if "ops" in stage else names for stage in entries]
    meshes = _meshes(data, entries, path)
    stage_of: dict[str, int] = {}
    faults: list[str] = []
    for number, own in enumerate(parts):
        faults += [f"{name!r} is in stages {stage_of[name]} and {number}" for name in own if name in stage_of]
        stage_of |= dict.fromkeys(own, number)
    faults += [f"{name!r} is in no stage" for name in names if name not in stage_of]
    raise_all(PlanError, f"{path} does not fit the model:", faults)
    chunked = {name: chunks for stage in entries for name, chunks in stage.get("chunked_loss", {}).items()}
    raise_all(PlanError, f"{path} does not fit the model:", list(unknown_losses(graph, chunked)))
    stages = []
    for number, (stage, own, mesh) in enumerate(zip(entries, parts, meshes, strict=True)):
        where = f"stage {number}" if len(entries) > 1 else "the model"
        inside = dict.fromkeys(own)
        paths = [at for at, ops in graph.under.items() if any(op.name in inside for op in ops)]
        stages.append(
            PlanStage(
                mesh=mesh,
                choices={name: {} for name in own} | unfold(stage["choices"], own, where),
                recompute=unfold_paths(stage["recompute"], paths, where),
                chunked_loss=stage.get("chunked_loss", {}),
            )
        )
    return tuple(stages)


def _meshes(data: Any, stages: list[Any], path: str | Path) -> list[Mesh]:
    """The meshes of stages, of which a device is in one only."""
    meshes: list[Mesh] = []
    faults: list[str] = []
    for number, stage in enumerate(stages):
        try:
            meshes.append(mesh_of(data, stage))
        except LayoutError as error:
            faults.append(f"stage {number}: {error}")
    mesh_of_device: dict[int, Mesh] = {}
    for mesh in meshes:
        faults += [
            f"device {device} is in the meshes {mesh_of_device[device]} and {mesh}; all stages of a device share a mesh"
            for device in mesh.devices
            if mesh_of_device.setdefault(device, mesh) != mesh
        ]
    if sorted(mesh_of_device) != list(range(len(mesh_of_device))):
        faults.append(f"devices are numbered from 0 on, and these are {', '.join(map(str, sorted(mesh_of_device)))}")
    raise_all(PlanError, f"{path} puts stages where they can't be:", faults)
    return meshes


def _refuse(data: Any, entry: str, graph: Graph) -> None:
    """Say what changed between the graph that a plan is for and the one at hand."""
    loose = tuple(PlanStage(mesh=mesh_of(data, stage), choices=stage["choices"]) for stage in data["entries"][entry])
    Plan(
        model=data["model"], policy="", cluster="", fingerprints=data["fingerprints"], entries={entry: loose}
    ).check_against(graph)


def validated(data: Any, path: str | Path) -> Any:
    """The data of a plan, of this version; what is not a plan is refused, with all that is wrong with it."""
    data = upgraded(data)
    raise_faults(PlanError, f"{path} is not a valid plan:", plan_faults(data))
    return data

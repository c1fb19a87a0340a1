"""Translate a plan to a graph of fewer layers, on fewer stages, on smaller meshes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..ir import Graph
from ..layout import Layout, Mesh
from ..lower import LoweredProgram
from ..lower.chunked_loss import rows_of
from ..plan import Plan, PlanStage
from ..plan.lowering import lower, lower_pipeline
from ..plan.pipeline import parts_like, timed
from ..plan.stages import OpSequence
from ..rules import Analysis
from ..storage import ParameterSpec, storage_layout
from .layers import Decided
from .sizes import Shared, shared_atoms
from .stages import SmallCluster


def decided_by(plan: Plan, graph: Graph, cluster: SmallCluster) -> Decided:
    """The decisions of a plan for a graph, with the stages of the small cluster."""
    stages = plan.entries[graph.entry]
    return Decided(
        graph=graph,
        choices={name: choice for stage in stages for name, choice in stage.choices.items()},
        stage={name: cluster.stage[at] for at, stage in enumerate(stages) for name in stage.choices},
        storage=plan.storage,
        recompute=tuple((path, cluster.stage[at]) for at, stage in enumerate(stages) for path in stage.recompute),
        chunked_loss={name: chunks for stage in stages for name, chunks in stage.chunked_loss.items()},
    )


def translated(plan: Plan, decided: Decided, analysis: Analysis, meshes: Sequence[Mesh], cluster: SmallCluster) -> Plan:
    """The plan for the rest of a graph, on these meshes."""
    graph = decided.graph
    parts = [tuple(op.name for op in graph.ops)]
    if len(meshes) > 1:
        parts = list(parts_like(OpSequence(analysis), decided.stage, len(meshes)))
    stages = tuple(
        PlanStage(
            mesh=mesh,
            choices={name: decided.choices.get(name, {}) for name in part},
            recompute=_inside(decided, number, set(part)),
            chunked_loss=_chunks(decided, part, mesh, cluster.microbatches),
        )
        for number, (mesh, part) in enumerate(zip(meshes, parts, strict=True))
    )
    return replace(
        plan, entries={graph.entry: stages}, fingerprints={graph.entry: graph.fingerprint}, storage=decided.storage,
        microbatches=cluster.microbatches, steps=cluster.steps(meshes), notes=(), predicted={},
    )  # fmt: skip


def _inside(decided: Decided, number: int, part: set[str]) -> tuple[str, ...]:
    wanted = dict.fromkeys(path for path, stage in decided.recompute if stage == number)
    return tuple(path for path in wanted if any(op.name in part for op in decided.graph.under[path]))


def _chunks(decided: Decided, part: Sequence[str], mesh: Mesh, microbatches: int) -> dict[str, int]:
    """The chunks of the losses of a stage, of which small losses have fewer: two rows, if they can, for each."""
    graph, chunks = decided.graph, dict[str, int]()
    for name in part:
        if name in decided.chunked_loss:
            rows = rows_of(graph.by_name[name], graph) // (mesh.size * microbatches)
            chunks[name] = max(1, min(decided.chunked_loss[name], rows // 2))
    return chunks


def lowered(graph: Graph, plan: Plan, analysis: Analysis) -> tuple[LoweredProgram, ...]:
    """The programs of a plan, one for each stage."""
    return lower_pipeline(graph, plan, analysis).programs if plan.is_pipeline else (lower(graph, plan, analysis),)


def shared_by(decided: Decided, analysis: Analysis, meshes: Sequence[Mesh], microbatches: int) -> Iterator[Shared]:
    """What the choices of all ops shard, over devices and over microbatches."""
    times = [timed(mesh, microbatches) for mesh in meshes]
    for op in decided.graph.ops:
        choice = decided.choices.get(op.name, {})
        if choice and not analysis.is_constant(op):
            yield from shared_atoms(analysis, times[decided.stage[op.name]], op.name, choice)


def stored_by(analysis: Analysis, programs: Sequence[LoweredProgram], meshes: Sequence[Mesh]) -> Iterator[Shared]:
    """What ZeRO shards of parameters, or would if it could: it takes the first dim that is long enough.

    A dim of one atom is sharded like that atom; of several the largest is a multiple, if the dim divides evenly.
    """
    for spec, layout, mesh in _layouts(programs, meshes):
        zero = tuple((name, mesh.sizes[name]) for name in spec.storage.axes)
        for dim, own, cuts in zip(analysis.dims[spec.value], spec.layout.shards, layout.shards, strict=True):
            atoms = analysis.atoms.expand(dim)
            axes = tuple((shard.axis, mesh.sizes[shard.axis]) for shard in (cuts if len(cuts) > len(own) else own))
            if len(atoms) == 1:
                yield Shared(atoms[0], axes if len(cuts) > len(own) else (*axes, *zero))
            elif len(cuts) > len(own) and all(shard.even(mesh.sizes[shard.axis]) for shard in cuts):
                yield Shared(max(atoms, key=lambda atom: analysis.atoms.size[atom]), axes, even=True)
            if len(cuts) > len(own):
                break


def _layouts(
    programs: Sequence[LoweredProgram], meshes: Sequence[Mesh]
) -> Iterator[tuple[ParameterSpec, Layout, Mesh]]:
    """How ZeRO shards each parameter."""
    for program, mesh in zip(programs, meshes, strict=True):
        for spec in program.parameters:
            if spec.storage.axes:
                yield spec, storage_layout(spec, mesh.sizes), mesh


def storage_of(programs: Sequence[LoweredProgram], meshes: Sequence[Mesh]) -> list[str]:
    """How parameters are stored, without sizes: the axes that shard each dim, and whether evenly."""
    return [
        f"{spec.name} stored as {layout} "
        + " ".join(
            "even" if shard.even(mesh.sizes[shard.axis]) else "uneven" for cuts in layout.shards for shard in cuts
        )
        for spec, layout, mesh in _layouts(programs, meshes)
    ]

"""Where parameters are stored: a pipeline rank is the devices that run the same programs, with the shards they read.

A plan without a pipeline has one. In a pipeline each stage is one, and a parameter that two stages read is held
in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from ..errors import LoweringError, PlanError, raise_all
from ..ir import Graph
from ..layout import Mesh
from ..lower import LoweredProgram
from ..plan import PlanStage
from ..runtime.parameters.full_tensors import compute_dtype
from ..runtime.parameters.state_dicts import PipelineRankSpecs
from ..runtime.parameters.table import parse
from ..runtime.world import Groups
from ..storage import ParameterSpec, wanted_groups
from .files import Generated


@dataclass(frozen=True, kw_only=True)
class PipelineRank:
    """Devices in a mesh, the stages that they run, and what they hold."""

    mesh: Mesh
    stages: tuple[int, ...]
    specs: tuple[ParameterSpec, ...]
    wanted: tuple[tuple[str, ...], ...]  # the groups that its programs communicate over

    def groups(self) -> Groups:
        """All ranks must make the groups of all pipeline ranks, in one order."""
        return Groups(self.mesh, self.wanted)


def find_pipeline_ranks(stages: Sequence[PlanStage], generated: Sequence[Generated]) -> tuple[PipelineRank, ...]:
    """The pipeline ranks of a plan, in the order of their devices."""
    meshes = sorted({stage.mesh for stage in stages}, key=lambda mesh: mesh.devices)
    mesh_of: dict[int, Mesh] = {}
    for mesh in meshes:
        for device in mesh.devices:
            if device in mesh_of:
                raise PlanError(
                    f"device {device} is in the meshes {mesh_of[device]} and {mesh}; "
                    "all stages of a device have one mesh"
                )
            mesh_of[device] = mesh
    return tuple(_pipeline_rank(mesh, stages, generated) for mesh in meshes)


def _pipeline_rank(mesh: Mesh, stages: Sequence[PlanStage], generated: Sequence[Generated]) -> PipelineRank:
    numbers = tuple(number for number, stage in enumerate(stages) if stage.mesh == mesh)
    specs: dict[str, ParameterSpec] = {}
    wanted: dict[tuple[str, ...], None] = {}
    for number in numbers:
        program, module = generated[number].program, generated[number].module
        wanted |= dict.fromkeys(tuple(name.split("_")) for name in module.GROUPS)
        for spec in check_table(program, parse(module.PARAMETERS, mesh, keys_in_use(program))):
            if spec.name in specs and specs[spec.name] != spec:
                raise PlanError(f"parameter {spec.name} is held in two ways by the stages of {mesh}")
            specs[spec.name] = spec
    wanted |= dict.fromkeys(sorted(wanted_groups(specs.values(), mesh)))
    return PipelineRank(mesh=mesh, stages=numbers, specs=tuple(specs.values()), wanted=tuple(wanted))


def check_table(program: LoweredProgram, parsed: Sequence[ParameterSpec]) -> Sequence[ParameterSpec]:
    """Refuse a table of parameters in a generated file that says something else than its program."""
    faults: list[str] = []
    wanted = {spec.name: spec for spec in program.parameters}
    for spec in parsed:
        lowered = wanted.pop(spec.name, None)
        if lowered is None:
            faults.append(f"{spec.name} is no parameter of the program")
            continue
        for what in (field.name for field in fields(ParameterSpec) if field.compare):
            there, here = getattr(spec, what), getattr(lowered, what)
            if there != here:
                faults.append(f"{spec.name}: {what} is {there} in the file, and {here} in the program")
    faults += [f"{key} is missing" for key in wanted]
    raise_all(LoweringError, f"the parameters of {program.graph.name} are written down wrongly:", faults)
    return parsed


def with_masters(pp_ranks: Sequence[PipelineRank], graph: Graph) -> tuple[PipelineRank, ...]:
    """The same, where what is trained in less than float32 has a master."""

    def narrow(spec: ParameterSpec) -> bool:
        dtype = compute_dtype(spec)
        return spec.trainable and dtype.is_floating_point and dtype.itemsize < 4

    written = {parameter.key: parameter.update for parameter in graph.parameters if parameter.update is not None}
    for spec in (spec for pp_rank in pp_ranks for spec in pp_rank.specs if spec.name in written and narrow(spec)):
        raise LoweringError(
            f"forward writes to the parameter {spec.name} ({graph.producer[written[spec.name]]}), and its float32 "
            "master would not follow; keep that parameter in float32 (precision overrides), or write to it in the "
            "training loop (max_norm: renormalize the weight there)"
        )
    return tuple(
        replace(pp_rank, specs=tuple(replace(spec, master=True) if narrow(spec) else spec for spec in pp_rank.specs))
        for pp_rank in pp_ranks
    )


def check_held(pp_ranks: Sequence[PipelineRank], known: PipelineRankSpecs, generated: Sequence[Generated]) -> None:
    """Refuse an entry that reads parameters on devices that do not hold them: the first entry decided who does."""
    faults: list[str] = []
    storage_options = {mesh: {spec.name for spec in specs} for mesh, specs in known}
    for pp_rank in pp_ranks:
        for key in [spec.name for spec in pp_rank.specs if spec.name not in storage_options.get(pp_rank.mesh, ())]:
            there = [mesh.devices for mesh, names in storage_options.items() if key in names]
            graphs = [generated[number].program.graph for number in pp_rank.stages]
            readers = [graph.users[p.value] for graph in graphs for p in graph.parameters if p.key == key]
            op = next((op for users in readers for op, _ in users), None)
            if op is not None:  # else nobody reads it in this call, such as the decoder's while something is encoded
                faults.append(f"{op} reads {key} on {_devices(pp_rank.mesh.devices)}, and it is on {_devices(*there)}")
    raise_all(
        PlanError,
        "parameters are held by the devices that read them in the first call, and this call reads some elsewhere; make "
        "the first call one that reads them there too, or use a plan without stages:",
        faults,
    )


def _devices(*pp_ranks: tuple[int, ...]) -> str:
    numbers = sorted({device for pp_rank in pp_ranks for device in pp_rank})
    return f"device{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def keys_in_use(program: LoweredProgram) -> list[str]:
    """The keys of parameters in the order in which a program first reads them."""
    used: dict[str, int] = {}
    for number, op in enumerate(program.body):
        for name in op.inputs:
            used.setdefault(name.split("@")[0], number)
    return [
        parameter.name
        for parameter in sorted(program.parameters, key=lambda parameter: used.get(parameter.value, len(used)))
    ]

"""Where parameters are held: a seat is the devices that run the same programs, and holds the pieces those read.

A plan without a pipeline has one seat. In a pipeline each stage is one, and a parameter that two stages read is held
in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..emit import unit_of
from ..errors import LoweringError, PlanError, raise_all
from ..layout import Mesh
from ..lower import LoweredProgram
from ..plan import PlanStage
from ..runtime.parameters.spec import ParameterSpec, parse, wanted_groups
from ..runtime.parameters.state_dicts import Seats
from ..runtime.world import Groups
from .files import Generated


@dataclass(frozen=True, kw_only=True)
class PipelineRank:
    """Devices in a mesh, the segments that they run, and what they hold."""

    mesh: Mesh
    segments: tuple[int, ...]
    held: tuple[ParameterSpec, ...]
    wanted: tuple[tuple[str, ...], ...]  # the groups that its programs talk over

    def groups(self) -> Groups:
        """All ranks must make the groups of all seats, in one order."""
        return Groups(self.mesh, self.wanted)


def find_pipeline_ranks(segments: Sequence[PlanStage], made: Sequence[Generated]) -> tuple[PipelineRank, ...]:
    """The seats of a plan, in the order of their devices."""
    meshes = sorted({segment.mesh for segment in segments}, key=lambda mesh: mesh.devices)
    taken: dict[int, Mesh] = {}
    for mesh in meshes:
        for device in mesh.devices:
            if device in taken:
                raise PlanError(
                    f"device {device} is in the meshes {taken[device]} and {mesh}; "
                    "all segments of a device have one mesh"
                )
            taken[device] = mesh
    return tuple(_seat(mesh, segments, made) for mesh in meshes)


def _seat(mesh: Mesh, segments: Sequence[PlanStage], made: Sequence[Generated]) -> PipelineRank:
    numbers = tuple(number for number, segment in enumerate(segments) if segment.mesh == mesh)
    held: dict[str, ParameterSpec] = {}
    wanted: dict[tuple[str, ...], None] = {}
    for number in numbers:
        program, module = made[number].program, made[number].module
        wanted |= dict.fromkeys(tuple(name.split("_")) for name in module.GROUPS)
        for one in check_table(program, parse(module.PARAMETERS, mesh, keys_in_use(program))):
            if one.name in held and held[one.name] != one:
                raise PlanError(f"parameter {one.name} is held in two ways by the segments of {mesh}")
            held[one.name] = one
    wanted |= dict.fromkeys(sorted(wanted_groups(held.values(), mesh)))
    return PipelineRank(mesh=mesh, segments=numbers, held=tuple(held.values()), wanted=tuple(wanted))


def check_table(program: LoweredProgram, parsed: Sequence[ParameterSpec]) -> Sequence[ParameterSpec]:
    """Refuse a table of parameters in a generated file that says something else than its program."""
    faults: list[str] = []
    wanted = {holding.key: holding for holding in program.parameters}
    for spec in parsed:
        holding = wanted.pop(spec.name, None)
        if holding is None:
            faults.append(f"{spec.name} is no parameter of the program")
            continue
        dtype = str(spec.dtype).removeprefix("torch.")
        unit = unit_of(holding.key) if any(level == 3 for _, level in holding.zero) else ""
        for what, there, here in (
            ("keys", spec.keys, holding.keys), ("shape", spec.shape, holding.shape), ("dtype", dtype, holding.dtype),
            ("trainable", spec.trainable, holding.trainable), ("layout", spec.layout, holding.layout),
            ("zero", spec.zero, holding.zero), ("unit", spec.unit, unit),
        ):  # fmt: skip
            if there != here:
                faults.append(f"{spec.name}: {what} is {there} in the file, and {here} in the program")
    faults += [f"{key} is missing" for key in wanted]
    raise_all(LoweringError, f"the parameters of {program.graph.name} are written down wrongly:", faults)
    return parsed


def with_masters(pp_ranks: Sequence[PipelineRank]) -> tuple[PipelineRank, ...]:
    """The same, where what is trained in less than float32 has a master."""

    def narrow(held: ParameterSpec) -> bool:
        return held.trainable and held.dtype.is_floating_point and held.dtype.itemsize < 4

    return tuple(
        replace(pp_rank, held=tuple(replace(held, master=True) if narrow(held) else held for held in pp_rank.held))
        for pp_rank in pp_ranks
    )


def check_held(pp_ranks: Sequence[PipelineRank], known: Seats, made: Sequence[Generated]) -> None:
    """Refuse an entry that reads parameters on devices that do not hold them: the first entry decided who does."""
    faults: list[str] = []
    storage_options = {mesh: {one.name for one in held} for mesh, held in known}
    for pp_rank in pp_ranks:
        for key in [one.name for one in pp_rank.held if one.name not in storage_options.get(pp_rank.mesh, ())]:
            there = [mesh.devices for mesh, names in storage_options.items() if key in names]
            graphs = [made[number].program.graph for number in pp_rank.segments]
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
    return [one.key for one in sorted(program.parameters, key=lambda one: used.get(one.value, len(used)))]

"""A smaller cluster: axes of two or three, and the first two and the last of each kind of pipeline rank.

    16 pipeline ranks of dp=8 x tp=8, 96 microbatches        3 of dp=2 x tp=2, 6 microbatches

The second pipeline rank of a kind takes over the stages of those that are dropped, chunk by chunk of an interleaved
schedule; a stage that begins in the middle of a layer still does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..layout import Axis, Mesh
from ..plan import Plan
from ..plan.plan import PlanStage
from ..schedule import Schedule, fewer, spread

Devices = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class SmallCluster:
    """The stages that represent those of a plan."""

    stage: tuple[int, ...]  # for each stage of the plan the kept one that takes it over
    like: tuple[int, ...]  # for each kept stage its index in the plan
    meshes: tuple[Mesh, ...]  # of the kept stages, as in the plan
    microbatches: int
    schedule: Schedule | None  # of the kept pipeline ranks, if the plan spells one out

    @property
    def axes(self) -> dict[str, int]:
        """The maximum size of each axis."""
        longest: dict[str, int] = {}
        for mesh in self.meshes:
            longest |= {axis.name: max(axis.size, longest.get(axis.name, 1)) for axis in mesh.axes}
        return longest

    def meshes_of(self, sizes: Mapping[str, int]) -> tuple[Mesh, ...]:
        """The meshes of the kept stages, with axes limited to `sizes`, devices renumbered."""
        pp_ranks: dict[Devices, Mesh] = {}
        count = 0
        for mesh in self.meshes:
            if mesh.devices not in pp_ranks:
                axes = tuple(Axis(name=axis.name, size=min(axis.size, sizes[axis.name])) for axis in mesh.axes)
                small = Mesh(axes=axes)
                pp_ranks[mesh.devices] = replace(small, devices=tuple(range(count, count + small.size)))
                count += small.size
        return tuple(pp_ranks[mesh.devices] for mesh in self.meshes)

    def steps(self, meshes: Sequence[Mesh]) -> Mapping[str, object] | None:
        """The schedule that the plan spells out, over other meshes."""
        if self.schedule is None:
            return None
        pp_ranks = tuple(dict.fromkeys(mesh.devices for mesh in meshes))
        return spread(self.schedule, pp_ranks).to_json()


def shrink_cluster(plan: Plan, stages: Sequence[PlanStage]) -> SmallCluster:
    """Which stages and how many microbatches represent those of a plan."""
    meshes = [stage.mesh for stage in stages]
    pp_ranks = list(dict.fromkeys(mesh.devices for mesh in meshes))
    at = {devices: number for number, devices in enumerate(pp_ranks)}
    place = [at[mesh.devices] for mesh in meshes]
    shape = {at[mesh.devices]: mesh.axes for mesh in meshes}
    heir = _heirs([shape[number] for number in range(len(pp_ranks))], spelled_out=plan.steps is not None)
    kept = [number for number, pp_rank in enumerate(place) if heir[pp_rank] == pp_rank]
    stage = tuple(_taken_over(number, place, heir, kept) for number in range(len(meshes)))
    left = len(set(heir))
    count = _microbatches(plan.microbatches, len(pp_ranks), left)
    schedule = None
    if plan.steps is not None:
        schedule = _of_pipeline_ranks(fewer(Schedule.from_json(plan.steps), count), pp_ranks)
    return SmallCluster(
        stage=stage, like=tuple(kept), meshes=tuple(meshes[number] for number in kept), microbatches=count,
        schedule=schedule,
    )  # fmt: skip


def _heirs(shapes: Sequence[tuple[Axis, ...]], *, spelled_out: bool) -> list[int]:
    """For each pipeline rank the one that takes over its stages: itself, or the second of its run of equal ones."""
    if spelled_out:  # a schedule without a name can't be shortened
        return list(range(len(shapes)))
    heirs: list[int] = []
    for start, end in _runs(shapes):
        heirs += [number if number < start + 2 or number == end - 1 else start + 1 for number in range(start, end)]
    return heirs


def _runs(shapes: Sequence[tuple[Axis, ...]]) -> Iterator[tuple[int, int]]:
    start = 0
    for at in range(1, len(shapes) + 1):
        if at == len(shapes) or shapes[at] != shapes[start]:
            yield start, at
            start = at


def _taken_over(number: int, place: Sequence[int], heir: Sequence[int], kept: Sequence[int]) -> int:
    """The kept stage, by its new index, that absorbs a stage: the next before or after it, so that stages
    stay in order. One of the two belongs to the rank that takes over: ranks are visited in order, down or up."""
    before = max((at for at in kept if at <= number), default=kept[0])
    after = min((at for at in kept if at >= number), default=kept[-1])
    mine = heir[place[number]]
    return kept.index(before if place[before] == mine else after)


def _microbatches(count: int, ranks: int, left: int) -> int:
    """As many per pipeline rank as before, up to two."""
    if count >= 2 * ranks:
        return min(count, max(2 * left, 2))
    if count >= ranks:
        return left + (count > ranks)
    return max(1, min(count, left - 1))


def _of_pipeline_ranks(schedule: Schedule, pp_ranks: Sequence[Devices]) -> Schedule:
    """A schedule with one device for each pipeline rank."""
    at = {devices: number for number, devices in enumerate(tuple(sorted(pp_rank)) for pp_rank in pp_ranks)}
    return replace(
        schedule,
        devices=tuple(schedule.devices[pp_rank[0]] for pp_rank in pp_ranks),
        holders=tuple((at[tuple(sorted(devices))],) for devices in schedule.holders),
    )

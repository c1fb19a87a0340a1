"""Measures collectives: every kind, by message size, in every kind of group that the ranks allow.

The groups of one kind all communicate at the same time, as they do in training, and the slowest counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.distributed as dist

from ..cluster import COLLECTIVES, Collective, Curve, Link, MeasuredCollective
from ..errors import ClusterError
from ..layout import Axis, Mesh
from ..runtime.collectives import process_group
from ..runtime.world import Group, Groups, World
from .timing import Effort, once, seconds

SMALLEST = 1024  # bytes
MEETINGS = 30  # times that ranks meet to see what they lose


def measure_collectives(
    world: World, ranks_per_node: int, effort: Effort, advance: Callable[[str], None]
) -> tuple[MeasuredCollective, ...]:
    tables = []
    for ranks, mesh in meshes(world.size, ranks_per_node):
        group = Groups(mesh)["group"]
        for kind in kinds_in(ranks):
            advance(f"{kind} {' + '.join(map(str, ranks))}")
            points = _points(kind, group, world, effort)
            tables.append(MeasuredCollective(kind=kind, ranks=ranks, seconds=Curve(points)))
    return tuple(tables)


def kinds_in(ranks: tuple[int, ...]) -> tuple[Collective, ...]:
    """A send is between two: it is measured in pairs only."""
    return tuple(kind for kind in COLLECTIVES if kind != "send" or sum(ranks) == 2)


def meshes(size: int, per_node: int) -> Iterator[tuple[tuple[int, ...], Mesh]]:
    """Meshes with an axis "group", and how the ranks of a group lie on nodes.

    With 2 nodes of 4: groups of 2 and of 4 in a node, of all 8, and of 2 with a rank on each node.
    """
    for count in range(2, size + 1):
        if size % count == 0 and (per_node % count == 0 or count % per_node == 0):
            ranks = (count,) if count <= per_node else (per_node,) * (count // per_node)
            yield ranks, _mesh(rest=size // count, group=count)
    nodes = size // per_node
    if per_node > 1:
        for count in range(2, nodes + 1):
            if nodes % count == 0:
                yield (1,) * count, _mesh(rest=nodes // count, group=count, place=per_node)


def _mesh(**sizes: int) -> Mesh:
    return Mesh(axes=tuple(Axis(name=name, size=size) for name, size in sizes.items()))


def count_per_node(hosts: list[str]) -> int:
    """How many ranks each node has, from the host of each rank."""
    counts = [len(list(ranks)) for _, ranks in groupby(hosts)]
    if len(counts) != len(set(hosts)) or len(set(counts)) != 1:
        raise ClusterError(f"the nodes must have equally many ranks in a row each, and they have {counts}")
    return counts[0]


def _points(kind: Collective, group: Group, world: World, effort: Effort) -> tuple[tuple[float, float], ...]:
    def agree(value: float) -> float:
        return _all_agree(value, world)

    points: list[tuple[float, float]] = []
    size = SMALLEST
    while size <= effort.largest:
        run, carried = call(kind, size, group, world.device)
        time = seconds(run, world.device, effort, agree)
        points.append((carried, float(f"{time:.4g}")))
        if time > effort.longest:
            break
        size *= effort.factor
    # A small message never takes longer than a large one. Where it did, something else was in the way.
    return tuple((size, min(time for _, time in points[place:])) for place, (size, _) in enumerate(points))


def call(kind: Collective, size: int, group: Group, device: torch.device) -> tuple[Callable[[], object], int]:
    """A call of a collective with about so many bytes, and how many they are."""
    share = max(1, size // 4 // group.size)
    full, part = (torch.zeros(count, device=device) for count in (share * group.size, share))
    other = torch.zeros_like(full)
    over = group.process_group
    calls: dict[Collective, Callable[[], object]] = {
        "all_reduce": lambda: process_group.all_reduce(full, over).wait(),
        "all_gather": lambda: process_group.all_gather(full, part, over).wait(),
        "reduce_scatter": lambda: process_group.reduce_scatter(part, full, over).wait(),
        "all_to_all": lambda: process_group.all_to_all(other, full, over).wait(),
        "broadcast": lambda: dist.broadcast(full, group.ranks[0], group=over),
        "send": lambda: _send(full, group),
    }
    return calls[kind], full.nbytes


def _send(tensor: torch.Tensor, group: Group) -> None:
    there = dist.isend if group.index == 0 else dist.irecv
    for work in dist.batch_isend_irecv([dist.P2POp(there, tensor, group.ranks[1 - group.index], group.process_group)]):
        work.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """What happens where kernels and collectives come together.

    overlap     how much of an all_reduce is hidden by matmuls that run meanwhile: (C + G - both) / min(C, G)
    lost        seconds that ranks lose when they synchronize in a collective between kernels, in addition to its own
                time: in a loop of collectives alone all ranks are there at once, between kernels one is always late
    """

    overlap: float
    lost: float


def measure_meeting(world: World, effort: Effort) -> Meeting:
    """Matmuls and an all_reduce that takes about as long: each alone, one after the other, and both at once.

    The results are small differences of large numbers, so each of these is the least of many, taken in turns.
    """
    group = Groups(_mesh(group=world.size))["group"]
    compute = _products(384, min(0.004, effort.longest / 4), world)
    message = _message(once(compute, world.device), group, world, effort)

    def communicate() -> None:
        process_group.all_reduce(message, group.process_group).wait()

    def one_after_the_other() -> None:
        compute()
        communicate()

    def at_once() -> None:
        work = process_group.all_reduce(message, group.process_group)
        compute()
        work.wait()

    runs = (compute, communicate, one_after_the_other, at_once)
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(max(3, min(MEETINGS, int(effort.each * 1000)))):
        for run, measured in zip(runs, times, strict=True):
            measured.append(_all_agree(once(run, world.device), world))
    computing, communicating, after, together = (min(measured) for measured in times)
    hidden = (computing + communicating - together) / min(computing, communicating)
    lost = max(0.0, after - computing - communicating)
    return Meeting(overlap=float(f"{min(max(hidden, 0.0), 1.0):.3g}"), lost=float(f"{lost:.3g}"))


def _message(seconds: float, group: Group, world: World, effort: Effort) -> torch.Tensor:
    """A message whose all_reduce takes about so long."""
    wanted, size = _all_agree(seconds, world), 2**15
    while True:
        message = torch.zeros(size, device=world.device)

        def run(message: torch.Tensor = message) -> None:
            process_group.all_reduce(message, group.process_group).wait()

        run()
        if min(_all_agree(once(run, world.device), world) for _ in range(3)) > wanted / 2:
            return message
        if message.nbytes >= effort.largest:
            return message
        size *= 2


def _products(side: int, seconds: float, world: World) -> Callable[[], None]:
    """As many products of squares as take about so long."""
    square = torch.rand(side, side, device=world.device)
    count = max(1, int(seconds / max(_all_agree(once(lambda: square @ square, world.device, 3, True), world), 1e-6)))

    def run() -> None:
        for _ in range(count):
            torch.mm(square, square)

    return run


def _all_agree(value: float, world: World) -> float:
    tensor = torch.tensor([value], dtype=torch.float64, device=world.device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return float(tensor)


def fit(name: str, measured: tuple[MeasuredCollective, ...], across: bool) -> Link | None:
    """A link for groups that were not measured, from the all_gathers of the smallest group that was.

    A ring of n passes S (n - 1) / n bytes in n - 1 hops.
    """
    tables = [
        table
        for table in measured
        if table.kind == "all_gather" and (set(table.ranks) == {1} if across else len(table.ranks) == 1)
    ]
    if not tables:
        return None
    table = min(tables, key=lambda table: sum(table.ranks))
    size = sum(table.ranks)
    (_, least), (large, longest) = table.seconds.points[0], table.seconds.points[-1]
    passed = large * (size - 1) / size / max(longest - least, longest / 10)
    return Link(name=name, bandwidth=float(f"{passed:.4g}"), latency=float(f"{least / (size - 1):.4g}"))

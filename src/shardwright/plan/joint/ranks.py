"""Pipeline ranks (the devices that run the same stages, and the mesh they form), and the inputs of a pipeline search.

Pipeline ranks are laid out in the order of the cluster's ranks, or with its groups reversed. Ranks on groups of
different devices may differ in size; on one group they are equal, or, where the count does not divide, of two sizes.
In a pipeline rank the outer axis splits the batch, and the inner one, inside a node, may split anything:

    32 devices in nodes of 8, 4 pipeline ranks of 8       8 x 1, 4 x 2, 2 x 4, 1 x 8
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product

from ...cluster import Cluster
from ...cost import TrainingSetup
from ...layout import Axis, Mesh
from ...rules import Analysis
from ...schedule import ScheduleKind
from ..constraint_kinds import Range
from ..context import SearchContext
from ..limits import Limits
from ..meshes import divisors

MOST_UNEQUAL = 8
"""Up to this many devices, pipeline ranks of two sizes are tried."""


@dataclass(frozen=True, kw_only=True)
class RankDevices:
    """The devices of one pipeline rank: `data` groups of `inner` neighbours, on axes of these names."""

    devices: tuple[int, ...]
    data: int
    inner: int
    names: tuple[str, str]

    @cached_property
    def mesh(self) -> Mesh:
        """Without axes of one device."""
        sizes = zip(self.names, (self.data, self.inner), strict=True)
        axes = tuple(Axis(name=name, size=size) for name, size in sizes if size > 1)
        return Mesh(axes=axes, devices=self.devices)

    def kind(self, cluster: Cluster) -> tuple[object, ...]:
        """Pipeline ranks of one kind take the same time for everything."""
        both = (Axis(name=name, size=size) for name, size in zip(self.names, (self.data, self.inner), strict=True))
        mesh = Mesh(axes=tuple(both), devices=self.devices)
        spans = tuple(cluster.spans(mesh, axes) for axes in (self.names[:1], self.names[1:], self.names))
        return cluster.device(self.devices[0]), self.data, self.inner, spans


Run = tuple[int, int, int]
"""Consecutive identical pipeline ranks: how many, of how many devices, beginning at which device."""


def rank_assignments(cluster: Cluster, size: int) -> Iterator[tuple[Run, ...]]:
    """All ways to divide the first `size` devices of a cluster into pipeline ranks."""
    groups = _groups(cluster, size)
    if len(groups) == 1:
        yield from _equal_or_two(size)
        return
    for counts in product(*(divisors(count) for _, count in groups)):
        runs = [(pp_ranks, count // pp_ranks, start) for pp_ranks, (start, count) in zip(counts, groups, strict=True)]
        yield tuple(runs)
        yield tuple(reversed(runs))


def _groups(cluster: Cluster, size: int) -> list[tuple[int, int]]:
    """The first rank and the number of devices of each group of equal devices."""
    groups: list[tuple[int, int]] = []
    last, start = None, 0
    for group in cluster.groups:
        count = min(group.size, size - start)
        if count <= 0:
            break
        if last is not None and group.node == last:
            groups[-1] = (groups[-1][0], groups[-1][1] + count)
        else:
            groups.append((start, count))
        last, start = group.node, start + count
    return groups


def _equal_or_two(size: int) -> Iterator[tuple[Run, ...]]:
    for stages in range(1, size + 1):
        if size % stages == 0:
            yield ((stages, size // stages, 0),)
        elif size <= MOST_UNEQUAL:
            for small, large in ((d, 2 * d) for d in range(1, size)):  # small * a + large * b = size, a + b = stages
                more, rest = divmod(size - small * stages, small)
                if not rest and 0 < more < stages:
                    few = stages - more
                    yield ((few, small, 0), (more, large, few * small))
                    yield ((more, large, 0), (few, small, more * large))


def place_ranks(
    runs: Sequence[Run], cluster: Cluster, names: tuple[str, str], data_only: bool = False
) -> Iterator[tuple[RankDevices, ...]]:
    """The pipeline ranks of some runs, for each choice of the runs' inner axes."""
    inner_sizes = [[inner for inner in divisors(count) if inner <= _inside(cluster, start)] for _, count, start in runs]
    if data_only:
        inner_sizes = [[1] for _ in runs]
    for inners in product(*inner_sizes):
        yield tuple(
            RankDevices(
                devices=tuple(range(start + at * count, start + (at + 1) * count)),
                data=count // inner,
                inner=inner,
                names=names,
            )
            for (pp_ranks, count, start), inner in zip(runs, inners, strict=True)
            for at in range(pp_ranks)
        )


class RankKinds:
    """The kinds of pipeline ranks, cached: ranks that begin at the same place of identical nodes are of one kind."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._known: dict[tuple[object, ...], tuple[object, ...]] = {}

    def of(self, pp_rank: RankDevices) -> tuple[object, ...]:
        first, last = pp_rank.devices[0], pp_rank.devices[-1]
        groups, group = self.cluster.groups, self.cluster.node_of(first)[0]
        start: object = pp_rank.devices  # ranks across groups, or with gaps, are not cached by place
        if group == self.cluster.node_of(last)[0] and last - first + 1 == len(pp_rank.devices):
            start = (group, (first - sum(before.size for before in groups[:group])) % groups[group].node.devices)
        key = (start, len(pp_rank.devices), pp_rank.data, pp_rank.inner, pp_rank.names)
        if key not in self._known:
            self._known[key] = pp_rank.kind(self.cluster)
        return self._known[key]


def _inside(cluster: Cluster, rank: int) -> int:
    return cluster.groups[cluster.node_of(rank)[0]].node.devices


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRequest:
    """What the user asks of a pipeline; None leaves it open."""

    stages: Range | None = None
    microbatches: Range | None = None
    schedule: ScheduleKind | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSetup:
    """The graph, the cluster, the request.

    size       how many devices of the cluster
    room       the memory limit of a device of a pipeline rank
    local      the graph is that of one microbatch
    names      of the outer and the inner axis of a pipeline rank
    context    that of the flat search, reused where possible
    slack      relative gain below which another pipeline is not tried
    upper      seconds that a pipeline has to beat
    """

    analysis: Analysis
    cluster: Cluster
    training: TrainingSetup
    limits: Limits
    size: int
    room: Callable[[RankDevices], float]
    recompute: bool = True
    local: bool = False
    names: tuple[str, str] = ("x", "y")
    request: PipelineRequest = field(default_factory=PipelineRequest)
    context: SearchContext | None = None
    slack: float = 0.005
    upper: float = math.inf
    stop: Callable[[], bool] = lambda: False
    progress: Callable[[str, float], None] = lambda what, best: None

    def parts(self, microbatches: int) -> int:
        """Into how many microbatches the graph's batch is split."""
        return 1 if self.local else microbatches

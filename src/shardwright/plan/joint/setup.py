"""The inputs of a pipeline search."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from ...cluster import Cluster
from ...cost import TrainingSetup
from ...rules import Analysis
from ...schedule import ScheduleKind
from ..context import SearchContext
from ..limits import Limits
from .ranks import RankDevices


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRequest:
    """What the user asks of a pipeline; None leaves it open."""

    stages: int | None = None
    microbatches: int | None = None
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

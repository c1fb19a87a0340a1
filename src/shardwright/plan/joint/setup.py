"""What a search for a pipeline stands on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from ...cluster import Cluster
from ...cost import TrainingSetup
from ...rules import Analysis
from ..context import SearchContext
from ..limits import Limits
from .ranks import RankDevices


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRequest:
    """What is asked of a pipeline; None leaves it open."""

    stages: int | None = None
    microbatches: int | None = None
    schedule: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSetup:
    """The graph, the cluster, what is asked.

    size       how many devices of the cluster
    room       bytes that a device of a seat may use
    local      the graph is that of one microbatch
    names      of the outer and the inner axis of a seat
    frame      that of a flat search, of which what can be is used again
    slack      what another pipeline must be better by, relatively, to be worth a look
    upper      seconds that a pipeline has to stay below
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
    asked: PipelineRequest = field(default_factory=PipelineRequest)
    frame: SearchContext | None = None
    slack: float = 0.005
    upper: float = math.inf
    stop: Callable[[], bool] = lambda: False
    progress: Callable[[str, float], None] = lambda what, best: None

    def parts(self, microbatches: int) -> int:
        """Into how many parts the graph's batch is cut in time."""
        return 1 if self.local else microbatches

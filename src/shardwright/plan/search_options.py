"""The options of a search."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from .constraint_kinds import Constraints

Progress = Callable[[str, float], None]
"""Called with the mesh being tried, and the best time so far in seconds (infinity if there is none)."""


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Options of the search.

    memory        memory limit of a device in bytes; None: what the cluster's devices have, less the margin
    recompute     whether activation checkpointing is allowed
    seconds       time limit of the search
    aim           the relative gap at which a mesh counts as solved
    slack         the relative gain below which another mesh is not tried
    data_only     every axis splits the batch: each data-parallel replica passes its own samples
    pipelines     whether pipelines are searched too
    microbatches  the number of microbatches, if it is fixed
    local         each microbatch is a batch of its own, and the graph is that of one
    stop          returns True to end the search with the best so far
    upper         seconds of a step that a plan must beat; a search for such a plan ends as soon as none can
    chunked       losses whose logits are made in chunks, beside those that constraints name
    constraints   what every plan has to satisfy
    progress      is called with what is tried, as the search proceeds
    """

    memory: float | None = None
    recompute: bool = True
    seconds: float = math.inf
    aim: float = 0.002
    slack: float = 0.005
    data_only: bool = False
    pipelines: bool = True
    microbatches: int | None = None
    local: bool = False
    stop: Callable[[], bool] | None = None
    upper: float = math.inf
    chunked: tuple[str, ...] = ()
    constraints: Constraints = field(default_factory=Constraints)
    progress: Progress | None = None

    def report(self, what: str, best: float) -> None:
        """Say what is being tried."""
        if self.progress is not None:
            self.progress(what, best)

"""`PlanRequest`: what the user asked for, parsed once at the border.

    "auto"                              AutoPlan
    "dp=2,tp=2", {"dp": 2, "tp": 2}     PolicyRequest
    "plan.json", Path("plan.json")      PlanFile
    a Plan                              itself
    a function (graph, devices)         itself

`read_source` parses what people pass as `plan=`; from there on there are types. Whatever else a plan depends on
(the cluster, how the model is trained, the memory limit, constraints, microbatches) is in the request too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ..cluster import Cluster
from ..cost import TrainingSetup
from ..errors import PlanError
from ..formats import read_json
from ..ir import Graph
from .file import load, validated
from .plan import Plan
from .search_options import SearchOptions
from .strings import AUTO, PolicyRequest, parse_plan_string, plan_text

PolicyFunction = Callable[[Graph, int], Plan]
PlanLike = str | Path | Plan | Mapping[str, Any] | PolicyFunction
"""What a user may pass as `plan=`."""


@dataclass(frozen=True, slots=True)
class AutoPlan:
    """The search finds the plan."""

    def __str__(self) -> str:
        return "auto"


@dataclass(frozen=True, kw_only=True)
class PlanFile:
    """The plan in a file."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def load(self, graph: Graph) -> Plan:
        return load(self.path, graph)

    @cached_property
    def data(self) -> Mapping[str, Any]:
        """The file, as far as it can be checked without a graph."""
        data: Mapping[str, Any] = validated(read_json(self.path, PlanError), self.path)
        return data

    @property
    def size(self) -> int:
        """The number of devices that the plan is for."""
        stages = next(iter(self.data["entries"].values()), ())
        devices = {device for stage in stages for device in stage.get("devices", ())}
        return len(devices) or math.prod(self.data["mesh"].values())


PlanSource = AutoPlan | PolicyRequest | PlanFile | Plan | PolicyFunction
"""Where a plan comes from."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A plan as somebody asks for it.

    source    what makes the plan
    options   of the search; the memory limit, microbatches and constraints hold for any plan
    training  how the model is trained
    cluster   to plan for and to price on; None: the search takes this machine, and nothing else is priced
    """

    source: PlanSource = AutoPlan()
    options: SearchOptions = field(default_factory=SearchOptions)
    training: TrainingSetup = field(default_factory=TrainingSetup)
    cluster: Cluster | None = None

    @classmethod
    def read(cls, plan: PlanLike, **others: Any) -> PlanRequest:
        """The request for a plan as people pass it."""
        return cls(source=read_source(plan), **others)

    @property
    def searches(self) -> bool:
        """Whether the plan is searched for."""
        return isinstance(self.source, AutoPlan)


def read_source(plan: PlanLike) -> PlanSource:
    """Parse what was passed as `plan=`."""
    if isinstance(plan, Path) or (isinstance(plan, str) and plan.endswith(".json")):
        return PlanFile(path=Path(plan))
    if isinstance(plan, Mapping):
        plan = plan_text(plan)
    if isinstance(plan, str):
        return AutoPlan() if plan == AUTO else parse_plan_string(plan)
    if not isinstance(plan, Plan) and not callable(plan):
        raise PlanError(
            f'the plan is a {type(plan).__name__}; pass "auto", a plan string such as "dp=2,tp=2", a Plan, the path of '
            "a plan file, or a function of a graph and a number of devices"
        )
    return plan


def source_size(source: PlanSource) -> int | None:
    """The number of devices that a source fixes; None if it takes any."""
    return source.size if isinstance(source, PolicyRequest | PlanFile | Plan) else None


def source_name(source: PlanSource) -> str:
    """A source as people wrote it."""
    if isinstance(source, Plan):
        return source.policy or "a plan"
    if isinstance(source, AutoPlan | PolicyRequest | PlanFile):
        return str(source)
    return str(getattr(source, "__qualname__", type(source).__name__))

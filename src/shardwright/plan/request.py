"""`PlanRequest`: what the user asked for, parsed once at the border.

    "auto"                              AutoPlan
    "dp=2,tp=2", {"dp": 2, "tp": 2}     PolicyRequest
    "plan.json", Path("plan.json")      PlanFile
    a Plan                              itself
    "auto,pp=2,tp=2"                    AutoPlan within what the string says
    a policy (graph, cluster)           itself
    "mine.py:policy"                    the policy of that name

`read_source` parses what people pass as `plan=`; from there on there are types. Whatever else a plan depends on
(the cluster, how the model is trained, the memory limit, constraints, microbatches) is in the request too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from ..cluster import Cluster
from ..cost import TrainingSetup
from ..errors import PlanError
from ..formats import read_json
from ..ir import Graph
from ..python_files import find_function
from .constraint_kinds import Constraint
from .file import load, validated
from .plan import Plan
from .policy_builder import PolicyBuilder
from .search_options import SearchOptions
from .string_constraints import string_constraints
from .strings import AUTO, PolicyRequest, parse_plan_string, plan_text

PolicyFunction = Callable[[Graph, Cluster], Plan | PolicyBuilder]
PlanLike = str | Path | Plan | Mapping[str, Any] | PolicyFunction
"""What a user may pass as `plan=`."""


@dataclass(frozen=True, slots=True)
class AutoPlan:
    """The search finds the plan. `within`: what a plan string after the word says of it."""

    within: PolicyRequest | None = None

    def __str__(self) -> str:
        return "auto" if self.within is None else f"auto,{self.within}"

    def constraints(self) -> tuple[Constraint, ...]:
        """What the string says, as constraints."""
        return () if self.within is None else tuple(string_constraints(self.within, str(self)))


class ReadablePlan(Protocol):
    """A plan that is read for a graph when that is known."""

    def load(self, graph: Graph) -> Plan: ...


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


PlanSource = AutoPlan | PolicyRequest | PlanFile | Plan | PolicyFunction | ReadablePlan
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
        """Whether the plan is searched for, or may be: by a policy that leaves something open."""
        return isinstance(self.source, AutoPlan) or is_policy(self.source)


def read_source(plan: PlanLike) -> PlanSource:
    """Parse what was passed as `plan=`."""
    if isinstance(plan, Path) or (isinstance(plan, str) and plan.endswith(".json")):
        return PlanFile(path=Path(plan))
    if isinstance(plan, Mapping):
        plan = plan_text(plan)
    if isinstance(plan, str):
        return _read_string(plan)
    if not isinstance(plan, Plan) and not callable(plan):
        raise PlanError(
            f'the plan is a {type(plan).__name__}; pass "auto", a plan string such as "dp=2,tp=2", a Plan, the path of '
            "a plan file, or a policy: a function of a graph and a cluster, or its name (mine.py:policy)"
        )
    return plan


_FUNCTION = re.compile(r"[\w./\\-]+:[A-Za-z_]\w*")


def _read_string(text: str) -> PlanSource:
    if _FUNCTION.fullmatch(text):
        function: PolicyFunction = find_function(text, "a policy; write FILE.py:FUNCTION or MODULE:FUNCTION")
        return function
    word, _, words = text.replace(" ", "").partition(",")
    if word == AUTO:
        return AutoPlan(parse_plan_string(words)) if words else AutoPlan()
    return parse_plan_string(text)


def is_policy(source: PlanSource) -> bool:
    """Whether a source is a policy: a function of a graph and a cluster."""
    return callable(source) and not isinstance(source, Plan)


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

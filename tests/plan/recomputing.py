"""Plans that recompute modules which a test names."""

from __future__ import annotations

from collections.abc import Callable

from shardwright.cluster import Cluster
from shardwright.ir import Graph
from shardwright.plan import POLICIES, Plan, PlanBuilder, parse_plan_string
from shardwright.rules import Analysis


def plan_of(graph: Graph, text: str, *paths: str, analysis: Analysis | None = None) -> Plan:
    """The plan of a plan string, with modules that are recomputed."""
    request = parse_plan_string(text)
    builder = PlanBuilder(graph, request.mesh, analysis)
    for name, axis in request.parts:
        POLICIES[name](builder, axis)
    for path in paths:
        builder.recompute(path)
    return builder.finish(str(request))


def recomputing(text: str, *paths: str) -> Callable[[Graph, Cluster], Plan]:
    """The same as a policy, for `verify` and `parallelize`."""
    return lambda graph, cluster: plan_of(graph, text, *paths)

"""How many data-parallel replicas a plan will have, before there is a plan."""

from __future__ import annotations

import math

from ..errors import InputError
from ..layout import Mesh
from ..plan import Plan, parse_plan_string
from ..planning import PlanLike
from ..rules.replica_axes import REPLICAS, replica_axes
from ..runtime.world import World


def replicas_of(plan: PlanLike, world: World) -> tuple[Mesh, tuple[str, ...]]:
    """The mesh that a plan will have and its axes that split the batch, before there is a plan."""
    if isinstance(plan, Plan):
        return plan.mesh, replica_axes(plan.mesh)
    if not isinstance(plan, str) or plan.endswith(".json"):
        raise InputError(
            'inputs="per_replica" needs a plan string or a Plan, so that the global batch is known before planning'
        )
    text = plan if plan != "auto" else f"dp={world.size}" if world.size > 1 else "single"
    request = parse_plan_string(text, world.size)
    return request.mesh, tuple(axis.name for policy, axis in request.parts if policy in REPLICAS)


def count_replicas(plan: PlanLike, world: World) -> int:
    """How many data-parallel groups a plan will have."""
    mesh, axes = replicas_of(plan, world)
    return math.prod(mesh.sizes[name] for name in axes)

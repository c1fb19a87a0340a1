"""How many data-parallel replicas a plan will have, before there is a plan."""

from __future__ import annotations

import math

from ..errors import InputError
from ..layout import Mesh
from ..plan import Plan, PolicyRequest, parse_plan_string
from ..plan.request import AutoPlan, PlanSource
from ..rules.replica_axes import REPLICAS, replica_axes


def replicas_of(source: PlanSource, size: int) -> tuple[Mesh, tuple[str, ...]]:
    """The mesh that a plan for `size` devices will have and its axes that split the batch, before there is a plan."""
    if isinstance(source, Plan):
        return source.mesh, replica_axes(source.mesh)
    if isinstance(source, AutoPlan):
        source = parse_plan_string(f"dp={size}" if size > 1 else "single")
    if not isinstance(source, PolicyRequest):
        raise InputError(
            'inputs="per_replica" needs a plan string or a Plan, so that the global batch is known before planning'
        )
    source.check_size(size)
    return source.mesh, tuple(axis.name for policy, axis in source.parts if policy in REPLICAS)


def count_replicas(source: PlanSource, size: int) -> int:
    """How many data-parallel replicas a plan for `size` devices will have."""
    mesh, axes = replicas_of(source, size)
    return math.prod(mesh.sizes[name] for name in axes)

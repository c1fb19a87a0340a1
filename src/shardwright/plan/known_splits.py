"""The splits of plan strings, which the search tries where memory is short.

There a plan has its peak in transient memory, which the tables of a search only estimate: what they take for lean may
not be, and the splits that people know to be lean may seem not to be. So these are solved too, with the storage of
every parameter and what is recomputed left open: no plan string that fits is faster than what the search finds.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import PlanError
from .context import SearchContext
from .meshes import MeshCandidate, divisors
from .policies import build_plan
from .spaces import FixedChoices
from .strings import parse_plan_string
from .tables import Tables

MOST_SPLIT = 16
"""The most devices that an inner axis has here, which splits weights."""


def known_splits(context: SearchContext) -> Iterator[tuple[MeshCandidate, Tables]]:
    """Tables in which every op is split as a plan string does it; none if constraints ask for other meshes."""
    limits, kinds = context.limits, context.kinds
    if limits.axes or limits.together:
        return
    for text in _strings(context.size or context.cluster.size, context.per_replica):
        try:
            plan = build_plan(context.analysis.graph, parse_plan_string(text), context.analysis)
        except PlanError:  # it is not for this model: a batch or heads that do not divide
            continue
        split = plan.choices(context.analysis.graph.entry)
        choices = {name: split.get(name, {}) for name in kinds.of}
        first = {kind: choices[op.name] for kind, op in enumerate(kinds.first)}
        alike = all(choices[name] == first[kind] for name, kind in kinds.of.items())
        demands = limits.demands.items()
        if alike and all(demand.is_met(choices[name], plan.mesh.names) for name, every in demands for demand in every):
            candidate = MeshCandidate(plan.mesh, data=tuple(plan.mesh.names) if context.per_replica else ())
            tables = context.tables(context.plain, candidate, fixed=FixedChoices(choices))
            if tables is not None:
                yield candidate, tables


def _strings(size: int, per_replica: bool) -> Iterator[str]:
    """The plan strings for so many devices, without storage; sp is the leaner form of tp."""
    yield f"dp={size}"
    if per_replica:
        return
    for inner in divisors(size):
        if 1 < inner <= MOST_SPLIT:
            yield f"dp={size // inner},sp={inner}" if inner < size else f"sp={inner}"


__all__ = ["known_splits"]

"""What a plan with stages or microbatches would cost if some ops were split otherwise.

Each alternative is a plan of its own, priced as any (`price_stages`): its schedule and its memory are simulated again.
Other ops stay as they are, and so does how an op is split into microbatches.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ...cost.reshard_tables import ReshardTables
from ...errors import LayoutError, LoweringError, PlanError
from ...layout import MB, Mesh
from ..op_kinds import OpKinds
from ..pipeline import microbatches_of, timed
from ..spaces import ChoiceSpaces, FixedChoices
from ..whatif import Alternative, Choice, WhatIfQuery
from .price_stages import price_pipeline


def stage_alternatives(query: WhatIfQuery, most: int) -> tuple[Alternative, ...]:
    """The ways to split the asked ops, the fastest first; at most so many, the chosen one in any case."""
    plan, name = query.plan, query.ops[0]
    stage = next(stage for stage in plan.entries[query.entry] if name in stage.choices)
    count = 1 if plan.local else microbatches_of(plan, query.analysis.graph)
    mesh = timed(replace(stage.mesh, devices=()), count)
    layouts = query.analysis.signatures[name].layouts
    planned = stage.choices[name]
    results = []
    for choice in _choices(query, mesh, planned):
        seconds, memory = _price(query, choice)
        chosen = layouts(choice, mesh) == layouts(planned, mesh)
        results.append(Alternative(choice=choice, chosen=chosen, seconds=seconds, memory=memory, follow=math.nan))
    results.sort(key=lambda way: (way.seconds, not way.chosen))
    return tuple(way for at, way in enumerate(results) if at < most or way.chosen)


def _choices(query: WhatIfQuery, mesh: Mesh, planned: Choice) -> list[Choice]:
    """Every choice of the first op that goes through microbatches as planned."""
    choices = query.plan.choices(query.entry)
    names = set(mesh.names)
    known = {op: {axis: role for axis, role in choice.items() if axis in names} for op, choice in choices.items()}
    kinds = OpKinds(query.analysis, query.training, {**known, **dict.fromkeys(query.ops, "asked")}, {})
    spaces = ChoiceSpaces(kinds, ReshardTables(mesh, query.cluster), fixed=FixedChoices(known, query.ops))
    return [choice for choice in spaces.of(kinds.of[query.ops[0]]).choices if choice.get(MB) == planned.get(MB)]


def _price(query: WhatIfQuery, choice: Choice) -> tuple[float, float]:
    """Seconds and bytes of the plan with a choice; infinity if such a plan can't run."""
    changed = dict.fromkeys(query.ops, choice)
    stages = tuple(
        replace(stage, choices={op: changed.get(op, planned) for op, planned in stage.choices.items()})
        for stage in query.plan.entries[query.entry]
    )
    plan = replace(query.plan, entries={query.entry: stages})
    try:
        priced = price_pipeline(
            query.analysis, query.cluster, query.training, plan, replica_axes=query.replica_axes, limit=query.limit
        )
    except (PlanError, LayoutError, LoweringError):  # it would communicate between microbatches
        return math.inf, math.inf
    return priced.seconds, priced.peak_memory

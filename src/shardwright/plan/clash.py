"""Constraints that can't be met together: a smallest set of them, found by leaving out one after the other.

    items = all constraints, and the memory of a device
    for each item: if what is left still clashes, leave it out

What remains clashes, and does not if any one of it is left out. A check is that of
`SearchContext.least_memory`: whether on any mesh anything is allowed, and takes little enough memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..cluster import Cluster
from ..cost import TrainingSetup
from .binder import sizes_of
from .constraint_kinds import (
    AxisConstraint,
    ChoiceConstraint,
    ChunkedLossConstraint,
    Constraint,
    Constraints,
    ConstraintSource,
    DevicesConstraint,
    MemoryConstraint,
    PipelineConstraint,
    RecomputeConstraint,
    ReplicateConstraint,
    SameSplitConstraint,
    SplitConstraint,
    StageCutConstraint,
    ZeroConstraint,
)
from .context import SearchContext

SECONDS = 60.0
"""How long to look for what can be left out."""


@dataclass(frozen=True, kw_only=True)
class Clash:
    """Constraints that can't be met together. `least`: bytes that a device needs at least without those on memory."""

    constraints: Constraints
    frame: SearchContext
    smallest: bool
    least: float = math.inf
    reserve: float = 0.0

    @property
    def items(self) -> tuple[Constraint, ...]:
        return self.constraints.items

    def __str__(self) -> str:
        alone = len(self.items) == 1
        head = "this can't be done:" if alone else "these can't be done together:"
        lines = [head, *(f"  - {item.source}\n    {self._remedy(item)}" for item in self.items)]
        if not self.smallest:
            lines.append("finding out took too long: some of them may have no part in it")
        elif not alone:
            lines.append("without any one of them there is a plan")
        return "\n".join(lines)

    def _remedy(self, item: Constraint) -> str:
        """What to change about a constraint, with the numbers that it meets."""
        if isinstance(item, MemoryConstraint):
            if self.least == math.inf:
                return "allow more"
            return f"at least {format_bytes(self.least + self.reserve)} are needed with the rest; allow more"
        if isinstance(item, AxisConstraint):
            cluster = self.frame.cluster
            inside = min(group.node.devices for group in cluster.groups)
            count = self.frame.size or cluster.size
            there = "is 1 device" if count == 1 else f"are {count} devices"
            return f"there {there}, {inside} on a node; ask for another size, or say less of the axis"
        if isinstance(item, SplitConstraint):
            sizes = sizes_of(item, self.constraints, self.frame.analysis)
            return f"{sizes}; ask for another label, or for an axis that divides it"
        return REMEDIES[type(item)]


REMEDIES: dict[type, str] = {
    ReplicateConstraint: "allow a split, or name the axis on which there is to be none",
    SameSplitConstraint: "leave out the modules that differ",
    ChunkedLossConstraint: "leave it to the search whether logits are made in chunks",
    RecomputeConstraint: "leave it to the search what is recomputed",
    ZeroConstraint: "allow another level",
    ChoiceConstraint: "leave it to the search, or choose a split that goes with the rest",
    DevicesConstraint: "leave it to the search which devices a stage has",
    PipelineConstraint: "leave it to the search",
    StageCutConstraint: "leave it to the search where stages begin",
}


def format_bytes(bytes: float) -> str:
    """Bytes for people."""
    unit, size = next((pair for pair in (("GiB", 2**30), ("MiB", 2**20)) if bytes >= pair[1]), ("KiB", 2**10))
    return f"{bytes / size:.4g} {unit}"


def with_memory(
    constraints: Constraints, memory: float | None, cluster: Cluster, training: TrainingSetup
) -> Constraints:
    """The constraints, and as one of them the memory that there is."""
    if memory is not None:
        source = ConstraintSource(text=format_bytes(memory), where="the memory that is asked for")
    else:
        memory = training.room(cluster.memory)
        source = ConstraintSource(text=format_bytes(memory), where=f"the memory of a device of {cluster}")
    return replace(constraints, items=(*constraints.items, MemoryConstraint(bytes=memory, source=source)))


def find_clash(
    constraints: Constraints,
    frame: Callable[[Constraints], SearchContext],
    reserve: float = 0.0,
    seconds: float = SECONDS,
) -> Clash | None:
    """A smallest set that can't be met; None if all can be, as far as this check sees.

    `frame` makes the search context under some constraints; `reserve` are bytes that the check does not see.
    """
    began = time.monotonic()

    def least(items: tuple[Constraint, ...], enough: float = -math.inf) -> float:
        return frame(replace(constraints, items=items)).least_memory(enough)

    def clashes(items: tuple[Constraint, ...]) -> bool:
        limit = min((item.bytes for item in items if isinstance(item, MemoryConstraint)), default=math.inf) - reserve
        needed = least(items, enough=limit)
        return needed > limit or needed == math.inf

    left: tuple[Constraint, ...] = tuple(item for item in constraints.items if not isinstance(item, MemoryConstraint))
    if not clashes(left):  # else memory has no part in it, and checks are quick
        left = constraints.items
        if not clashes(left):
            return None
    smallest = True
    for item in left:
        if time.monotonic() - began > seconds:
            smallest = False
            break
        without = tuple(other for other in left if other is not item)
        if clashes(without):
            left = without
    limited = any(isinstance(item, MemoryConstraint) for item in left)
    needed = (
        least(tuple(item for item in left if not isinstance(item, MemoryConstraint)))
        if limited and smallest
        else math.inf
    )
    rest = replace(constraints, items=left)
    return Clash(constraints=rest, frame=frame(rest), smallest=smallest, least=needed, reserve=reserve)

"""What constraints come to for one graph: what the search may do with each op, parameter, layer and axis."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..ir import Graph, Op
from ..ir.paths import is_inside
from ..rules import FAN
from ..storage import Storage
from .chunking import ChunkCounts
from .constraint_kinds import AxisConstraint, ChoiceDemand, Range
from .problem_structure import Ways, alike

RUN_WHOLE = ("", FAN)
"""The choices of an op that is not split."""


ANY_LEVEL = Range()


@dataclass(frozen=True, slots=True)
class StorageLimit:
    """How a parameter may be stored: the ZeRO levels, and if they are fixed, the axis to shard along and the kind."""

    zero: Range = ANY_LEVEL
    on: str | None = None
    kind: str | None = None

    def allowed(self, options: Sequence[Storage], trainable: bool) -> tuple[Storage, ...]:
        """Those of some options (the first is replicated) that are within the limit.

        At least a level is asked of copies that can be sharded so: where there are none, what is there may stay.
        """
        axes = () if self.on is None else (self.on,)
        fit = [
            option
            for option in options
            if len(option.sharded()) in self.zero
            and (not option.axes or not axes or option.axes == axes)
            and self.kind in (None, option.name)
        ]
        if fit or (self.on is not None and trainable):
            return tuple(fit)
        possible = [o for o in options if len(o.sharded()) >= self.zero.least]
        return () if possible else tuple(options[:1])


def ungathered(limit: StorageLimit | None) -> StorageLimit:
    """A limit that leaves out parameters which are gathered where they are used; one that asks for them stays."""
    limit = limit or StorageLimit()
    capped = limit.zero.within(Range(most=1))
    return replace(limit, zero=capped) if capped.least <= capped.most else limit


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The constraints of a search, resolved for one graph.

    axes       constraints on axes, by name
    demands    constraints on the choices of ops
    together   for some ops the group whose ops are split the same way
    storing    how some parameters may be stored
    must       modules that have to be recomputed
    never      ops that must not be recomputed
    chunked    losses whose logits are made in chunks, None for the usual number of them
    unchunked  losses whose logits are not
    memory     the memory limit in bytes
    pipeline   the requested stages, microbatches and schedule
    pivots     ops before which a stage begins
    uncut      modules that are on one stage, each with its ops
    devices    of each stage; () leaves them open
    why        for some ops the constraints on their choices, in words
    """

    axes: Mapping[str, tuple[AxisConstraint, ...]] = field(default_factory=dict)
    demands: Mapping[str, tuple[ChoiceDemand, ...]] = field(default_factory=dict)
    together: Mapping[str, str] = field(default_factory=dict)
    storing: Mapping[str, StorageLimit] = field(default_factory=dict)
    must: tuple[str, ...] = ()
    never: tuple[Op, ...] = ()
    chunked: ChunkCounts = field(default_factory=dict)
    unchunked: frozenset[str] = frozenset()
    memory: float = float("inf")
    pipeline: Mapping[str, Range | str] = field(default_factory=dict)
    pivots: tuple[Op, ...] = ()
    uncut: Mapping[str, tuple[Op, ...]] = field(default_factory=dict)
    devices: tuple[tuple[int, ...], ...] = ()
    why: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def decisions(self) -> dict[str, object]:
        """For `OpKinds`: ops and parameters under different constraints are of different kinds."""
        grouped = {name: (group, self.demands.get(name)) for name, group in self.together.items()}
        return {**self.demands, **grouped, **self.storing}

    def count(self, what: str) -> Range | None:
        """The requested number of stages or microbatches."""
        value = self.pipeline.get(what)
        return value if isinstance(value, Range) else None

    @property
    def schedule(self) -> str | None:
        """The requested schedule."""
        value = self.pipeline.get("schedule")
        return None if value is None else str(value)

    def ways(self, graph: Graph, base: Ways, *, free: bool = True) -> dict[str, tuple[frozenset[str], ...]]:
        """The recomputation options that are left; without `free` only those of layers that must be recomputed."""
        allowed: dict[str, tuple[frozenset[str], ...]] = {}
        forced: set[str] = set()
        own = [path for path in self.must if not any(is_inside(path, at) or is_inside(at, path) for at in base)]
        for layer, ways in {**base, **{path: (frozenset([path]),) for path in own}}.items():
            must = [path if is_inside(path, layer) else layer for path in self.must
                    if is_inside(path, layer) or is_inside(layer, path)]  # fmt: skip
            more = [frozenset([*must, *(path for path in modules if not any(is_inside(path, outer) for outer in must))])
                    for modules in (frozenset[str](), *ways)
                    if not any(is_inside(outer, path) for outer in must for path in modules)]  # fmt: skip
            ops = [op for op in graph.ops if any(is_inside(op.module_path, path) for path in must)]
            allowed[layer] = tuple(
                modules
                for modules in dict.fromkeys((*ways, *more))
                if all(_is_in(op, modules) for op in ops) and not any(_is_in(op, modules) for op in self.never)
            )
            forced |= {layer} if must else set()
        heads = alike(graph, self.together, allowed)
        allowed = {layer: _shared(layer, [other for other in allowed if heads[other] == heads[layer]], allowed)
                 for layer in allowed}  # fmt: skip
        bound = {heads[layer] for layer in forced}
        return {layer: ways for layer, ways in allowed.items() if free or heads[layer] in bound}


def _shared(layer: str, others: Sequence[str], ways: Ways) -> tuple[frozenset[str], ...]:
    """The recomputation options of a layer that all of `others` have, in the order of the first."""

    def inside(other: str) -> list[frozenset[str]]:
        return [frozenset(path.removeprefix(other) for path in modules) for modules in ways[other]]

    options = [set(inside(other)) for other in others]
    common = [modules for modules in inside(others[0]) if all(modules in known for known in options)]
    return tuple(frozenset(layer + path for path in modules) for modules in common)


def _is_in(op: Op, modules: Iterable[str]) -> bool:
    return any(is_inside(op.module_path, path) for path in modules)

"""The context of a search before it picks a mesh: kinds of ops, problem structure, constraints, candidate meshes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property

from ..cluster import Cluster
from ..cost import TrainingSetup, is_matmul
from ..cost.reshard_tables import ReshardTables
from ..cost.resources import lasting_memory
from ..ir.paths import prefixes
from ..ir.recompute import faults_of, layers_of
from ..rules import Analysis
from .limits import Limits
from .meshes import MeshCandidate, candidates, name_axes
from .op_kinds import OpKinds
from .problem_structure import ProblemStructure
from .search import least_memory
from .spaces import ChoiceSpaces, FixedChoices
from .storage_options import StorageExcluded, StoragePricing
from .tables import Tables


class SearchContext:
    """A graph on a cluster under limits. `per_replica`: all axes split the batch, groups return their own samples."""

    def __init__(
        self,
        analysis: Analysis,
        cluster: Cluster,
        training: TrainingSetup,
        limits: Limits,
        *,
        size: int | None = None,
        per_replica: bool = False,
        recompute: bool = True,
        like: SearchContext | None = None,
    ) -> None:
        """`like`: another context of the graph, whose structure is reused if the limits allow it."""
        self.analysis, self.cluster, self.training, self.limits = analysis, cluster, training, limits
        self.size, self.per_replica, self.recompute = size, per_replica, recompute
        self._like = like if like is not None and self._is_like(like) else None
        self._first: dict[int, Tables] = {}  # of each structure: later meshes reuse its elimination steps

    def _is_like(self, other: SearchContext) -> bool:
        """Whether the kinds and the structure of another context can be reused: ops of a kind have the same demands."""
        mine, others = self.limits, other.limits
        if self.analysis is not other.analysis or (self.training, self.recompute) != (other.training, other.recompute):
            return False
        structural = ("together", "storing", "must", "never", "chunked")
        if any(getattr(mine, name) != getattr(others, name) for name in structural):
            return False
        demands_of_kind: dict[int, object] = {}
        return all(
            demands_of_kind.setdefault(kind, mine.demands.get(name, ())) == mine.demands.get(name, ())
            for name, kind in other.kinds.of.items()
        )

    @cached_property
    def kinds(self) -> OpKinds:
        return (
            self._like.kinds
            if self._like is not None
            else OpKinds(self.analysis, self.training, self.limits.decisions, self.limits.chunked)
        )

    @cached_property
    def plain(self) -> ProblemStructure:
        """Without activation checkpointing beyond what has to be."""
        return self._like.plain if self._like is not None else self._skeleton(free=False)

    @cached_property
    def recomputing(self) -> ProblemStructure:
        if self._like is not None:
            return self._like.recomputing
        return self._skeleton(free=True) if self.recompute else self.plain

    @property
    def may_recompute(self) -> bool:
        """Whether there is more to recompute than what has to be."""
        return any(len(ways) > 1 for ways in self.recomputing.layers.values())

    def _skeleton(self, *, free: bool) -> ProblemStructure:
        limits = self.limits
        layers = limits.ways(self.analysis.graph, self._layers, free=free) if free or limits.must else {}
        return ProblemStructure(self.kinds, layers, limits.together)

    @cached_property
    def _layers(self) -> dict[str, tuple[frozenset[str], ...]]:
        return recomputable(self.analysis)

    def candidates(self) -> Iterator[MeshCandidate]:
        base = list(candidates(self.cluster, self.size, data_only=self.per_replica))
        return name_axes(base, self.limits.axes, self.cluster, self.per_replica)

    def tables(
        self,
        skeleton: ProblemStructure,
        candidate: MeshCandidate,
        like: Tables | None = None,
        fixed: FixedChoices | None = None,
    ) -> Tables | None:
        """The numbers of one mesh; None if the constraints leave an op or a layer no option on it.

        `like`: tables of another structure on this mesh, whose prices are reused. `fixed`: the split of every op, which
        keeps to the constraints.
        """
        limits, kinds = self.limits, skeleton.kinds
        if like is not None:
            if not all(skeleton.layers.values()):
                return None
            return self._remember(
                Tables(skeleton, like.spaces, like.storing, like.replica_axes, like, self._other(skeleton))
            )
        spaces = ChoiceSpaces(
            kinds, ReshardTables(candidate.mesh, self.cluster),
            data=candidate.data, demands=limits.demands, fixed=fixed or FixedChoices(), twins=skeleton.twins.values(),
        )  # fmt: skip
        constrained = {kinds.of[name] for name in (*limits.demands, *limits.together)}
        if not all(spaces.of(kind).size for kind in constrained) or not all(skeleton.layers.values()):
            return None
        storing = StoragePricing(spaces, limits=limits.storing)
        replica_axes = candidate.data if self.per_replica else ()
        try:
            return self._remember(Tables(skeleton, spaces, storing, replica_axes, other=self._other(skeleton)))
        except StorageExcluded:
            return None

    def _other(self, skeleton: ProblemStructure) -> Tables | None:
        return self._first.get(id(skeleton))

    def _remember(self, tables: Tables) -> Tables:
        self._first.setdefault(id(tables.skeleton), tables)
        return tables

    def least_memory(self, enough: float = -math.inf) -> float:
        """Bytes that a device needs at least, whatever the mesh; no search for less than `enough`."""
        least = math.inf
        for candidate in self.candidates():
            least = min(least, self._least(self.plain, candidate))
            if enough < least < math.inf and self.may_recompute:  # which allows nothing that was forbidden
                least = min(least, self._least(self.recomputing, candidate))
            if least <= enough and least < math.inf:
                break
        return least

    def _least(self, skeleton: ProblemStructure, candidate: MeshCandidate) -> float:
        tables = self.tables(skeleton, candidate)
        return least_memory(tables.problem(weights=lasting_memory())) if tables is not None else math.inf


def recomputable(analysis: Analysis) -> dict[str, tuple[frozenset[str], ...]]:
    """The repeated layers of a model, and the options to recompute each.

    Not at all; its modules without matmuls, which are cheap to recompute; one of those with; all its modules, each by
    itself; and the layer as a whole, of which only the inputs are saved for backward.
    """
    graph = analysis.graph
    layers = {layer: dict[str, bool]() for layer in layers_of(graph) if not faults_of(graph, layer)}
    for op in graph.ops:
        layer = next((path for path in prefixes(op.module_path) if path in layers), None)
        if layer is not None:
            part = op.module_path[len(layer) + 1 :].split(".")[0]
            if part:
                path, product = f"{layer}.{part}", is_matmul(analysis.signatures[op.name])
                layers[layer][path] = layers[layer].get(path, False) or product
    options = {}
    for layer, parts in layers.items():
        cheap = frozenset(path for path, product in parts.items() if not product)
        expensive = [path for path, product in parts.items() if product][:3]
        ways = [
            frozenset[str](),
            cheap,
            *(frozenset([path]) for path in expensive),
            frozenset(parts),
            frozenset([layer]),
        ]
        options[layer] = tuple(dict.fromkeys(ways))
    return options

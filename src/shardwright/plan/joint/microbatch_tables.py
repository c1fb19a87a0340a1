"""The tables of a pipeline rank at one number of microbatches: the batch is split over devices and over time.

Both are one axis here: with 4 groups of devices and 8 microbatches an axis of 32 splits the batch, of which 4 run at a
time. So ops and reshards cost what they cost for one microbatch. What else differs from a flat mesh:

    reshards      across time there are none: whatever would need one is priced prohibitively. Values without a
                  gradient are assumed to depend on inputs alone, and are computed replicated where that is needed
    parameters    are reduced and sharded over the devices only, once a step and not overlapped; each microbatch
                  accumulates into a second gradient buffer next to .grad; casts to the compute dtype are kept once
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from ...cluster import Cluster
from ...cost import TrainingSetup
from ...cost.reshard_tables import ReshardTables
from ...cost.resources import Resource
from ...errors import PlanError
from ...ir import Graph, Parameter
from ...ir.graph import ITEM_SIZE
from ...layout import Axis, Layout, Mesh
from ...rules import Analysis, Signature
from ...storage import Storage
from ..builder import PlanBuilder
from ..constraint_kinds import ChoiceDemand
from ..context import SearchContext
from ..limits import Limits, StorageLimit
from ..policies import dp
from ..problem_structure import ProblemStructure
from ..spaces import ChoiceSpaces
from ..storage_options import ParameterCollective, StorageExcluded, StorageOptions, StoragePricing
from ..tables import Tables, storage_options_of
from .bounds import ParameterBounds
from .ranks import RankDevices, RankKinds


def split_by(pp_rank: RankDevices, microbatches: int) -> Mesh:
    """The mesh over which the ops of a pipeline rank are sharded: its devices, and time for the batch."""
    sizes = (pp_rank.data * microbatches, pp_rank.inner)
    return Mesh(axes=tuple(Axis(name=n, size=s) for n, s in zip(pp_rank.names, sizes, strict=True) if s > 1))


Known = dict[tuple[object, ...], dict[tuple[object, ...], np.ndarray]]


class MicrobatchReshards(ReshardTables):
    """Prices of reshards of one microbatch."""

    def __init__(self, pp_rank: RankDevices, cluster: Cluster, microbatches: int, known: Known) -> None:
        """`known`: prices of reshards along the inner axis, of all pipeline ranks."""
        mesh = split_by(pp_rank, microbatches)
        sizes = {pp_rank.names[0]: pp_rank.data, pp_rank.names[1]: pp_rank.inner}
        real = Mesh(axes=tuple(Axis(name=name, size=sizes[name]) for name in mesh.names), devices=pp_rank.devices)
        super().__init__(mesh, cluster, real)
        inner = self.spans(pp_rank.names[1:]) if pp_rank.names[1] in mesh.names else None
        self._shared = known.setdefault((mesh.axes, self.device, inner), {})
        self._outer = mesh.names.index(pp_rank.names[0]) if pp_rank.names[0] in mesh.names else None

    def prices(self, starts: Sequence[Layout], goals: Sequence[Layout], bytes: float, gradient: bool) -> np.ndarray:
        """If nothing changes on the outer axis, the prices depend on the inner axis alone and are shared."""
        places = [self._places_of(layout, gradient) for layout in (*starts, *goals)]
        if self._outer is not None and len({place[self._outer] for place in places}) > 1:
            return super().prices(starts, goals, bytes, gradient)
        key = (starts, goals, bytes, gradient)
        if key not in self._shared:
            self._shared[key] = super().prices(starts, goals, bytes, gradient)
        return self._shared[key].copy()


class PipelineStoragePricing(StoragePricing):
    """Storage of parameters in a pipeline."""

    def __init__(
        self,
        spaces: ChoiceSpaces,
        microbatches: int,
        limits: Mapping[str, StorageLimit],
        known: dict[tuple[object, ...], StorageOptions],
        fixed: Mapping[str, Storage] | None = None,
    ) -> None:
        """`known`: options on ranks of this kind; any number of microbatches above 1 has the same."""
        super().__init__(spaces, fixed, limits)
        self.microbatches, self._known = microbatches, known
        self.mesh = spaces.moves.placed  # nothing of a parameter is split over time

    def storage_options(
        self, parameter: Parameter, requested: Sequence[tuple[Layout, ...]], unit: float
    ) -> StorageOptions:
        key = (parameter.key, tuple(tuple(dict.fromkeys(layouts)) for layouts in requested), unit)
        if key not in self._known:
            self._known[key] = super().storage_options(parameter, requested, unit)
        return self._known[key]

    def _storages(self, parameter: Parameter, layout: Layout) -> Iterator[Storage]:
        sizes = self.mesh.sizes
        yield from (
            storage for storage in super()._storages(parameter, layout) if all(sizes[axis] > 1 for axis in storage.axes)
        )

    def sends(
        self, parameter: Parameter, layout: Layout, storage: Storage, unit: float
    ) -> Iterator[ParameterCollective]:
        sizes = self.mesh.sizes
        for sent in super().sends(parameter, layout, storage, unit):
            if all(sizes[axis] == 1 for axis in sent.axes):
                continue
            yield sent if storage.shards_parameter else sent._replace(resource=Resource.UPDATE)

    def _used(self, parameter: Parameter, layout: Layout, storage: Storage, unit: float) -> np.ndarray:
        used = super()._used(parameter, layout, storage, unit)
        used[Resource.STORED] += used[Resource.KEPT]
        used[Resource.KEPT] = 0.0
        if self.spaces.backward and parameter.trainable:
            value = self.graph.values[parameter.value]
            count = self.count(value.shape, layout)
            aside = self.stored(count, storage).parameter * ITEM_SIZE.get(value.dtype, 4)
            used[Resource.STORED] += aside
            if self.microbatches > 1:
                adding = self.moves.device.op_time(0.0, 3.0 * aside, "pointwise", "")
                used[Resource.COMPUTE_BACKWARD] += adding
        return used


def over_time(analysis: Analysis, name: str) -> dict[str, str]:
    """The choice of each op on an axis that splits the batch over devices or time: a role, or one that passes sums on.

    Empty if there is no batch dim: a single sample can only go through the stages.
    """
    axis = Axis(name=name, size=2)
    builder = PlanBuilder(analysis.graph, Mesh(axes=(axis,)), analysis, lenient=True)
    dp(builder, axis)
    choices = builder.finish("").choices(analysis.graph.entry)
    return {op.name: choices.get(op.name, {}).get(name, "") for op in analysis.live}


def fault_of_time(analysis: Analysis) -> str | None:
    """Why a batch can't be run in microbatches; None if it can, as far as ops say by themselves."""
    if analysis.graph.batch is None or not analysis.batch:
        return "its inputs have no common batch dim"
    for op in analysis.live:
        signature = analysis.signatures[op.name]
        if "batch_norm" in op.target and op.argument("training", True) and _reads_batch(signature, analysis.graph):
            return f"{op} is over the whole batch"
    return None


def _reads_batch(signature: Signature, graph: Graph) -> bool:
    return any(role.atom in signature.analysis.batch for role in signature.roles)


class MicrobatchTables:
    """The tables of all pipeline ranks, built from one search context, in which ops split the batch alike."""

    def __init__(
        self, analysis: Analysis, cluster: Cluster, training: TrainingSetup, limits: Limits, names: tuple[str, str],
        *, recompute: bool = True, local: bool = False, like: SearchContext | None = None,
    ) -> None:  # fmt: skip
        """`local`: the graph is that of one microbatch. `like`: the context of a flat search."""
        self.local = local
        self.analysis, self.cluster, self.training, self.names = analysis, cluster, training, names
        self.picks = over_time(analysis, names[0])
        demands = dict(limits.demands)
        for op, pick in self.picks.items():
            demands[op] = (*demands.get(op, ()), ChoiceDemand((pick,), names[0]))
        self.limits = replace(limits, demands=demands)
        self.context = SearchContext(analysis, cluster, training, self.limits, recompute=recompute, like=like)
        self._untimed = {
            op: tuple(demand for demand in demanded if demand.axis != names[0])
            for op, demanded in self.limits.demands.items()
        }
        self._axes = {demand.axis for demanded in self.limits.demands.values() for demand in demanded}
        self._known: dict[tuple[object, ...], Tables | None] = {}
        self._parameters: dict[tuple[object, ...], ParameterBounds] = {}
        self.kinds = RankKinds(cluster)
        self._prices: Known = {}
        self._storage_options: dict[tuple[object, ...], dict[tuple[object, ...], StorageOptions]] = {}
        self._like: dict[tuple[object, ...], ChoiceSpaces] = {}

    def parameters(self, pp_rank: RankDevices, microbatches: int) -> ParameterBounds:
        """Bounds of all parameters on a pipeline rank; any number of microbatches above 1 has the same."""
        key = (self.kinds.of(pp_rank), microbatches > 1)
        if key not in self._parameters:
            skeleton, storage_options = self.context.plain, list[StorageOptions]()
            spaces = self._spaces(skeleton, pp_rank, microbatches)
            if spaces is not None:
                with suppress(StorageExcluded):  # then no table can be made either
                    storage_options = storage_options_of(skeleton, spaces, self._storing(pp_rank, spaces, microbatches))
            self._parameters[key] = ParameterBounds(skeleton, storage_options, self.cluster.overlap)
        return self._parameters[key]

    def tables(self, pp_rank: RankDevices, microbatches: int, *, recomputing: bool = False) -> Tables | None:
        """The tables of a rank; `recomputing`: with activation checkpointing. None if an op has no choice."""
        key = (self.kinds.of(pp_rank), microbatches, recomputing)
        if key not in self._known:
            self._known[key] = self._make(pp_rank, microbatches, recomputing)
        return self._known[key]

    def _make(self, pp_rank: RankDevices, microbatches: int, recomputing: bool) -> Tables | None:
        skeleton = self.context.recomputing if recomputing else self.context.plain
        if recomputing:
            like = self.tables(pp_rank, microbatches)
            return Tables(skeleton, like.spaces, like.storing, like.replica_axes, like) if like is not None else None
        return self._plain(skeleton, pp_rank, microbatches)

    def _plain(self, skeleton: ProblemStructure, pp_rank: RankDevices, microbatches: int) -> Tables | None:
        spaces = self._spaces(skeleton, pp_rank, microbatches)
        try:
            if spaces is None or not all(spaces.of(kind).size for kind in range(len(skeleton.kinds.first))):
                return None
        except PlanError:
            return None
        outer_axes = tuple(
            name for name in self.names[:1] if name in spaces.mesh.names
        )  # outputs are joined by the loop
        try:
            return Tables(skeleton, spaces, self._storing(pp_rank, spaces, microbatches), outer_axes)
        except StorageExcluded:
            return None

    def _storing(self, pp_rank: RankDevices, spaces: ChoiceSpaces, microbatches: int) -> PipelineStoragePricing:
        known = self._storage_options.setdefault((self.kinds.of(pp_rank), microbatches > 1), {})
        return PipelineStoragePricing(spaces, microbatches, self.limits.storing, known)

    def _spaces(self, skeleton: ProblemStructure, pp_rank: RankDevices, microbatches: int) -> ChoiceSpaces | None:
        moves = MicrobatchReshards(pp_rank, self.cluster, 1 if self.local else microbatches, self._prices)
        demands = self.limits.demands if self.names[0] in moves.mesh.names else self._untimed
        if not self._axes <= {None, self.names[0], *moves.mesh.names}:
            return None  # something is required of an axis that the pipeline rank does not have
        key = (moves.mesh.axes, moves.device)
        spaces = ChoiceSpaces(
            skeleton.kinds, moves, data=(self.names[0],), demands=demands, twins=skeleton.twins.values(),
            like=self._like.get(key),
        )  # fmt: skip
        self._like.setdefault(key, spaces)
        return spaces

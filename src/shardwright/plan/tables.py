"""The numbers of the search: what the states of a problem's variables use together, on one mesh."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from ..cost import join_time, local_elements
from ..cost.resources import COUNT, Resource, Row, memory, phases
from ..layout import INVARIANT, REPLICATE, Layout
from ..lower import LoweredProgram, PlacementTask, Placer, transform
from ..lower.chunked_loss import joined_losses
from ..memory import MemoryPeak, simulate_memory
from ..reshard import forget_gradient
from ..rules.replica_axes import batch_layout
from ..storage import Storage
from .chunking import resolved_chunks
from .problem_structure import EdgeEnd, EdgeTable, OpTable, ProblemStructure, StorageTable, Table, UseTable
from .search import CostFactor, Problem
from .spaces import ChoiceSpaces
from .storage_options import StorageOptions, StoragePricing

Layouts = tuple[Layout, ...]


class Tables:
    """A problem structure with numbers. `replica_axes`: groups along these return their own samples."""

    def __init__(
        self,
        skeleton: ProblemStructure,
        spaces: ChoiceSpaces,
        storing: StoragePricing,
        replica_axes: tuple[str, ...] = (),
        like: Tables | None = None,
        other: Tables | None = None,
    ) -> None:
        """`like`: tables of another skeleton with the same spaces, whose prices can be used again.

        `other`: tables of the same skeleton with other spaces, whose problem is solved in the same steps.
        """
        self.skeleton, self.spaces, self.storing, self.replica_axes = skeleton, spaces, storing, replica_axes
        self.analysis, self.graph = skeleton.analysis, skeleton.graph
        self.moves, self.training, self.mesh = spaces.moves, spaces.training, spaces.mesh
        self._unique: dict[int, tuple[Layouts, np.ndarray]] = like._unique if like else {}
        self._prices: dict[tuple[object, ...], np.ndarray] = like._prices if like else {}
        self._leaving: dict[int, Layouts] = like._leaving if like else {}
        self._forms: dict[int, np.ndarray] = like._forms if like else {}
        self._numbers: dict[Layout, int] = like._numbers if like else {}
        self._elements: dict[tuple[int, tuple[int, ...]], np.ndarray] = like._elements if like else {}
        self._same: dict[Layouts, Layouts] = like._same if like else {}  # each once
        self._smaller: dict[float, Problem] = {}  # by the bytes that an op may take
        self._readers = [len(ends) - 1 for ends in skeleton.hub_kinds]
        self.hubs = [self._hub(ends) for ends in skeleton.hub_kinds]
        self.storage_options = storage_options_of(skeleton, spaces, storing)
        self.arrays = [self._fill(table) for table in skeleton.tables]
        self._other = other if other is not None and self.is_plain and other.is_plain else None

    @cached_property
    def factors(self) -> tuple[CostFactor, ...]:
        return tuple(CostFactor(entry.variables, self.arrays[entry.table]) for entry in self.skeleton.entries)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """How many states each variable has."""
        counts = {("op", kind): self.spaces.of(kind).size for kind in range(len(self.skeleton.kinds.first))}
        counts |= {("hub", kind): len(layouts) for kind, layouts in enumerate(self.hubs)}
        counts |= {
            ("home", kind): len(storage_options.layouts) for kind, storage_options in enumerate(self.storage_options)
        }
        counts |= {shape: shape[1] for shape in self.skeleton.shapes if shape[0] == "layer"}
        return tuple(map(counts.__getitem__, self.skeleton.shapes))

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        return tuple(variable.block for variable in self.skeleton.variables)

    def layouts(self, end: EdgeEnd, value: str = "") -> Layouts:
        """How a value lies at an end, in each of its states."""
        if end.what == "leaving":
            layout = batch_layout(self.analysis, self.mesh, self.replica_axes, value)
            return self._leaving.setdefault(hash(layout), (layout,))
        if end.what == "hub":
            return self.hubs[end.kind]
        space = self.spaces.of(end.kind)
        return space.outputs[end.at] if end.what == "out" else space.inputs[end.at]

    def _hub(self, ends: Sequence[EdgeEnd]) -> Layouts:
        layouts = tuple(dict.fromkeys(layout for end in ends for layout in self._distinct(self.layouts(end))[0]))
        return self._same.setdefault(layouts, layouts)

    def _fill(self, table: Table) -> np.ndarray:
        if isinstance(table, OpTable):
            used = self.spaces.of(table.kind).used
            if not table.region:
                return self.recomputed(used) if table.again else used
            again = self.recomputed(used)
            both = np.stack([again if table.again else used, again], axis=1)
            used_by_option: np.ndarray = both[:, [int(at >= 0) for at in table.region]]
            return used_by_option
        if isinstance(table, EdgeTable):
            return self._edge(table)
        if isinstance(table, StorageTable):
            return self.storage_options[table.parameter].used
        return self._use(table)

    def recomputed(self, used: np.ndarray) -> np.ndarray:
        """The same in a recomputed region: forward runs twice, and what is saved exists for one layer at a time."""
        repeated = used.copy()
        repeated[..., Resource.COMPUTE_BACKWARD] += repeated[..., Resource.COMPUTE_FORWARD]
        repeated[..., Resource.SEND_BACKWARD] += repeated[..., Resource.SEND_FORWARD]
        repeated[..., Resource.PASSING] += repeated[..., Resource.KEPT] * self.skeleton.kinds.layer_share
        repeated[..., Resource.KEPT] = 0.0
        return repeated

    # -- reshards --------------------------------------------------------------------------

    def _edge(self, table: EdgeTable) -> np.ndarray:
        """[state, state, (recomputation option,) resource]"""
        used = self._price(table, table.saved)
        if table.again:
            used = self.recomputed(used)
        if table.ways:
            again = used if table.again else self.recomputed(used)
            enters = used if table.saved else self._price(table, True)
            every = np.stack([used, enters, again], axis=2)
            used = every[:, :, [("plain", "enters", "again").index(option) for option in table.ways]]
        if table.same:
            used = used[np.arange(len(used)), np.arange(len(used))]
        return used[:, 0] if table.goal.what == "leaving" else used

    def _price(self, table: EdgeTable, saved: bool) -> np.ndarray:
        value = self.graph.values[table.value]
        starts, from_state = self._distinct(self.layouts(table.start))
        goals, to_state = self._distinct(self.layouts(table.goal, table.value))
        item = self.training.item(value)
        bytes = value.elements * item
        readers = self._readers[table.goal.kind] if table.goal.what == "hub" else 1
        key = (id(starts), id(goals), bytes, value.shape, value.gradient, saved, table.shared, readers)
        if key not in self._prices:
            prices = self.moves.prices(starts, goals, bytes, value.gradient and self.spaces.backward)
            local = item * self._local(value.shape, goals)
            if readers > 1 and value.gradient and self.spaces.backward:
                joined = [join_time(size, readers, self.moves.device) for size in local.tolist()]
                prices[..., Resource.COMPUTE_BACKWARD] += joined
            if saved and self.spaces.backward:
                a, b = self._formed(starts), self._formed(goals)
                new = (a[:, None] != b[None, :]) | (not table.shared)
                prices[..., Resource.KEPT] += np.where(new, local[None, :], 0.0)
            self._prices[key] = prices
        spread: np.ndarray = self._prices[key][from_state[:, None], to_state[None, :]]
        return spread

    def _formed(self, layouts: Layouts) -> np.ndarray:
        """Numbers of layouts without what they say of gradients: two that are equal then are one tensor."""
        if id(layouts) not in self._forms:
            self._forms[id(layouts)] = self._numbered([forget_gradient(layout) for layout in layouts])
        return self._forms[id(layouts)]

    def _numbered(self, layouts: Sequence[Layout]) -> np.ndarray:
        """A number for each layout, the same for those that are equal."""
        numbers = self._numbers
        return np.array([numbers.setdefault(layout, len(numbers)) for layout in layouts], dtype=np.intp)

    def _local(self, shape: tuple[int, ...], layouts: Layouts) -> np.ndarray:
        """How many elements of a value a device has in each layout."""
        key = (id(layouts), shape)
        if key not in self._elements:
            self._elements[key] = np.array([local_elements(shape, layout, self.mesh) for layout in layouts])
        return self._elements[key]

    def _distinct(self, layouts: Layouts) -> tuple[Layouts, np.ndarray]:
        distinct_layouts = self._unique.get(id(layouts))
        if distinct_layouts is None:
            known: dict[Layout, int] = {}
            index = np.array([known.setdefault(layout, len(known)) for layout in layouts], dtype=np.intp)
            distinct = tuple(known)
            distinct_layouts = self._unique[id(layouts)] = (self._same.setdefault(distinct, distinct), index)
        return distinct_layouts

    def _use(self, table: UseTable) -> np.ndarray:
        """[storage, state of the op, resource]: a parameter that is sharded otherwise than a use needs a reshard."""
        value, storage_options = self.graph.values[table.value], self.storage_options[table.parameter]
        layouts = self.spaces.of(table.kind).inputs[table.index]
        starts, from_state = self._distinct(storage_options.layouts)
        goals, to_state = self._distinct(layouts)
        if storage_options.alone:
            prices = np.zeros((len(starts), len(goals), COUNT))
            same = self._numbered(starts)[:, None] == self._numbered(goals)[None, :]
            prices[..., 0] = np.where(same, 0.0, np.inf)
        else:
            bytes = value.elements * self.training.item(value)
            prices = self.moves.prices(starts, goals, bytes, value.gradient and self.spaces.backward)
            prices[..., 0] += np.where(self._unsummed(starts, goals), np.inf, 0.0)
        spread: np.ndarray = prices[from_state[:, None], to_state[None, :]]
        return spread

    def _unsummed(self, storage_options: Layouts, uses: Layouts) -> np.ndarray:
        """[storage, use]: whether a use returns a pending sum as gradient, which the storage does not reduce."""
        axes = self.mesh.names
        invariant = np.array(
            [[layout.placement(axis) == INVARIANT for axis in axes] for layout in storage_options], dtype=bool
        )
        replicate = np.array([[use.placement(axis) == REPLICATE for axis in axes] for use in uses], dtype=bool)
        unsummed: np.ndarray = (invariant[:, None, :] & replicate[None, :, :]).any(axis=-1)
        return unsummed

    # -- as a problem ----------------------------------------------------------------------

    def problem(self, limit: float = math.inf, *, weights: Row | None = None, largest: float = math.inf) -> Problem:
        """What is to be solved. `limit`: the memory limit of a device in bytes.

        weights    what counts as memory, if not all bytes of the sums
        largest    bytes that an op may take by itself
        """
        problem = self._unlimited if largest == math.inf else self._with_smaller_ops(largest)
        return problem.within(limit, weights)

    def largest_op(self, states: Sequence[int]) -> float:
        """The most bytes that an op takes by itself."""
        skeleton = self.skeleton
        kinds = {(skeleton.kinds.of[name], states[at]) for name, at in skeleton.ops.items()}
        return max((float(self.spaces.sizes_of(kind)[state]) for kind, state in kinds), default=0.0)

    def _with_smaller_ops(self, largest: float) -> Problem:
        if largest not in self._smaller:
            arrays = list(self.arrays)
            for at, table in enumerate(self.skeleton.tables):
                if isinstance(table, OpTable):
                    arrays[at] = arrays[at].copy()
                    arrays[at][self.spaces.sizes_of(table.kind) > largest, ..., 0] = np.inf
            factors = tuple(CostFactor(entry.variables, arrays[entry.table]) for entry in self.skeleton.entries)
            self._smaller[largest] = self._problem(factors, self._unlimited)
        return self._smaller[largest]

    @cached_property
    def _unlimited(self) -> Problem:
        return self._problem(self.factors, self._other._unlimited if self._other is not None else None)

    def _problem(self, factors: tuple[CostFactor, ...], like: Problem | None) -> Problem:
        return Problem(
            sizes=self.sizes,
            factors=merged(factors) if self.skeleton.together else factors,
            blocks=self.blocks,
            phases=phases(self.moves.cluster.overlap, self.training.accumulate),
            memory=memory(),
            like=like if self.is_plain else None,
        )

    @property
    def is_plain(self) -> bool:
        """Whether every table is an array of its own, and none stands for several."""
        return not self.skeleton.together and len({id(array) for array in self.arrays}) == len(self.arrays)

    def peak(
        self, choices: Mapping[str, Mapping[str, str]], storage: Mapping[str, Storage], recompute: Sequence[str]
    ) -> MemoryPeak:
        """Peak memory of a device, by memory simulation."""
        return simulate_memory(self.program(choices, storage, recompute), self.training, self.moves.traits)

    def joined_losses(self, states: Sequence[int]) -> dict[str, int]:
        """The losses that are to be chunked, as far as their logits are split in a way that allows it."""
        return joined_losses(self.program(self.choices(states), self.storage(states), self.recompute(states)))

    def program(
        self, choices: Mapping[str, Mapping[str, str]], storage: Mapping[str, Storage], recompute: Sequence[str]
    ) -> LoweredProgram:
        """The program of these decisions, as memory is simulated on it."""
        task = PlacementTask(
            graph=self.analysis.graph,
            analysis=self.analysis,
            mesh=self.mesh,
            choices=choices,
            storage=storage,
            recompute=tuple(recompute),
            chunked=resolved_chunks(self.analysis, self.skeleton.kinds.chunked, choices, self.mesh),
            prices=self.moves,
        )
        return transform(Placer(task))

    # -- the way back ----------------------------------------------------------------------

    def choices(self, states: Sequence[int]) -> dict[str, Mapping[str, str]]:
        kinds = self.skeleton.kinds.of
        return {name: self.spaces.of(kinds[name]).choices[states[at]] for name, at in self.skeleton.ops.items()}

    @property
    def homes(self) -> Mapping[str, int]:
        """The parameters that an op reads, with their variables."""
        return self.skeleton.storage_options

    def home(self, key: str, states: Sequence[int]) -> tuple[Layout, Storage]:
        at = self.skeleton.storage_options[key]
        storage_options = self.storage_options[self.skeleton.variables[at].kind]
        return storage_options.layouts[states[at]], storage_options.storage[states[at]]

    def storage(self, states: Sequence[int]) -> dict[str, Storage]:
        return {key: self.home(key, states)[1] for key in self.skeleton.storage_options}

    def recompute(self, states: Sequence[int]) -> tuple[str, ...]:
        layers, recomputed = self.skeleton.layers, self.skeleton.recomputed
        return tuple(path for layer, at in recomputed.items() for path in sorted(layers[layer][states[at]]))


def storage_options_of(
    skeleton: ProblemStructure, spaces: ChoiceSpaces, storing: StoragePricing
) -> list[StorageOptions]:
    """The storage options of each kind of parameter."""
    options = []
    for parameter in skeleton.first_parameters:
        users = [(user, at) for user, at in skeleton.graph.users[parameter.value] if user.name in skeleton.ops]
        uses = [spaces.of(skeleton.kinds.of[user.name]).inputs[at] for user, at in users]
        options.append(storing.storage_options(parameter, uses, skeleton.units[parameter.key]))
    return options


def merged(factors: Sequence[CostFactor]) -> tuple[CostFactor, ...]:
    """Factors of one table over the same variables as one, with so many times the numbers."""
    counts = Counter((factor.variables, id(factor.table)) for factor in factors)
    tables = {id(factor.table): factor.table for factor in factors}
    scaled = {(at, count): tables[at] * count if count > 1 else tables[at] for (_, at), count in counts.items()}
    return tuple(CostFactor(variables, scaled[at, count]) for (variables, at), count in counts.items())

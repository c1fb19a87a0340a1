"""A graph on a mesh as an abstract problem: variables with states, and tables of what they use together.

    variable   its states                                        stands for
    op         its choices on all axes                           every op that is no constant
    hub        the layouts of a value                            a value that is read more than once
    home       layouts and storage                               a parameter
    layer      which of its modules are recomputed               a repeated layer, where recomputing is looked at

A value that is read once is a table over its producer and its reader: the price of the conversion between them. With
several readers the producer delivers to a hub, and every reader takes from there; so a sum that all need is done once.
What backward needs is charged once for each storage, where it is made: views share that of their input.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from ..conversion import forget_gradient
from ..cost import local_elements
from ..cost.resources import COUNT, Resource
from ..cost.strides import VIEWS, kind_of
from ..ir import Op
from ..layout import Layout
from .homes import Homes, Storage, Storing, block_of
from .rows import rows_layout
from .search import Factor
from .spaces import Space, Spaces

Region = tuple[int, ...]
"""For each way to recompute a layer the region in which a node runs; -1 is none."""


@dataclass(frozen=True)
class Node:
    """Something that has a layout for a value: an op or a hub, with its variable."""

    variable: int
    kind: Hashable
    layouts: tuple[Layout, ...]  # of the value, in each state
    layer: int = -1  # the variable of its layer
    region: Region = ()
    reader: str = ""  # the op, if it is one


class Label(NamedTuple):
    """What a factor prices: an op, a parameter, or a value on its way (to an op, a hub, or out)."""

    what: Literal["op", "parameter", "value"]
    name: str
    source: tuple[Layout, ...] = ()
    goal: tuple[Layout, ...] = ()
    reader: str = ""


@dataclass
class Tables:
    """The variables and factors of one graph on one mesh."""

    spaces: Spaces
    storing: Storing
    layers: Mapping[str, Sequence[frozenset[str]]] = field(default_factory=dict)  # ways to recompute each layer
    rows: tuple[str, ...] = ()  # axes of which every group has its rows of what leaves the model
    sizes: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    factors: list[Factor] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)  # what each factor is the price of
    ops: dict[str, int] = field(default_factory=dict)
    hubs: dict[str, int] = field(default_factory=dict)
    homes: dict[str, int] = field(default_factory=dict)
    recomputed: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.facts, self.graph = self.spaces.facts, self.spaces.facts.graph
        self.moves, self.training, self.mesh = self.spaces.moves, self.spaces.training, self.spaces.mesh
        self._known: dict[Hashable, np.ndarray] = {}
        self._prices: dict[Hashable, np.ndarray] = {}
        self._unique: dict[int, tuple[tuple[Layout, ...], np.ndarray]] = {}
        self._hub_layouts: dict[Hashable, tuple[Layout, ...]] = {}
        self._homes: dict[str, Homes] = {}
        self._numbers: dict[Hashable, int] = {}
        self._live = [op for op in self.graph.ops if not all(name in self.facts.constants for name in op.outputs)]
        self._wanted = self._find_wanted()
        self._build()

    # -- variables -------------------------------------------------------------------------

    def _variable(self, size: int, block: int) -> int:
        self.sizes.append(size)
        self.blocks.append(block)
        return len(self.sizes) - 1

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _build(self) -> None:
        blocks: dict[str, int] = {}
        number, last = 0, ""
        for op in self._live:
            block = block_of(op.module_path)
            if block != last:
                number, last = number + 1, block
            blocks[op.name] = number
            path = next((held for held in _paths(op.module_path) if held in self.layers), None)
            if path is not None and path not in self.recomputed:
                self.recomputed[path] = self._variable(len(self.layers[path]), number)
            self.ops[op.name] = self._variable(self.spaces.of(op).size, number)
        for op in self._live:
            self._add_op(op)
            for at in range(len(op.outputs)):
                self._add_value(op, at, blocks)
        for parameter in self.graph.parameters:
            self._add_parameter(parameter.value, blocks)

    def _layer(self, op: Op) -> tuple[int, Region]:
        """The variable of the layer that an op is in, and its regions."""
        for path in _paths(op.module_path):
            if path in self.layers:
                ways = self.layers[path]
                every = sorted({held for way in ways for held in way})
                region = tuple(
                    next((every.index(held) for held in _paths(op.module_path) if held in way), -1) for way in ways
                )
                return self.recomputed[path], region
        return -1, ()

    def _node(self, op: Op, layouts: tuple[Layout, ...], key: Hashable) -> Node:
        layer, region = self._layer(op)
        return Node(self.ops[op.name], (self.spaces.kind(op), key, region), layouts, layer, region, op.name)

    # -- tables ----------------------------------------------------------------------------

    def _add(self, variables: tuple[int, ...], key: Hashable, label: Label, make: Callable[[], np.ndarray]) -> None:
        if key not in self._known:
            self._known[key] = make()
        self.factors.append(Factor(variables, self._known[key]))
        self.labels.append(label)

    def _add_op(self, op: Op) -> None:
        space, (layer, region) = self.spaces.of(op), self._layer(op)
        variable, kind, label = self.ops[op.name], self.spaces.kind(op), Label("op", op.name)
        if layer < 0 and op.region is None:
            self._add((variable,), ("op", kind), label, lambda: space.used)
        elif layer < 0:
            self._add((variable,), ("again", kind), label, lambda: _again(space.used))
        else:
            self._add(
                (variable, layer),
                ("op", kind, region),
                label,
                lambda: np.stack([_again(space.used) if at >= 0 else space.used for at in region], axis=1),
            )

    def _add_value(self, op: Op, at: int, blocks: Mapping[str, int]) -> None:
        name = op.outputs[at]
        value = self.graph.values[name]
        users = [(user, index) for user, index in self.graph.users[name] if user.name in self.ops]
        leaves = name in self._sinks
        if not users and not leaves:
            return
        made = self._node(op, self.spaces.of(op).outputs[at], ("out", at))
        held = bool(self.spaces.of(op).keeps_outputs[at] or shares(op))  # its storage is charged elsewhere
        apart = bool(self.layers) and any(block_of(user.module_path) != block_of(op.module_path) for user, _ in users)
        if len(users) == 1 and not leaves and not apart:
            ((user, index),) = users
            reader = self._node(user, self.spaces.of(user).inputs[index], ("in", index))
            self._edge(name, made, reader, kept=self._keeps(user, index), held=held)
            return
        if not users:
            goal = Node(-1, ("leaving", self._leaving(name)), (self._leaving(name),))
            self._edge(name, made, goal, kept=False, held=held)
            return
        hub = self._add_hub(op, made, users, blocks[op.name], value.gradient)
        self.hubs[name] = hub.variable
        self._edge(name, made, hub, kept=self._wanted[name], held=held)
        for user, index in users:
            reader = self._node(user, self.spaces.of(user).inputs[index], ("in", index))
            self._edge(name, hub, reader, kept=self._keeps(user, index), held=True)
        if leaves:
            goal = Node(-1, ("leaving", self._leaving(name)), (self._leaving(name),))
            self._edge(name, hub, goal, kept=False, held=True)

    def _add_hub(self, op: Op, made: Node, users: list[tuple[Op, int]], block: int, gradient: bool) -> Node:
        kind = (made.kind, tuple((self.spaces.kind(user), index) for user, index in users))
        if kind not in self._hub_layouts:
            every = dict.fromkeys(made.layouts)
            for user, index in users:
                every.update(dict.fromkeys(self.spaces.of(user).inputs[index]))
            self._hub_layouts[kind] = tuple(every)
        layouts = self._hub_layouts[kind]
        layer, region = self._layer(op)
        if layer >= 0:
            regions = [self._layer(user) for user, _ in users]
            same = all(held == layer for held, _ in regions)
            region = tuple(
                at if same and all(other[way] == at for _, other in regions) else -1 for way, at in enumerate(region)
            )
        return Node(self._variable(len(layouts), block), ("hub", kind, region), layouts, layer, region)

    def _edge(self, name: str, a: Node, b: Node, *, kept: bool, held: bool) -> None:
        """A conversion. `kept`: the reader needs it in backward; `held`: what is handed over as it is costs nothing."""
        value = self.graph.values[name]
        size = (value.shape, value.dtype, value.gradient)
        key = (self._number(a.kind), self._number(b.kind), size, kept, held)
        label = Label("value", name, a.layouts, b.layouts, b.reader)
        regions = a.region or b.region
        layer = b.layer if b.layer >= 0 and any(at >= 0 for at in b.region) else a.layer
        if layer < 0 or not any(at >= 0 for at in (*a.region, *b.region)):
            ends = (a.variable,) if b.variable < 0 else (a.variable, b.variable)

            def plain() -> np.ndarray:
                found = self._price(name, a, b, kept, held)
                return found[:, 0] if b.variable < 0 else found

            self._add(ends, key, label, plain)
            return
        inside = a.layer == b.layer

        def make() -> np.ndarray:
            plain = self._price(name, a, b, kept, held)
            entering = self._price(name, a, b, True, held)
            without = plain.copy()
            without[..., Resource.KEPT] = 0.0
            ways = []
            for way in range(len(regions)):
                start = a.region[way] if a.region and a.layer == layer else -1
                goal = b.region[way] if b.region and b.layer == layer else -1
                if inside and start == goal >= 0:
                    ways.append(_again(without))
                else:
                    ways.append(entering if goal >= 0 else plain)
            found = np.stack(ways, axis=2)
            return found[:, 0] if b.variable < 0 else found

        variables = (a.variable, layer) if b.variable < 0 else (a.variable, b.variable, layer)
        self._add(variables, (key, inside, layer == b.layer), label, make)

    def _price(self, name: str, a: Node, b: Node, kept: bool, held: bool) -> np.ndarray:
        """[state, state, resource] of a conversion."""
        value = self.graph.values[name]
        starts, from_state = self._distinct(a.layouts)
        goals, to_state = self._distinct(b.layouts)
        bytes = value.elements * self.training.item(value)
        found: np.ndarray
        key = (id(starts), id(goals), bytes, value.gradient, kept, held)
        if key not in self._prices:
            back = value.gradient and self.spaces.backward
            found = self.moves.prices(starts, goals, bytes, back)
            if kept and self.spaces.backward:
                local = np.array([local_elements(value.shape, goal, self.mesh) for goal in goals])
                local *= self.training.item(value)
                forms = [forget_gradient(layout) for layout in starts], [forget_gradient(layout) for layout in goals]
                new = np.array([[not held or one != other for other in forms[1]] for one in forms[0]])
                found[..., Resource.KEPT] += np.where(new, local[None, :], 0.0)
            self._prices[key] = found
        found = self._prices[key][from_state[:, None], to_state[None, :]]
        return found

    def _distinct(self, layouts: tuple[Layout, ...]) -> tuple[tuple[Layout, ...], np.ndarray]:
        found = self._unique.get(id(layouts))
        if found is None:
            known: dict[Layout, int] = {}
            index = np.array([known.setdefault(layout, len(known)) for layout in layouts], dtype=np.intp)
            found = self._unique[id(layouts)] = (tuple(known), index)
        return found

    # -- parameters ------------------------------------------------------------------------

    def _add_parameter(self, name: str, blocks: Mapping[str, int]) -> None:
        parameter = self.graph.parameter_of(name)
        assert parameter is not None
        users = [(user, index) for user, index in self.graph.users[name] if user.name in self.ops]
        if not users:
            return
        asked = [self.spaces.of(user).inputs[index] for user, index in users]
        kinds = [(self.spaces.kind(user), index) for user, index in users]
        homes = self.storing.of(parameter, kinds, asked)
        variable = self._variable(len(homes.layouts), blocks[users[0][0].name])
        self.homes[parameter.key] = variable
        self._homes[parameter.key] = homes
        number = self._number(("home", id(homes)))
        self._add((variable,), ("home", number), Label("parameter", parameter.key), lambda: homes.used)
        for (user, index), layouts in zip(users, asked, strict=True):
            key = ("use", number, self.spaces.kind(user), index)
            alone = len(users) == 1
            self._add(
                (variable, self.ops[user.name]),
                key,
                Label("value", name, homes.layouts, layouts, user.name),
                lambda layouts=layouts, alone=alone: self._uses(name, homes, layouts, alone),  # type: ignore[misc]
            )

    def _uses(self, name: str, homes: Homes, layouts: tuple[Layout, ...], alone: bool) -> np.ndarray:
        """[home, state of the op, resource]: a home that is cut otherwise than a use must be brought there."""
        value = self.graph.values[name]
        starts, from_state = self._distinct(homes.layouts)
        goals, to_state = self._distinct(layouts)
        if alone:
            found = np.zeros((len(starts), len(goals), COUNT))
            found[..., 0] = [[0.0 if start == goal else np.inf for goal in goals] for start in starts]
        else:
            bytes = value.elements * self.training.item(value)
            found = self.moves.prices(starts, goals, bytes, value.gradient and self.spaces.backward)
            found[..., 0] += [[np.inf if _unsummed(s, g, self.mesh.names) else 0.0 for g in goals] for s in starts]
        spread: np.ndarray = found[from_state[:, None], to_state[None, :]]
        return spread

    # -- what is kept ----------------------------------------------------------------------

    @property
    def _sinks(self) -> frozenset[str]:
        held = self.__dict__.get("_sinks_held")
        if held is None:
            held = self.__dict__["_sinks_held"] = frozenset(self.graph.sinks())
        return held

    def _leaving(self, name: str) -> Layout:
        return rows_layout(self.facts, self.mesh, self.rows, name)

    def _find_wanted(self) -> dict[str, bool]:
        """Whether backward needs a value, itself or through a view of it."""
        found: dict[str, bool] = dict.fromkeys(self.graph.values, False)
        self._wanted = found
        for op in reversed(self._live):
            for index, name in enumerate(op.inputs):
                found[name] = found[name] or self._keeps(op, index)
        return found

    def _keeps(self, op: Op, index: int) -> bool:
        space = self.spaces.of(op)
        if index < len(space.keeps_inputs) and space.keeps_inputs[index]:
            return True
        return index == 0 and shares(op) and any(self._wanted[name] for name in op.outputs)

    # -- the way back ----------------------------------------------------------------------

    def choices(self, states: Sequence[int]) -> dict[str, Mapping[str, str]]:
        by_name = self.graph.by_name
        return {name: self.spaces.of(by_name[name]).choices[states[at]] for name, at in self.ops.items()}

    def storage(self, states: Sequence[int]) -> dict[str, Storage]:
        return {key: self._homes[key].storage[states[at]] for key, at in self.homes.items()}

    def home(self, key: str, states: Sequence[int]) -> tuple[Layout, Storage]:
        homes, state = self._homes[key], states[self.homes[key]]
        return homes.layouts[state], homes.storage[state]

    def recompute(self, states: Sequence[int]) -> tuple[str, ...]:
        return tuple(path for held, at in self.recomputed.items() for path in sorted(self.layers[held][states[at]]))


def shares(op: Op) -> bool:
    """Whether what an op makes lies in the storage of its input."""
    return kind_of(op.target) in VIEWS


def _again(used: np.ndarray) -> np.ndarray:
    """The same in a region that backward runs again: forward twice, and nothing kept."""
    found = used.copy()
    found[..., Resource.COMPUTE_BACKWARD] += found[..., Resource.COMPUTE_FORWARD]
    found[..., Resource.SEND_BACKWARD] += found[..., Resource.SEND_FORWARD]
    found[..., Resource.KEPT] = 0.0
    return found


def _unsummed(home: Layout, use: Layout, axes: Sequence[str]) -> bool:
    """Whether a use hands back parts of a gradient that the home does not sum."""
    parts = forget_gradient(use) != use and any(str(use.placement(axis)) == "fanned" for axis in axes)
    return parts and any(
        str(use.placement(axis)) == "fanned" and str(home.placement(axis)) == "whole" for axis in axes
    )


def _paths(path: str) -> list[str]:
    """A module path and all above it, the longest first."""
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


__all__ = ["Node", "Space", "Tables"]

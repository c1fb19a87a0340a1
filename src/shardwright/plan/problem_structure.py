"""The structure of the search, without a mesh: its variables, and which of them share a table.

    variable   its states                                        stands for
    op         its choices on all axes                           every op that is no constant
    hub        the layouts of a value                            a value that is read more than once
    home       layouts and storage (ZeRO level, axes)            a parameter
    layer      which of its modules are recomputed               a repeated layer, where recomputation is allowed

A value that is read once is a table over its producer and its reader: the price of the reshard between them. With
several readers the producer delivers to a hub, and every reader reshards from there; so an all_reduce that all need is
done once.
What is saved for backward is charged once for each storage, where it is produced: views share that of their input.

Equal layers have equal tables: an entry names its table by a number, and `tables` fills each number once for a mesh.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from ..ir import Graph, Op, Parameter
from ..ir.paths import layer_of, prefixes
from .op_kinds import OpKinds, aliases_input

Region = tuple[int, ...]
"""For each option to recompute a layer the region in which something runs; -1 is none."""

Ways = Mapping[str, Sequence[frozenset[str]]]
"""For each layer the options to recompute it: sets of module paths."""


def alike(graph: Graph, together: Mapping[str, str], layers: Iterable[str]) -> dict[str, str]:
    """For each layer the first of those with which it has ops together: they are recomputed in the same way."""
    heads = {layer: layer for layer in layers}
    first_layer: dict[str, str] = {}
    for op in graph.ops if together and heads else ():
        layer = next((path for path in prefixes(op.module_path) if path in heads), None)
        if layer is None or op.name not in together:
            continue
        old, new = heads[layer], heads[first_layer.setdefault(together[op.name], layer)]
        if old != new:
            heads |= {path: new for path, head in heads.items() if head == old}
    return heads


class EdgeEnd(NamedTuple):
    """Where a value comes from or goes to: an output or input of a kind of op, a kind of hub, or out of the model."""

    what: Literal["out", "in", "hub", "leaving"]
    kind: int
    at: int = 0


class EdgeSide(NamedTuple):
    """An end in the graph: its variable (-1: none), its layer's variable and path, its region in each option.

    `own_region` is a region of the user's model, which is recomputed in any case.
    """

    end: EdgeEnd
    variable: int
    layer: int = -1
    region: Region = ()
    reader: str = ""
    path: str | None = None
    own_region: str | None = None


@dataclass(frozen=True)
class OpTable:
    kind: int
    again: bool = False  # in a region of the user's model
    region: Region = ()  # in each option to recompute its layer


@dataclass(frozen=True)
class EdgeTable:
    """A reshard. `saved`: backward needs the result; `shared`: what is passed on unchanged costs no memory.

    `ways` says for each recomputation option what it is: "plain", "enters" a region, or runs "again" inside one.
    """

    size: tuple[tuple[int, ...], str, bool]
    value: str = field(compare=False)
    start: EdgeEnd
    goal: EdgeEnd
    saved: bool
    shared: bool
    ways: tuple[str, ...] = ()
    same: bool = False  # both ends are one variable
    again: bool = False  # in a region of the user's model


@dataclass(frozen=True)
class StorageTable:
    parameter: int


@dataclass(frozen=True)
class UseTable:
    parameter: int
    kind: int
    index: int
    value: str = field(compare=False)


Table = OpTable | EdgeTable | StorageTable | UseTable


class SearchVariable(NamedTuple):
    what: Literal["op", "hub", "home", "layer"]
    kind: int
    block: int


class FactorEntry(NamedTuple):
    """A factor: variables, the number of its table, and what it is the price of."""

    variables: tuple[int, ...]
    table: int
    name: str
    reader: str = ""


class ProblemStructure:
    """The variables and entries of one graph.

    `together` names groups of ops that are split in the same way: a group is one variable, and so are hubs between such
    ops, and the layers that they are in. Then several entries may be over the same variables. `twins` are the kinds of
    each group, which need the same choices in the same order; no op outside of the group is of these kinds.
    """

    def __init__(self, kinds: OpKinds, layers: Ways | None = None, together: Mapping[str, str] | None = None) -> None:
        self.kinds, self.analysis, self.graph = kinds, kinds.analysis, kinds.graph
        self.layers, self.together = layers or {}, together or {}
        self.variables: list[SearchVariable] = []
        self.entries: list[FactorEntry] = []
        self.tables: dict[Table, int] = {}
        self.ops: dict[str, int] = {}
        self.hubs: dict[str, int] = {}
        self.storage_options: dict[str, int] = {}
        self.recomputed: dict[str, int] = {}
        self.hub_kinds: dict[tuple[EdgeEnd, ...], int] = {}
        self.parameter_kinds: dict[Hashable, int] = {}
        self.first_parameters: list[Parameter] = []
        self._where: dict[str, tuple[int, Region, str | None]] = {}
        self._ways: dict[int, Sequence[frozenset[str]]] = {}
        self._groups: dict[str, int] = {}
        self.twins: dict[str, dict[int, None]] = {}
        self._shared_hubs: dict[Hashable, int] = {}
        self.sinks = frozenset(self.graph.sinks())
        self._build()

    def _variable(self, what: Literal["op", "hub", "home", "layer"], kind: int, block: int) -> int:
        self.variables.append(SearchVariable(what, kind, block))
        return len(self.variables) - 1

    def _op_variable(self, op: Op, block: int) -> int:
        kind, group = self.kinds.of[op.name], self.together.get(op.name)
        if group is None:
            return self._variable("op", kind, block)
        if group not in self._groups:
            self._groups[group] = self._variable("op", kind, block)
        self.twins.setdefault(group, {})[kind] = None
        return self._groups[group]

    def _build(self) -> None:
        blocks: dict[str, int] = {}
        heads = alike(self.graph, self.together, self.layers)
        number, last = 0, ""
        for op in self.kinds.live:
            block = layer_of(op.module_path)
            if block != last:
                number, last = number + 1, block
            blocks[op.name] = number
            path = next((prefix for prefix in prefixes(op.module_path) if prefix in self.layers), None)
            if path is not None and path not in self.recomputed:
                known = self.recomputed.get(heads[path])
                fresh = self._variable("layer", len(self.layers[path]), number) if known is None else known
                self.recomputed[heads[path]] = self.recomputed[path] = fresh
                self._ways[fresh] = self.layers[path]
            self.ops[op.name] = self._op_variable(op, number)
            self._where[op.name] = self._place(op, path)
        for op in self.kinds.live:
            self._add_op(op)
            for at in range(len(op.outputs)):
                self._add_value(op, at, blocks[op.name])
        for parameter in self.graph.parameters:
            self._add_parameter(parameter, blocks)

    def _place(self, op: Op, path: str | None) -> tuple[int, Region, str | None]:
        """The variable of the layer that an op is in, its regions, and the layer."""
        if path is None:
            return -1, (), None
        ways, above = self.layers[path], set(prefixes(op.module_path))
        every = sorted({module for option in ways for module in option})
        region = tuple(next((every.index(module) for module in option if module in above), -1) for option in ways)
        return self.recomputed[path], region, path

    def _add(self, variables: tuple[int, ...], table: Table, name: str, reader: str = "") -> None:
        self.entries.append(FactorEntry(variables, self.tables.setdefault(table, len(self.tables)), name, reader))

    def _add_op(self, op: Op) -> None:
        layer, region, _ = self._where[op.name]
        variable, kind = self.ops[op.name], self.kinds.of[op.name]
        if layer < 0:
            self._add((variable,), OpTable(kind, op.region is not None), op.name)
        else:
            self._add((variable, layer), OpTable(kind, op.region is not None, region), op.name)

    def _side(self, op: Op, what: Literal["out", "in"], at: int) -> EdgeSide:
        layer, region, path = self._where[op.name]
        end = EdgeEnd(what, self.kinds.of[op.name], at)
        return EdgeSide(end, self.ops[op.name], layer, region, op.name, path, op.region)

    def _add_value(self, op: Op, at: int, block: int) -> None:
        name = op.outputs[at]
        users = [(user, index) for user, index in self.graph.users[name] if user.name in self.ops]
        leaves = name in self.sinks
        if not users and not leaves:
            return
        kinds = self.kinds
        producer = self._side(op, "out", at)
        shared = kinds.keeps(kinds.of[op.name])[1][at] or aliases_input(op)  # its storage is charged elsewhere
        apart = bool(self.layers) and any(self._where[user.name][2] != producer.path for user, _ in users)
        out = EdgeSide(EdgeEnd("leaving", len(self.graph.values[name].shape)), -1)
        if not users:
            self._edge(name, producer, out, saved=False, shared=shared)
            return
        if len(users) == 1 and not leaves and not apart:
            ((user, index),) = users
            self._edge(
                name, producer, self._side(user, "in", index), saved=kinds.reads_kept(user, index), shared=shared
            )
            return
        hub = self._hub(producer, users, block)
        self.hubs[name] = hub.variable
        self._edge(name, producer, hub, saved=kinds.wanted[name], shared=shared)
        for user, index in users:
            self._edge(name, hub, self._side(user, "in", index), saved=kinds.reads_kept(user, index), shared=True)
        if leaves:
            self._edge(name, hub, out, saved=False, shared=True)

    def _hub(self, producer: EdgeSide, users: list[tuple[Op, int]], block: int) -> EdgeSide:
        """A place for a value with several readers; in a region only if all that touch it are."""
        ends = (producer.end, *(EdgeEnd("in", self.kinds.of[user.name], index) for user, index in users))
        kind = self.hub_kinds.setdefault(ends, len(self.hub_kinds))
        layer, region = producer.layer, producer.region
        places = [self._where[user.name] for user, _ in users]
        same = all(path == producer.path for _, _, path in places)
        region = tuple(
            at if same and all(other[option] == at for _, other, _ in places) else -1
            for option, at in enumerate(region)
        )
        key: Hashable = (kind, producer.variable, tuple(self.ops[user.name] for user, _ in users), layer, region)
        if producer.reader not in self.together or not all(user.name in self.together for user, _ in users):
            key = producer.reader, producer.end.at
        variable = self._shared_hubs.get(key)
        if variable is None:
            variable = self._shared_hubs[key] = self._variable("hub", kind, block)
        own = producer.own_region if all(user.region == producer.own_region for user, _ in users) else None
        return EdgeSide(EdgeEnd("hub", kind), variable, layer, region, path=producer.path, own_region=own)

    def _edge(self, name: str, a: EdgeSide, b: EdgeSide, *, saved: bool, shared: bool) -> None:
        value = self.graph.values[name]
        same = a.variable == b.variable
        ends = (a.variable,) if b.variable < 0 or same else (a.variable, b.variable)
        layer, ways = self._ways_of(a, b)
        size = (value.shape, value.dtype, value.gradient)
        again = a.own_region is not None and a.own_region == b.own_region
        table = EdgeTable(size, name, a.end, b.end, saved, shared, ways, same, again)
        self._add((*ends, layer) if ways else ends, table, name, b.reader)

    def _ways_of(self, a: EdgeSide, b: EdgeSide) -> tuple[int, tuple[str, ...]]:
        """The layer whose recomputation decides about an edge, and what becomes of the edge in each option."""
        layer = b.layer if any(at >= 0 for at in b.region) else a.layer
        if layer < 0 or not any(at >= 0 for at in (*a.region, *b.region)):
            return -1, ()
        cases = []
        for option in range(len(self._ways[layer])):
            start = a.region[option] if a.layer == layer else -1
            goal = b.region[option] if b.layer == layer else -1
            inside = start == goal >= 0 and a.path == b.path
            cases.append("again" if inside else "enters" if goal >= 0 else "plain")
        return (layer, tuple(cases)) if set(cases) != {"plain"} else (-1, ())

    def _add_parameter(self, parameter: Parameter, blocks: Mapping[str, int]) -> None:
        name = parameter.value
        users = [(user, index) for user, index in self.graph.users[name] if user.name in self.ops]
        if not users:
            return
        value, unit = self.graph.values[name], self.units[parameter.key]
        decision = repr(self.kinds.decisions.get(parameter.key))
        uses = tuple((self.kinds.of[user.name], index) for user, index in users)
        key = (uses, value.shape, value.dtype, parameter.trainable, decision, unit)
        kind = self.parameter_kinds.setdefault(key, len(self.parameter_kinds))
        if kind == len(self.first_parameters):
            self.first_parameters.append(parameter)
        variable = self._variable("home", kind, blocks[users[0][0].name])
        self.storage_options[parameter.key] = variable
        self._add((variable,), StorageTable(kind), parameter.key)
        for user, index in users:
            table = UseTable(kind, self.kinds.of[user.name], index, name)
            self._add((variable, self.ops[user.name]), table, name, user.name)

    @cached_property
    def shapes(self) -> tuple[tuple[str, int], ...]:
        """What decides how many states each variable has."""
        return tuple((variable.what, variable.kind) for variable in self.variables)

    @cached_property
    def units(self) -> dict[str, float]:
        """For each parameter the elements of all that are gathered with it."""
        units = {parameter.key: layer_of(parameter.key) or parameter.key for parameter in self.graph.parameters}
        sums: Counter[str] = Counter()
        for parameter in self.graph.parameters:
            sums[units[parameter.key]] += self.graph.values[parameter.value].elements
        return {key: float(sums[unit]) for key, unit in units.items()}

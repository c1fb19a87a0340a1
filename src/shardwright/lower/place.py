"""The first pass: give every use its layout and put reshards between producers and uses.

For each value the reshards form the cheapest tree over all its uses, so that a sum that
two uses need is done once, and gradients join before they are reduced.

In a recompute region what is placed runs again in backward. So what enters a region from outside
is sent before its first op; reshards that send nothing forward stay where they are used, unless others
use their result too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..cost.reshard_prices import ReshardPrices, prices_of
from ..cost.reshard_search import LayoutForm, forms_of
from ..errors import LoweringError, PlanError
from ..ir import Graph, Op, Parameter, Value
from ..ir.graph import ITEM_SIZE
from ..ir.paths import layer_of
from ..ir.recompute import regions_of
from ..layout import INVARIANT, MB, REPLICATE, Layout, Mesh, Partial, make_layout, replicated
from ..reshard import Reshard, forget_gradient, parameter_layout, same_placement
from ..rules import FAN, Analysis, Choices
from ..rules.replica_axes import batch_layout, replica_axes
from ..storage import ParameterSpec, Replicated, Storage, restricted
from .program import LoweredProgram


@dataclass(frozen=True, kw_only=True)
class PlacementTask:
    """What is to be placed: a graph, or the graph of a stage, on a mesh.

    mesh        with the axis in time, if there are microbatches
    prices      by which reshards are chosen: those of the plan, or bytes
    storage_options    layouts of parameters, where that is decided already
    mode        "per_replica" if each data-parallel replica passes its own samples
    entering    values received from other stages, with their layout over microbatches
    leaving     values sent to other stages, in the layouts those want; None: as they are produced
    chunked     losses whose logits are made in so many chunks
    title       what it is, for the head of the file: "stage 0 of 2"; `header` has more lines for it
    stepped     whether it runs by a schedule; `puts_off` if that has backward in two steps
    """

    graph: Graph
    analysis: Analysis
    mesh: Mesh
    choices: Choices
    recompute: tuple[str, ...] = ()
    chunked: Mapping[str, int] = field(default_factory=dict)
    storage: Mapping[str, Storage] = field(default_factory=dict)
    storage_options: Mapping[str, Layout] = field(default_factory=dict)
    mode: str = "global"
    entering: Mapping[str, Layout] = field(default_factory=dict)
    leaving: Mapping[str, Layout | None] = field(default_factory=dict)
    plan_name: str = ""
    plan_policy: str = ""
    title: str = ""
    header: tuple[str, ...] = ()
    stepped: bool = False
    puts_off: bool = False
    prices: ReshardPrices | None = None


class Placer:
    """Walks the graph once and writes the program's ops."""

    def __init__(self, task: PlacementTask) -> None:
        self.task, self.graph, self.analysis, self.mesh, self.mode = (
            task,
            task.graph,
            task.analysis,
            task.mesh,
            task.mode,
        )
        graph = task.graph
        self.sizes = task.mesh.sizes
        self.prices = task.prices or prices_of(task.mesh, None)
        self.values: dict[str, Value] = {}
        self.layouts: dict[str, Layout] = {}
        self.ops: list[Op] = []
        self.forms: dict[str, dict[Layout, LayoutForm]] = {}
        self.counts: dict[str, int] = {}
        self.choices = {name: choice for name, choice in task.choices.items() if choice}
        self.regions = regions_of(graph, task.recompute)
        self.region: str | None = None  # the region that is being placed,
        self.start = 0  # where it starts,
        self.inside: set[str] = set()  # and what has been made in it
        self.placed = {op.name: self._layouts(op) for op in graph.ops}
        self.uses: dict[str, list[Layout]] = {name: [] for name in graph.values}
        for op in graph.ops:
            for name, layout in zip(op.inputs, self.placed[op.name][0], strict=True):
                self.uses[name].append(layout)
        self.storage_options = dict(task.storage_options)
        for name, layout in self._sinks():
            self.uses[name].append(layout)

    def _layouts(self, op: Op) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
        signature = self.analysis.signatures[op.name]
        choice = {} if self.analysis.is_constant(op) else self.choices.get(op.name, {})
        if signature.rule is None and any(picked != FAN for picked in choice.values()):
            raise PlanError(f"the plan splits {op}, which has no rule")
        return signature.layouts(choice, self.mesh)

    def _leaving(self, name: str) -> Layout:
        """Outputs leave replicated; in "per_replica" mode those with a batch dim leave as this replica's samples.

        In time they stay as they are made, and so do values that go to other stages, which are settled but for that.
        """
        value = self.graph.values[name]
        produced = self._produced(name)
        if name in self.task.leaving:
            wanted = self.task.leaving[name]
            return sendable_layout(produced) if wanted is None else wanted
        if self.mode == "per_replica" and value.shape and any(output.value == name for output in self.graph.outputs):
            return in_time(self._per_replica(name), produced, self.sizes)
        return in_time(replicated(len(value.shape)), produced, self.sizes)

    def _updates(self) -> Iterator[tuple[str, str, Layout]]:
        """(key, value, layout) of what forward writes to: buffers replicated, parameters as they are stored.

        Both are of the whole batch: unlike outputs, they don't add up over time.
        """
        for buffer in self.graph.buffers:
            if buffer.update is not None:
                yield buffer.key, buffer.update, replicated(len(self.graph.values[buffer.update].shape))
        for parameter in self.graph.parameters:
            if parameter.update is not None:
                yield parameter.key, parameter.update, forget_gradient(self._storage_layout(parameter))

    def _sinks(self) -> Iterator[tuple[str, Layout]]:
        """The values that must be computed, and how: outputs and updates."""
        for output in self.graph.outputs:
            if output.value is not None:
                yield output.value, self._leaving(output.value)
        for _, value, layout in self._updates():
            yield value, layout

    def taken_as(self, name: str) -> Layout:
        """How a value that comes from another stage is taken."""
        return self._entering(name)

    def given_as(self, name: str) -> Layout:
        """How a value that goes to another stage is given."""
        return self._leaving(name)

    def _produced(self, name: str) -> Layout:
        """The layout in which a value is produced."""
        maker = self.graph.producer.get(name)
        if maker is None:
            return self.task.entering.get(name, replicated(len(self.graph.values[name].shape)))
        return self.placed[maker.name][1][maker.outputs.index(name)]

    def _per_replica(self, name: str) -> Layout:
        """The layout in which each data-parallel replica has its own samples."""
        return batch_layout(self.analysis, self.mesh, replica_axes(self.mesh), name)

    def run(self) -> LoweredProgram:
        graph = self.graph
        for item in graph.inputs:
            self._produce(item.value, self._entering(item.value))
        parameters = [self._hold(parameter) for parameter in graph.parameters]
        for buffer in graph.buffers:
            self._produce(buffer.value, replicated(len(graph.values[buffer.value].shape)))
        for op in graph.ops:
            self._place(op)
        self._enter(None)
        outputs = tuple(
            self._use(output.value, self._leaving(output.value), None) if output.value is not None else None
            for output in graph.outputs
        )
        updates = tuple((key, self._use(value, layout, None)) for key, value, layout in self._updates())
        return LoweredProgram(
            graph=graph,
            analysis=self.analysis,
            mesh=self.mesh,
            plan_name=self.task.plan_name,
            plan_policy=self.task.plan_policy,
            values=self.values,
            layouts=self.layouts,
            parameters=tuple(parameters),
            body=tuple(self.ops),
            outputs=outputs,
            updates=updates,
            mode=self.mode,
            choices=self.choices,
            stepped=self.task.stepped,
            puts_off=self.task.puts_off,
            title=self.task.title,
            header=self.task.header,
            received=frozenset(self.task.entering),
            chunked=self.task.chunked,
        )

    def _entering(self, name: str) -> Layout:
        """Inputs are replicated, or split by samples, and so is their gradient: it sums over microbatches."""
        layout = self.task.entering.get(name)
        if layout is not None:
            return entering(layout, self.uses[name], self.mesh)
        layout = (
            self._per_replica(name) if self.mode == "per_replica" else replicated(len(self.graph.values[name].shape))
        )
        return layout.with_placement(MB, REPLICATE) if MB in self.sizes else layout

    def _produce(self, name: str, layout: Layout) -> None:
        value = self.graph.values[name]
        self.values[name] = value
        self.layouts[name] = layout
        goals, item = self.uses[name], ITEM_SIZE.get(value.dtype, 4)
        root, forms = forms_of(layout, goals, value.shape, item, self.prices, value.gradient)
        root.name = name
        self.forms[name] = forms

    def _enter(self, region: str | None) -> None:
        if region != self.region:
            self.region, self.start, self.inside = region, len(self.ops), set()

    def _place(self, op: Op) -> None:
        inputs, outputs = self.placed[op.name]
        self._enter(self.regions.get(op.name))
        names = tuple(self._use(name, layout, op) for name, layout in zip(op.inputs, inputs, strict=True))
        as_it_is = names == op.inputs and op.region == self.region
        self._add(op if as_it_is else replace(op, inputs=names, region=self.region))
        for name, layout in zip(op.outputs, outputs, strict=True):
            self._produce(name, layout)

    def _add(self, op: Op, before: bool = False) -> None:
        """Write an op: at the end, or before the region that is being placed."""
        if before:
            self.ops.insert(self.start, replace(op, region=None))
            self.start += 1
        else:
            self.ops.append(op)
            self.inside.update(op.outputs)

    def _use(self, name: str, layout: Layout, op: Op | None) -> str:
        """The program's name for a value in the layout that a use wants, reshards placed before it."""
        if not self.graph.values[name].gradient:
            layout = forget_gradient(layout)
        return self._materialise(name, self.forms[name][layout], op)

    def _materialise(self, name: str, node: LayoutForm, op: Op | None, before: bool = False) -> str:
        """Place the reshards that lead to a node. `before` the region goes what a sending reshard needs."""
        if node.name is not None:
            return node.name
        assert node.parent is not None and node.step is not None
        if self.region is not None:
            before = before or node.step.sends or self._used_elsewhere(name, node)
        source = self._materialise(name, node.parent, op, before)
        self.counts[name] = self.counts.get(name, 0) + 1
        node.name = f"{name}@{self.counts[name]}"
        self.values[node.name] = Value(
            name=node.name,
            shape=self.values[name].shape,
            dtype=self.values[name].dtype,
            gradient=self.values[name].gradient,
        )
        self.layouts[node.name] = node.layout
        reshard = reshard_op(node.step, source, node.name, op, self.graph.producer.get(name))
        self._add(replace(reshard, region=self.region), before=before and source not in self.inside)
        return node.name

    def _used_elsewhere(self, name: str, node: LayoutForm) -> bool:
        """Whether something outside of the region that is being placed uses a node, or what is made of it."""
        for op, index in self.graph.users[name]:
            if self.regions.get(op.name) != self.region and self._leads_to(node, name, self.placed[op.name][0][index]):
                return True
        return any(sink == name and self._leads_to(node, name, layout) for sink, layout in self._sinks())

    def _leads_to(self, node: LayoutForm, name: str, goal: Layout) -> bool:
        goal = goal if self.graph.values[name].gradient else forget_gradient(goal)
        at: LayoutForm | None = self.forms[name][goal]
        while at is not None and at is not node:
            at = at.parent
        return at is node

    def _requested(self, parameter: Parameter) -> Storage:
        """The storage that the plan asks for, on the axes that there are."""
        return restricted(self.task.storage.get(parameter.key, Replicated()), self.sizes)

    def _storage_layout(self, parameter: Parameter) -> Layout:
        layout, uses = self.storage_options.get(parameter.key), self.uses[parameter.value]
        if layout is None:
            layout = parameter_layout(uses, self.mesh, len(self.graph.values[parameter.value].shape))
            for axis in self._requested(parameter).axes if uses else ():  # kept in shares: its gradient is a sum
                layout = layout.with_placement(axis, REPLICATE) if layout.placement(axis) == INVARIANT else layout
        return layout.with_placement(MB, INVARIANT) if MB in self.sizes and layout.shard_of(MB) is None else layout

    def parameter_layouts(self) -> dict[str, Layout]:
        """How every parameter is stored."""
        return {parameter.key: self._stored_as(parameter) for parameter in self.graph.parameters}

    def _stored_as(self, parameter: Parameter) -> Layout:
        layout = self._storage_layout(parameter)
        return layout if parameter.trainable else forget_gradient(layout)

    def _hold(self, parameter: Parameter) -> ParameterSpec:
        value, requested = self.graph.values[parameter.value], self._requested(parameter)
        layout = self._storage_layout(parameter)
        summed = [axis for axis in requested.axes if not parameter.trainable or layout.placement(axis) == REPLICATE]
        storage = restricted(requested, summed)
        if layout.shard_of(MB) is not None:
            raise LoweringError(
                f"the batch can't be cut into microbatches: dim 0 of the inputs is taken for the batch, and parameter "
                f"{parameter.key} {value.shape} has that dim too; use PipelineOptions(microbatches=1), pass "
                "inputs with a batch dim, or name those that have none: CompileOptions(unbatched=[...])"
            )
        layout = self._stored_as(parameter)
        added_up = parameter.trainable and MB in self.sizes  # gradients of microbatches are a sum
        self._produce(parameter.value, layout.with_placement(MB, REPLICATE) if added_up else layout)
        return ParameterSpec(
            value=parameter.value,
            keys=parameter.keys,
            shape=value.shape,
            dtype=value.dtype,
            trainable=parameter.trainable,
            layout=layout,
            storage=storage,
            unit=layer_of(parameter.key) if storage.shards_parameter else "",
        )


def sendable_layout(layout: Layout) -> Layout:
    """The layout in which a value is sent: sharded or replicated on every axis; over microbatches as it is."""
    return make_layout(layout.shards, {name: placement for name, placement in layout.rest if name == MB})


def in_time(layout: Layout, produced: Layout, sizes: Mapping[str, int]) -> Layout:
    """A layout of an output, in time as the value is made; its gradient is the same for all microbatches."""
    split = produced.shard_of(MB)
    if split is None:
        placement = produced.placement(MB)
        return layout.with_placement(MB, placement) if isinstance(placement, Partial) else layout
    dim, shard = split
    if next(iter(sizes)) != MB:
        return layout.with_shard(dim, shard)
    shards = tuple((shard, *others) if at == dim else others for at, others in enumerate(layout.shards))
    return make_layout(shards, dict(layout.rest))


def entering(sent: Layout, uses: Sequence[Layout], mesh: Mesh) -> Layout:
    """How a value from another stage is received: as its most sharded use, without pending sums; over microbatches
    as it was sent."""
    best = sendable_layout(parameter_layout(uses, mesh, len(sent.shards)))
    if best.shard_of(MB) == sent.shard_of(MB):
        return make_layout(best.shards, {MB: sent.placement(MB) or INVARIANT})
    shards = [tuple(shard for shard in dim_shards if shard.axis == MB) for dim_shards in sent.shards]
    return make_layout(shards, {MB: sent.placement(MB) or INVARIANT})


def reshard_op(step: Reshard, source: str, result: str, op: Op | None, producer: Op | None) -> Op:
    """A reshard as an op. It belongs to the module of the op that it stands before."""
    near = op or producer
    arguments: list[tuple[str, object]] = [("axes", step.axes)]
    for key in ("dim", "sharding", "to_dim", "to_sharding"):
        if getattr(step, key) is not None:
            arguments.append((key, getattr(step, key)))
    if step.kind == "reduce":
        arguments.append(("op", step.reduction))
    return Op(
        name=f"{near.name if near else ''} < {step.kind} {source}",
        target=f"comm.{step.kind}",
        inputs=(source,),
        outputs=(result,),
        arguments=tuple(arguments),
        module_path=near.module_path if near else "",
        no_grad=False,
    )


def check_edges(program: LoweredProgram) -> LoweredProgram:
    """Every op must find its inputs in the layouts that its choice asks for."""
    for op in program.body:
        if op.target.startswith("comm."):
            continue
        signature = program.analysis.signatures[op.name]
        choice = {} if program.analysis.is_constant(op) or program.choices is None else program.choices.get(op.name, {})
        inputs, _ = signature.layouts(choice, program.mesh)
        for name, wanted in zip(op.inputs, inputs, strict=True):
            layout = program.layouts[name]
            if not program.values[name].gradient:
                layout, wanted = forget_gradient(layout), forget_gradient(wanted)
            if not same_placement(layout, wanted, program.mesh.sizes):
                raise LoweringError(f"{op} wants {program.values[name]} as {wanted} and finds it as {layout}")
    return program

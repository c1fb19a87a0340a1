"""The program of one rank as memory sees it: steps that read, make, save and release tensors.

`steps_of` does what lowering would: every use of a value in the layout that its op wants, with
reshards where they are needed, one for each form of a value. It says nothing about arguments,
so it is quick enough for a planner. What is fused afterwards is in `fusing.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from ..ir import Op
from ..ir.graph import ITEM_SIZE
from ..ir.paths import layer_of, prefixes
from ..layout import INVARIANT, REPLICATE, Layout, Mesh, replicated
from ..ops import op_kind
from ..ops.contexts import SavedForBackward
from ..reshard import forget_gradient, parameter_layout
from ..rules import Analysis
from ..storage import Replicated, Storage, restricted
from .call import local_call, local_elements
from .flow import Flow, GradientFlow, flow, reshard_memory
from .reshard_prices import ReshardPrices, prices_of
from .reshard_search import LayoutForm, forms_of
from .saved_for_backward import saved_for_backward
from .strides import Strides, strides_of
from .training import ON_CPU, BackendTraits, TrainingSetup

Choices = Mapping[str, Mapping[str, str]]
StorageByKey = Mapping[str, Storage]


@dataclass(slots=True)
class RankTensor:
    """A tensor of this rank."""

    bytes: float
    gradient: bool
    shape: tuple[int, ...] = ()
    word: str = ""  # what generated code calls it
    parameter: str | None = None
    fixed: bool = False  # lives for ever: a parameter, an input, a constant


@dataclass(slots=True, eq=False)
class RankStep:
    """One call: the numbers of the tensors that it reads and makes, and what it does to memory."""

    name: str
    kind: str
    inputs: list[int]
    outputs: list[int]
    back: list[GradientFlow]
    saved: list[int]
    extra: float = 0.0
    work: float = 0.0
    backward_work: float = 0.0
    shares: bool = False
    region: str | None = None
    gradient: bool = True
    scope: str = ""  # the layer that it is in, whose names go when its method returns


@dataclass(frozen=True, slots=True)
class ParameterMemory:
    """The memory of a parameter: its bytes in compute, and what ZeRO shards of it."""

    key: str
    value: int
    bytes: float
    gathered: float  # bytes of the full parameter that ZeRO-3 gathers, in the compute dtype
    trainable: bool
    sums: tuple[str, ...]  # the axes over which its gradient is summed
    state: float = 0.0  # bytes that the optimizer keeps for all of it
    wider: float = 1.0  # how much larger its gradient is
    storage: Storage = field(default_factory=Replicated)
    parts: int = 1  # over how many ranks its storage shards it

    @property
    def share(self) -> float:
        """Bytes of its share, if its storage shards it."""
        return self.bytes / self.parts

    @property
    def updated(self) -> float:
        """Bytes of what this rank's optimizer updates on its device."""
        return self.storage.stored(self.bytes, self.parts).state

    @property
    def states(self) -> float:
        """Bytes of the state that this rank's optimizer keeps, of its master too."""
        return self.storage.stored(self.state, self.parts).state if self.trainable else 0.0

    @property
    def stored(self) -> float:
        """Bytes of the parameter as it is stored."""
        return self.storage.stored(self.bytes, self.parts).parameter


class StoredAlike(NamedTuple):
    """The layout and sizes of parameters that are used and stored alike."""

    layout: Layout
    elements: float
    sums: tuple[str, ...]  # axes
    storage: Storage
    parts: int


@dataclass(slots=True)
class RankProgram:
    steps: list[RankStep] = field(default_factory=list)
    tensors: list[RankTensor] = field(default_factory=list)
    parameters: list[ParameterMemory] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    constants: float = 0.0
    inputs: float = 0.0


def steps_of(
    analysis: Analysis,
    mesh: Mesh,
    choices: Choices,
    storage: StorageByKey,
    training: TrainingSetup,
    recompute: Sequence[str] = (),
    traits: BackendTraits = ON_CPU,
    borders: Mapping[str, Layout] | None = None,
    prices: ReshardPrices | None = None,
) -> RankProgram:
    """The steps of the first rank of a mesh, one for each op and each reshard.

    borders   how values lie that come from another segment or go to one; they are not among the program's inputs
    prices    by which lowering chooses reshards; None: bytes
    """
    prices = prices or prices_of(mesh, None)
    return _Builder(analysis, mesh, choices, storage, training, recompute, traits, borders or {}, prices).run()


class _Builder:
    def __init__(
        self, analysis: Analysis, mesh: Mesh, choices: Choices, storage: StorageByKey, training: TrainingSetup,
        recompute: Sequence[str], traits: BackendTraits, borders: Mapping[str, Layout], prices: ReshardPrices,
    ) -> None:  # fmt: skip
        self.borders, self.prices = borders, prices
        self.analysis, self.graph, self.mesh, self.training = analysis, analysis.graph, mesh, training
        self.choices, self.storage, self.recompute = choices, storage, frozenset(recompute)
        self.sizes, self.copies = mesh.sizes, traits.copies
        self.program = RankProgram()
        self.strides: Strides = strides_of(analysis.graph)
        self.constant = {op.name for op in self.graph.ops if analysis.is_constant(op)}
        self.placed = {op.name: analysis.signatures[op.name].layouts(self._choice(op), mesh) for op in self.graph.ops}
        self.uses: dict[str, list[Layout]] = {name: [] for name in self.graph.values}
        self.written = {item.update: item for item in self.graph.parameters if item.update is not None}
        for op in self.graph.ops:
            for name, layout in zip(op.inputs, self.placed[op.name][0], strict=True):
                self.uses[name].append(layout)
        for name, layout in self._sinks():
            self.uses[name].append(layout)
        self.forms: dict[str, dict[Layout, LayoutForm]] = {}
        self.numbers: dict[int, int] = {}  # the tensor of a form, by its identity
        self.alive: list[LayoutForm] = []  # so that identities stay theirs
        self.known: dict[object, tuple[SavedForBackward, Flow, bool]] = {}  # layers that are alike are looked at once
        self.elements: dict[tuple[tuple[int, ...], Layout], float] = {}
        self.regions: dict[str, str | None] = {}  # of a module
        self.storage_options: dict[object, StoredAlike] = {}

    def _border(self, name: str) -> Layout:
        """How a value lies when it comes in or goes out."""
        return self.borders.get(name) or replicated(len(self.graph.values[name].shape))

    def _sinks(self) -> Iterator[tuple[str, Layout]]:
        """What leaves, and how: parameters that forward writes to as they are stored, the rest as it goes out."""
        for name in self.graph.sinks():
            parameter = self.written.get(name)
            if parameter is None:
                yield name, self._border(name)
            else:
                shape = self.graph.values[name].shape
                yield name, forget_gradient(parameter_layout(self.uses[parameter.value], self.mesh, len(shape)))

    def _choice(self, op: Op) -> Mapping[str, str]:
        return {} if op.name in self.constant else self.choices.get(op.name, {})

    def run(self) -> RankProgram:
        graph, program = self.graph, self.program
        for name in (*(item.value for item in graph.inputs), *(item.value for item in graph.buffers)):
            self._produce(name, self._border(name), fixed=True)
            program.inputs += 0.0 if name in self.borders else graph.values[name].bytes
        self._hold()
        for op in graph.ops:
            self._place(op)
        for name, layout in self._sinks():
            program.outputs.append(self._use(name, layout, None))
        return program

    def _hold(self) -> None:
        first = {name: at for at, op in reversed(list(enumerate(self.graph.ops))) for name in op.inputs}
        order = sorted(self.graph.parameters, key=lambda parameter: first.get(parameter.value, len(first)))
        for parameter in order:
            value = self.graph.values[parameter.value]
            uses, storage = tuple(self.uses[parameter.value]), self.storage.get(parameter.key, Replicated())
            key = (uses, value.shape, storage, parameter.trainable)
            if key not in self.storage_options:
                self.storage_options[key] = self._stored(*key)
            place = self.storage_options[key]
            number = self._produce(parameter.value, place.layout, fixed=True)
            self.program.tensors[number].parameter = parameter.key
            self.program.parameters.append(
                ParameterMemory(
                    key=parameter.key,
                    value=number,
                    bytes=place.elements * ITEM_SIZE.get(value.dtype, 4),
                    gathered=place.elements * self.training.item(value),
                    trainable=parameter.trainable,
                    sums=place.sums,
                    state=place.elements * self.training.state_item(value),
                    wider=self.training.true_item(value) / ITEM_SIZE.get(value.dtype, 4),
                    storage=place.storage,
                    parts=place.parts,
                )
            )

    def _stored(
        self, uses: tuple[Layout, ...], shape: tuple[int, ...], requested: Storage, trainable: bool
    ) -> StoredAlike:
        layout = parameter_layout(uses, self.mesh, len(shape))
        for axis in requested.axes if uses else ():
            layout = layout.with_placement(axis, REPLICATE) if layout.placement(axis) == INVARIANT else layout
        axes = [axis for axis in requested.axes if not trainable or layout.placement(axis) == REPLICATE]
        local = layout.local_shape(shape, self.sizes, dict.fromkeys(self.mesh.names, 0))
        parts = 1
        for axis in axes:
            if max(local, default=0) > 1:
                parts *= self.sizes[axis]
        return StoredAlike(
            layout=layout if trainable else forget_gradient(layout),
            elements=local_elements(shape, layout, self.mesh),
            sums=tuple(
                axis.name for axis in self.mesh.axes if axis.size > 1 and layout.placement(axis.name) == REPLICATE
            ),
            storage=restricted(requested, axes if parts > 1 else ()),
            parts=parts,
        )

    def _new(self, name: str, layout: Layout, fixed: bool = False) -> int:
        value = self.graph.values[name]
        key = (value.shape, layout)
        if key not in self.elements:
            self.elements[key] = local_elements(value.shape, layout, self.mesh)
        size = self.elements[key] * self.training.item(value)
        self.program.tensors.append(RankTensor(size, value.gradient, value.shape, _word(name), fixed=fixed))
        return len(self.program.tensors) - 1

    def _produce(self, name: str, layout: Layout, fixed: bool = False) -> int:
        value = self.graph.values[name]
        item = ITEM_SIZE.get(value.dtype, 4)
        goals = self.uses[name]
        if all(goal is layout or goal == layout for goal in goals):  # the common case, without a search
            root = LayoutForm(layout=layout)
            self.forms[name] = {layout if value.gradient else forget_gradient(layout): root}
        else:
            root, self.forms[name] = forms_of(layout, goals, value.shape, item, self.prices, value.gradient)
        self.alive.append(root)
        number = self.numbers[id(root)] = self._new(name, layout, fixed)
        return number

    def _use(self, name: str, layout: Layout, op: Op | None) -> int:
        value = self.graph.values[name]
        return self._form(name, self.forms[name][layout if value.gradient else forget_gradient(layout)], op)

    def _form(self, name: str, form: LayoutForm, op: Op | None) -> int:
        """The tensor of a form, reshards placed before it."""
        known = self.numbers.get(id(form))
        if known is not None:
            return known
        assert form.parent is not None and form.step is not None
        source = self._form(name, form.parent, op)
        step, tensors = form.step, self.program.tensors
        constant = name in self.analysis.constants
        produced = self._new(name, form.layout, fixed=constant)
        self.numbers[id(form)] = produced
        self.alive.append(form)
        before, after = tensors[source].bytes, tensors[produced].bytes
        axis_size = self.sizes[step.axes[0]]
        sharding = step.sharding
        simple = sharding is None or sharding.simple(axis_size)
        sizes = (max(before, after), min(before, after))
        memory = reshard_memory(step.kind, *sizes, simple, step.dim == 0, self.copies)
        gradient = tensors[produced].gradient
        self.program.steps.append(
            RankStep(
                name=f"{op.name if op else name} < {step.kind}",
                kind=step.kind,
                inputs=[source],
                outputs=[produced],
                back=[memory.back if gradient else GradientFlow.NONE],
                saved=[],
                work=memory.forward,
                backward_work=memory.backward,
                shares=memory.shares,
                region=self._region(op) if op else None,
                gradient=gradient,
                scope=layer_of(op.module_path) if op else "",
            )
        )
        return produced

    def _region(self, op: Op) -> str | None:
        if op.region is not None:
            return op.region
        path = op.module_path
        if path not in self.regions:
            self.regions[path] = next((prefix for prefix in prefixes(path) if prefix in self.recompute), None)
        return self.regions[path]

    def _place(self, op: Op) -> None:
        inputs, outputs = self.placed[op.name]
        numbers = [self._use(name, layout, op) for name, layout in zip(op.inputs, inputs, strict=True)]
        shared = op.name in self.strides.views
        if op.name in self.constant:
            for name, layout in zip(op.outputs, outputs, strict=True):
                self._produce(name, layout, fixed=True)
                if not shared and any(user.name not in self.constant for user, _ in self.graph.users[name]):
                    self.program.constants += self.graph.values[name].bytes
            return
        saved, memory, gradient = self._look_at(op)
        produced = [self._produce(name, layout) for name, layout in zip(op.outputs, outputs, strict=True)]
        pairs = (*zip(numbers, saved.inputs, strict=True), *zip(produced, saved.outputs, strict=True))
        self.program.steps.append(
            RankStep(
                name=op.name,
                kind=op_kind(op.target),
                inputs=numbers,
                outputs=produced,
                back=list(memory.back),
                saved=list(dict.fromkeys(number for number, is_saved in pairs if is_saved)),
                extra=saved.extra,
                work=memory.forward,
                backward_work=memory.backward,
                shares=shared,
                region=self._region(op),
                gradient=gradient,
                scope=layer_of(op.module_path),
            )
        )

    def _look_at(self, op: Op) -> tuple[SavedForBackward, Flow, bool]:
        """What is kept of an op, what its work is, and whether it has a backward."""
        values, choice, signature = self.graph.values, self._choice(op), self.analysis.signatures[op.name]
        flat = [self.strides.flat(name, values[name].shape) for name in op.inputs]
        key = (signature.kind, tuple(flat), tuple(choice.items()))
        if key not in self.known:
            call = local_call(signature, choice, self.mesh, self.training)
            self.known[key] = saved_for_backward(call, signature, flat), flow(call, signature), call.gradient
        return self.known[key]


_SUFFIX = re.compile(r"(_\d+)+$")


@lru_cache(maxsize=2**16)
def _word(name: str) -> str:
    return _SUFFIX.sub("", name)

"""The program of one rank as memory sees it: steps that read, make, save and release tensors.

`read_program` reads what lowering made: the layouts that values have, the reshards that stand between them, what is
fused, done in place or computed once. What each op saves for backward and allocates meanwhile, its definition says.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any, NamedTuple

from ..cost.call import local_call, local_elements
from ..cost.saved_for_backward import saved_for_backward
from ..cost.strides import strides_of
from ..cost.training import ON_CPU, BackendTraits, TrainingSetup
from ..ir import Op
from ..ir.graph import ITEM_SIZE
from ..ir.paths import word_of
from ..layout import REPLICATE, Layout
from ..lower import LoweredProgram, reshard_kind
from ..lower.program import graph_value
from ..lower.tidy import SHARES
from ..ops import spec_of
from ..ops.chunked_losses import CHUNKED
from ..ops.contexts import SavedForBackward
from ..ops.views import follows_view
from ..storage import Replicated, Storage
from .flow import Flow, GradientFlow, ReshardMemory, flow, reshard_memory
from .methods import method_scopes

FRESH, NONE = GradientFlow.FRESH, GradientFlow.NONE


@dataclass(slots=True)
class RankTensor:
    """A tensor of this rank."""

    bytes: float
    gradient: bool
    shape: tuple[int, ...] = ()
    word: str = ""  # what generated code calls it; nothing for a view that has no name
    parameter: str | None = None
    fixed: bool = False  # lives for ever: a parameter, an input, a constant
    beside: float = 0.0  # bytes of its storage that it does not use


@dataclass(slots=True, eq=False)
class RankStep:
    """One call: the numbers of the tensors that it reads and makes, and what it does to memory."""

    name: str
    inputs: list[int]
    outputs: list[int]
    back: Sequence[GradientFlow]
    saved: list[int] = field(default_factory=list)
    extra: float = 0.0
    work: float = 0.0
    backward_work: float = 0.0
    shares: bool = False
    region: str | None = None
    gradient: bool = True
    strided: bool = True  # whether its backward reads expanded gradients as they are
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


class OpMemory(NamedTuple):
    """What ops of one kind do to memory."""

    saved: SavedForBackward
    flow: Flow
    gradient: bool  # whether there is a backward


@dataclass(slots=True)
class RankProgram:
    steps: list[RankStep] = field(default_factory=list)
    tensors: list[RankTensor] = field(default_factory=list)
    parameters: list[ParameterMemory] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    constants: float = 0.0  # bytes
    inputs: float = 0.0  # bytes of the batch and of buffers
    received: float = 0.0  # bytes of what comes from other stages


def read_program(program: LoweredProgram, training: TrainingSetup, traits: BackendTraits = ON_CPU) -> RankProgram:
    """The steps of the first rank, one for each op."""
    return ProgramReader(program, training, traits).run()


class ProgramReader:
    """Reads a lowered program, op by op."""

    def __init__(self, program: LoweredProgram, training: TrainingSetup, traits: BackendTraits) -> None:
        self.program, self.training, self.copies = program, training, traits.copies
        self.analysis, self.mesh, self.sizes = program.analysis, program.mesh, program.mesh.sizes
        self.values, self.layouts, self.choices = program.values, program.layouts, program.choices or {}
        self.strides = strides_of(program.graph)
        self.numbers: dict[str, int] = {}  # of tensors, by value
        self.elements: dict[tuple[tuple[int, ...], Layout], float] = {}
        self.known: dict[object, OpMemory] = {}  # ops that are alike are looked at once
        self.reads = Counter(name for op in program.body for name in op.inputs)
        self.scopes = method_scopes(program)
        self.result = RankProgram()

    def run(self) -> RankProgram:
        program, result = self.program, self.result
        for name in (*(item.value for item in program.graph.inputs), *(item.value for item in program.graph.buffers)):
            size = self._elements(name) * ITEM_SIZE.get(self.values[name].dtype, 4)
            if name in program.received:
                result.received += self.training.item(self.values[name]) * self._elements(name)
            else:
                result.inputs += size
            self._new(name, fixed=True)
        self._read_constants()
        self._read_parameters()
        before: Op | None = None
        for op in program.body:
            if before is not None and self._is_chained(before, op):
                result.tensors[self.numbers[op.inputs[0]]].word = ""
            result.steps.append(self._step(op))
            before = op
        leaving = (*(name for name in program.outputs if name is not None), *(name for _, name in program.updates))
        result.outputs += [self.numbers[name] for name in leaving]
        return result

    def _is_chained(self, view: Op, op: Op) -> bool:
        """Whether a view has no name in generated code: only the view after it reads it, in the same line."""
        if op.inputs != view.outputs or not follows_view(view, op):
            return False
        alone = self.reads[op.inputs[0]] == 1 and op.inputs[0] not in self.program.needed()
        return alone and (view.region, view.autocast, view.no_grad) == (op.region, op.autocast, op.no_grad)

    def _elements(self, name: str) -> float:
        key = self.values[name].shape, self.layouts[name]
        if key not in self.elements:
            self.elements[key] = local_elements(*key, self.mesh)
        return self.elements[key]

    def _new(self, name: str, fixed: bool = False, parameter: str | None = None) -> int:
        value = self.values[name]
        size = self._elements(name) * self.training.item(value)
        word = word_of(graph_value(name))
        self.result.tensors.append(RankTensor(size, value.gradient, value.shape, word, parameter, fixed))
        self.numbers[name] = number = len(self.result.tensors) - 1
        return number

    def _read_constants(self) -> None:
        """What is computed when the program is loaded, or before the first microbatch; views keep all they look at."""
        program, base = self.program, dict[str, str]()
        for op in program.constants:
            view = op.name in self.strides.views or (op.target in SHARES and self._reshard_memory(op).shares)
            for name in op.outputs:
                self._new(name, fixed=True)
                base[name] = base.get(op.inputs[0], op.inputs[0]) if view else name
        read = {name for op in program.body for name in op.inputs} | program.needed()
        storages = {base[name] for name in base if name in read} & base.keys()  # buffers are counted elsewhere
        for early in program.early:
            self._new(early.value, fixed=True)
            storages.add(early.value)
        self.result.constants = sum(self.result.tensors[self.numbers[name]].bytes for name in storages)

    def _read_parameters(self) -> None:
        body = self.program.body
        first = {name: at for at, op in reversed(list(enumerate(body))) for name in op.inputs}
        for parameter in sorted(self.program.parameters, key=lambda parameter: first.get(parameter.value, len(body))):
            value, layout = self.values[parameter.value], parameter.layout
            number = self._new(parameter.value, fixed=True, parameter=parameter.name)
            local = layout.local_shape(value.shape, self.sizes, dict.fromkeys(self.sizes, 0))
            elements = math.prod(local)
            parts = parameter.storage.parts(self.sizes) if max(local, default=0) > 1 else 1
            self.result.parameters.append(
                ParameterMemory(
                    key=parameter.name,
                    value=number,
                    bytes=elements * ITEM_SIZE.get(value.dtype, 4),
                    gathered=elements * self.training.item(value),
                    trainable=parameter.trainable,
                    sums=tuple(
                        axis for axis, size in self.sizes.items() if size > 1 and layout.placement(axis) == REPLICATE
                    ),
                    state=elements * self.training.state_item(value),
                    wider=self.training.true_item(value) / ITEM_SIZE.get(value.dtype, 4),
                    storage=parameter.storage if parts > 1 else Replicated(),
                    parts=parts,
                )
            )

    def _step(self, op: Op) -> RankStep:
        inputs = [self.numbers[name] for name in op.inputs]
        outputs = [self._new(name) for name in op.outputs]
        if op.target.startswith("comm."):
            return self._reshard(op, inputs, outputs)
        if reshard_kind(op) is not None:
            return self._linears(op, inputs, outputs)
        if op.target == CHUNKED:
            return self._chunked_loss(op, inputs, outputs)
        if op.name not in self.analysis.signatures:  # lowering made it: a count of labels, a division by a count
            fresh = [FRESH if self.values[name].gradient else NONE for name in op.inputs]
            return self._run(op, inputs, outputs, fresh, gradient=FRESH in fresh)
        memory = self._look_at(op)
        if spec_of(op.target).keeps_storage and not self.values[op.outputs[0]].shape:
            self.result.tensors[outputs[0]].beside = self.result.tensors[inputs[0]].bytes
        saved = [*compress(inputs, memory.saved.inputs), *compress(outputs, memory.saved.outputs)]
        back = memory.flow.back
        if len(op.inputs) > len(back):  # a folded bias, or a count
            back = (*back, *(FRESH if self.values[name].gradient else NONE for name in op.inputs[len(back) :]))
        return RankStep(
            name=op.name,
            inputs=inputs,
            outputs=outputs,
            back=back,
            saved=saved if len(saved) < 2 else list(dict.fromkeys(saved)),
            extra=memory.saved.extra,
            work=memory.flow.forward,
            backward_work=memory.flow.backward,
            shares=op.name in self.strides.views,
            region=op.region,
            gradient=memory.gradient,
            strided=spec_of(op.target).strided,
            scope=self.scopes[op.name],
        )

    def _run(self, op: Op, inputs: list[int], outputs: list[int], back: list[GradientFlow], **memory: Any) -> RankStep:
        return RankStep(op.name, inputs, outputs, back, region=op.region, scope=self.scopes[op.name], **memory)

    def _look_at(self, op: Op) -> OpMemory:
        """What is saved of an op, what its work is, and whether it has a backward."""
        signature = self.analysis.signatures[op.name]
        choice, own = self.choices.get(op.name, {}), signature.op
        flat = self.strides.flat_inputs(own, self.values)
        key = (signature.kind, op.target, flat, tuple(choice.items()))
        if key not in self.known:
            call = local_call(signature, choice, self.mesh, self.training)
            if spec_of(op.target).saved is not None and len(op.inputs) == len(own.inputs):
                call = replace(call, op=replace(own, target=op.target))  # a mean may have become a sum
            saved = saved_for_backward(call, signature, flat)
            if len(op.outputs) != len(own.outputs):  # those of its results that the rank has
                left = zip(own.outputs, saved.outputs, strict=True)
                saved = replace(saved, outputs=tuple(is_saved for name, is_saved in left if name in op.outputs))
            self.known[key] = OpMemory(saved, flow(call, signature, flat), call.gradient)
        return self.known[key]

    def _reshard_memory(self, op: Op) -> ReshardMemory:
        sizes = [self._elements(name) * self.training.item(self.values[name]) for name in (op.inputs[0], op.outputs[0])]
        sharding = op.argument("sharding")
        simple = sharding is None or sharding.simple(math.prod(self.sizes[axis] for axis in op.argument("axes")))
        kind = op.target.removeprefix("comm.")
        return reshard_memory(kind, max(sizes), min(sizes), simple, op.argument("dim") == 0, self.copies)

    def _reshard(self, op: Op, inputs: list[int], outputs: list[int]) -> RankStep:
        memory, gradient = self._reshard_memory(op), self.values[op.outputs[0]].gradient
        return RankStep(
            name=op.name.rpartition(" ")[0],
            inputs=inputs,
            outputs=outputs,
            back=[memory.back if gradient else NONE],
            work=memory.forward,
            backward_work=memory.backward,
            shares=memory.shares or bool(op.argument("in_place")),
            region=op.region,
            gradient=gradient,
            scope=self.scopes[op.name],
        )

    def _linears(self, op: Op, inputs: list[int], outputs: list[int]) -> RankStep:
        """Linears joined with the reshard before them: what is gathered for them is gathered again in backward."""
        weights = inputs[1:]
        back = [FRESH if self.values[name].gradient else NONE for name in op.inputs]
        if reshard_kind(op) == "replicate":
            return self._run(op, inputs, outputs, back, saved=inputs)
        axes, sharding, tensors = op.argument("axes"), op.argument("sharding"), self.result.tensors
        parts = math.prod(self.sizes[axis] for axis in axes)
        shard = tensors[inputs[0]].bytes
        full = shard * sharding.elements / sharding.local(parts, 0)
        simple = sharding.simple(parts)
        gather = reshard_memory("all_gather_to_r", full, shard, simple, op.argument("dim") == 0, self.copies)
        of_weights = sum(tensors[n].bytes for n, how in zip(weights, back[1:], strict=True) if how is FRESH)
        again = max(full + gather.backward - of_weights, full)
        return self._run(op, inputs, outputs, back, saved=weights, extra=full, work=gather.forward, backward_work=again)

    def _chunked_loss(self, op: Op, inputs: list[int], outputs: list[int]) -> RankStep:
        """A linear and its loss: of the logits there is one chunk at a time, in the dtypes of the linear and the loss.

        Backward makes the chunk again, its gradient in place of it (and cast, for the linear).
        """
        x, weight = (self.values[name] for name in op.inputs[:2])
        tensors = self.result.tensors
        logits = self.values[self.program.graph.by_name[op.name].inputs[0]]
        rows = self._elements(op.inputs[2])
        chunk = math.ceil(rows / op.argument("chunks")) * self._elements(op.inputs[1]) / weight.shape[1]
        raw, item = self.training.item(x), self.training.item(logits)
        wide = max(item, 4)
        steps = [name for name, *_ in op.argument("steps") or ()]
        copies = raw if wide != raw or set(steps) - {"to"} else 0  # else the chunk itself is worked on
        per_row = rows * wide
        sliced = tensors[inputs[0]].bytes if op.argument("slices") else 0.0  # rows that don't lie in one run are copied
        narrow = self._elements(op.inputs[1]) * 6 if self.training.item(weight) < 4 else 0.0  # summed in float32
        back = [FRESH if self.values[name].gradient else NONE for name in op.inputs]
        return self._run(
            op, inputs, outputs, back,
            saved=inputs[:3] if not sliced else inputs[1:3],
            extra=per_row + sliced,
            work=chunk * (wide + copies) + 5 * per_row,
            backward_work=chunk * (wide + (copies + raw if copies else 0)) + 5 * per_row + narrow,
        )  # fmt: skip

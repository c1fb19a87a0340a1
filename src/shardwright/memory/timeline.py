"""The memory of a rank over one training step: a timeline of what is allocated, and its highest point.

    forward    values live as long as their names (`lifetimes.py`), what is saved for backward lives on
    backward   gradients are transient, saved tensors are released, gradients of parameters appear
    update     what the optimizer and ZeRO need beside parameters, gradients and states

The timeline is run on the steps of a lowered program (`rank_program.py`) with reference counts, as torch
would: a storage goes when nothing uses it any more, be that a name, autograd or a gradient on its way.
Activation checkpointing: of a recomputed region only its inputs are saved, and backward runs
its forward again. The step is one after the first: states exist, gradients were set to None.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..cost.training import ON_CPU, BackendTraits, TrainingSetup
from ..lower import LoweredProgram
from .flow import GradientFlow
from .heap import ACTIVATION, BUFFER, GRADIENT, Heap, MemorySample
from .lifetimes import deaths
from .rank_program import ParameterMemory, RankProgram, RankStep, read_program
from .updates import GradientBuckets, Zero3Units


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPeak:
    """Bytes on a rank at the worst moment of a step, by what they are for, and when that is.

    buffers     communication and work inside of ops
    inputs      the batch as it is passed, buffers of the model, and constants
    at          the op and the phase of the peak
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    inputs: float
    at: tuple[str, str]
    forward: float  # the peak of each phase
    backward: float
    update: float

    @property
    def peak(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers + self.inputs


def simulate_memory(lowered: LoweredProgram, training: TrainingSetup, traits: BackendTraits = ON_CPU) -> MemoryPeak:
    """The peak of a rank that runs a program. `traits`: what the device's libraries do with memory."""
    return _peak(_simulated(lowered, training, traits, Heap()))


@dataclass(frozen=True, kw_only=True)
class MemoryOverStep:
    """The memory of a rank over a step: what lives for ever is in the peak, and `samples` are on top of it."""

    peak: MemoryPeak
    samples: tuple[MemorySample, ...]


def memory_over_step(
    lowered: LoweredProgram, training: TrainingSetup, traits: BackendTraits = ON_CPU
) -> MemoryOverStep:
    """`simulate_memory` with the worst moment of every op."""
    line = _simulated(lowered, training, traits, Heap(records=True))
    return MemoryOverStep(peak=_peak(line), samples=tuple(line.heap.samples))


def _simulated(
    lowered: LoweredProgram, training: TrainingSetup, traits: BackendTraits, heap: Heap
) -> MemoryTimeline:
    line = MemoryTimeline(read_program(lowered, training, traits), training, traits, heap)
    line.forward()
    line.backward()
    line.update()
    return line


def _peak(line: MemoryTimeline) -> MemoryPeak:
    heap, program = line.heap, line.program
    return MemoryPeak(
        parameters=sum(parameter.stored for parameter in program.parameters),
        gradients=heap.at_peak[GRADIENT],
        optimizer=sum(parameter.states for parameter in program.parameters),
        activations=heap.at_peak[ACTIVATION],
        buffers=heap.at_peak[BUFFER],
        inputs=program.inputs + program.constants,
        at=heap.where,
        forward=line.base + heap.peaks["forward"],
        backward=line.base + heap.peaks["backward"],
        update=line.base + heap.peaks["update"],
    )


class MemoryTimeline:
    """One step of training, allocation by allocation. What lives for ever is `base`, and not on the heap."""

    def __init__(
        self, program: RankProgram, training: TrainingSetup, traits: BackendTraits, heap: Heap | None = None
    ) -> None:
        self.program, self.training, self.traits, self.heap = program, training, traits, heap or Heap()
        self.steps, self.tensors = program.steps, program.tensors
        parameters = program.parameters
        states = sum(item.states for item in parameters)
        self.base = sum(item.stored for item in parameters) + states + program.inputs + program.constants
        self.store: list[int] = [self.heap.fixed if item.fixed else -1 for item in self.tensors]
        self.dead = deaths(program)
        self.saved: dict[int, list[int]] = {}  # by step: the storages that backward needs
        self.gradients: dict[int, int] = {}  # by tensor
        self.of_parameter = {item.value: item for item in parameters}
        self.expected = self._count_uses()
        self.regions: dict[str, list[int]] = {}
        for at, step in enumerate(self.steps):
            if step.region is not None:
                self.regions.setdefault(step.region, []).append(at)
        self.region_inputs: dict[str, list[int]] = {}
        computed = {number for step in self.steps for number in step.outputs}
        self.losses = [
            number
            for number in dict.fromkeys(program.outputs)
            if self.tensors[number].gradient and not self.tensors[number].shape and number in computed
        ]
        self.buckets = GradientBuckets(parameters, self.heap, training, traits)
        self.units = Zero3Units(parameters, self.steps, self.heap, traits)

    def _count_uses(self) -> dict[int, int]:
        """For each parameter how many gradients it gets."""
        uses: dict[int, int] = {}
        for step in self.steps:
            for number, how in zip(step.inputs, step.back, strict=True):
                if step.gradient and how is not GradientFlow.NONE and number in self.of_parameter:
                    uses[number] = uses.get(number, 0) + 1
        return uses

    def forward(self) -> None:
        self.heap.phase = "forward"
        for at, step in enumerate(self.steps):
            if step.region is not None and self.regions[step.region][0] == at:
                self._enter(step.region)
            self.units.before(at)
            self._run(at, step, keeps=step.region is None)
            for number in self.dead[at]:
                self.heap.drop(self.store[number])
            self.units.after(at)
        for number in dict.fromkeys(self.program.outputs):  # the user holds the loss, and releases the rest
            if not self.tensors[number].fixed and self.store[number] >= 0 and number not in self.losses:
                self.heap.drop(self.store[number])

    def _enter(self, region: str) -> None:
        """What goes into a region is kept until its backward is through."""
        inside = {number for at in self.regions[region] for number in self.steps[at].outputs}
        reads = [number for at in self.regions[region] for number in self.steps[at].inputs if number not in inside]
        self.region_inputs[region] = [self.store[number] for number in dict.fromkeys(reads)]
        for storage in self.region_inputs[region]:
            self.heap.hold(storage)

    def _run(self, at: int, step: RankStep, keeps: bool) -> None:
        """Run a step: make its results, and keep what its backward needs."""
        heap, store = self.heap, self.store
        heap.step = step.name
        for number in step.outputs:
            if self.tensors[number].fixed:
                continue
            if step.shares:
                store[number] = heap.hold(store[step.inputs[0]])
            else:
                store[number] = heap.new(self.tensors[number].bytes + self.tensors[number].beside, ACTIVATION)
        keeps = keeps and step.gradient
        saved = [heap.hold(store[number]) for number in step.saved] if keeps else []
        if keeps and step.extra:
            saved.append(heap.new(step.extra, ACTIVATION))
        heap.touch(step.work if keeps else step.work + step.extra)
        if keeps:
            self.saved[at] = saved

    def _again(self, region: str) -> None:
        """The forward of a region, recomputed in backward, this time saving its tensors."""
        steps = self.regions[region]
        inside = {number for at in steps for number in self.steps[at].outputs}
        gone: set[int] = set()
        for at in steps:
            self.units.again(at)
            self._run(at, self.steps[at], keeps=True)
            for number in self.dead[at]:
                if number in inside:
                    self.heap.drop(self.store[number])
                    gone.add(number)
        for number in inside - gone:
            self.heap.drop(self.store[number])

    def backward(self) -> None:
        heap = self.heap
        heap.phase = "backward"
        outputs = [n for n in dict.fromkeys(self.program.outputs) if self.tensors[n].gradient]
        for number in self.losses or outputs:
            self.gradients[number] = heap.new(self.tensors[number].bytes, ACTIVATION)
        for at in range(len(self.steps) - 1, -1, -1):
            step = self.steps[at]
            heap.step = step.name
            if step.region is not None and self.regions[step.region][-1] == at:
                self._again(step.region)
            if step.gradient:
                self._back(at, step)
            if step.region is not None and self.regions[step.region][0] == at:
                for storage in self.region_inputs.pop(step.region):
                    heap.drop(storage)
        for number in self.losses:
            heap.drop(self.store[number])
        self.buckets.end()
        self.units.end()

    def _back(self, at: int, step: RankStep) -> None:
        heap = self.heap
        arrived = [self.gradients.pop(number) for number in step.outputs if number in self.gradients]
        produced: list[tuple[int, int]] = []
        if arrived:
            self.units.again(at)
            for number, how in zip(step.inputs, step.back, strict=True):
                if how is GradientFlow.PASS:
                    produced.append((number, heap.hold(arrived[0])))
                elif how is not GradientFlow.NONE:
                    size = self.tensors[number].bytes if how is GradientFlow.FRESH else 0.0
                    produced.append((number, heap.new(size, GRADIENT if number in self.of_parameter else ACTIVATION)))
            dense = 0.0 if step.strided or heap.size[arrived[0]] else self.tensors[step.outputs[0]].bytes
            heap.touch(step.backward_work + dense)  # a gradient that a sum has expanded is copied first
        for storage in (*self.saved.pop(at, ()), *arrived):
            heap.drop(storage)
        for number, storage in produced:
            self._deliver(number, storage)
        for number, how in zip(step.inputs, step.back, strict=True):
            if how is not GradientFlow.NONE and number in self.expected:
                self.expected[number] -= 1
                if not self.expected[number]:
                    self._complete(self.of_parameter[number])

    def _deliver(self, number: int, storage: int) -> None:
        """Add a gradient to what is there already: in place, unless something else looks at that."""
        old = self.gradients.get(number)
        if old is None:
            self.gradients[number] = storage
            return
        if self.heap.refs[old] > 1 or self.heap.size[old] < self.tensors[number].bytes:  # shared, or expanded
            fresh = self.heap.new(self.tensors[number].bytes, self.heap.kind[old])
            self.heap.drop(old)
            self.gradients[number] = fresh
        self.heap.drop(storage)

    def _complete(self, parameter: ParameterMemory) -> None:
        """A parameter has its whole gradient of this backward."""
        storage = self.gradients.pop(parameter.value, None)
        if parameter.storage.shards_parameter:
            self.units.arrived(parameter, storage)
        elif parameter.sums:
            self.buckets.arrived(parameter)
            if storage is not None:
                self.heap.drop(storage)
        elif storage is not None and (parameter.wider > 1 or self.heap.refs[storage] > 1):  # .grad is a copy
            self.heap.new(parameter.bytes * parameter.wider, GRADIENT)
            self.heap.drop(storage)
        elif storage is not None:  # .grad is what backward made
            self.heap.relabel(storage, GRADIENT)

    def update(self) -> None:
        """The optimizer's own tensors, and the parameters whose updated shards are gathered."""
        heap = self.heap
        heap.phase, heap.step = "update", "optimizer.step"
        shares = [parameter.updated * parameter.wider for parameter in self.program.parameters if parameter.trainable]
        if self.training.states() and not self.traits.fuses(self.training.optimizer):
            heap.touch(sum(shares) if self.traits.foreach else 2 * max(shares, default=0.0))
        else:
            heap.touch(0.0)
        split = [parameter for parameter in self.program.parameters if parameter.storage.updates_shard]
        copies = 2.0 if self.traits.copies else 1.0
        heap.touch(sum(copies * parameter.bytes + parameter.share for parameter in split))

"""The executor of all schedules: runs a rank's script.

    F   sets the microbatch, waits for activations, runs the stage's program, sends its results
    B   waits for the gradients of what it sent, runs backward, sends gradients back
    W   the weight-gradient matmuls that a B deferred
    P   counts that all microbatches need, once

Between an F and its B a stage keeps the leaves it received and the gradient edges, not its outputs:
autograd saves what it needs of them itself. Tensors are sent without a copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from shardwright.errors import LayoutError
from shardwright.layout import Reduction
from shardwright.schedule import Step, StepKind

from ..collectives import comm
from ..faults import flight_recorder
from ..model.program import Program
from ..parameters.sharded import Untouched
from .routes import Route
from .script import ReceivedMessage, Script, ScriptStep
from .spec import PipelineOutput, PipelineSpec, PlacedStage
from .transport import Arrival, Transport

ROOM = 2  # microbatches that a rank may run ahead of the ranks it sends to, where nothing else limits it

Seed = Callable[[PipelineOutput, int], Tensor | None]
"""The gradient of an output of the model in a microbatch, or None if none enters there."""


class AssembledTensor:
    """A tensor assembled from messages."""

    def __init__(self, out: Tensor) -> None:
        self.out = out
        self.coming: list[tuple[Arrival, Route, Tensor | None]] = []

    def ask(self, leg: Route, transport: Transport) -> None:
        """Start to receive a part of it."""
        into = leg.straight(self.out)
        buffer = self.out.new_empty(leg.elements) if into is None else into
        self.coming.append((transport.receive(buffer, leg.source), leg, buffer if into is None else None))

    def wait(self) -> Tensor:
        """The tensor, once all parts have arrived."""
        for arrival, leg, aside in self.coming:
            arrival.wait()
            if aside is not None:
                leg.unpack(aside, self.out)
        self.coming.clear()
        return self.out


class InFlightMicrobatch(NamedTuple):
    """What a stage saves of a microbatch from F to B."""

    edges: tuple[tuple[str, GradientEdge], ...]  # where the gradients of values enter
    leaves: dict[str, Tensor]  # received tensors that get a gradient


class ScheduleRun:
    """The state of one call: what is in flight, and the results."""

    def __init__(self, inputs: Sequence[Tensor], seeded: frozenset[int] = frozenset()) -> None:
        self.inputs = inputs
        self.seeded = seeded  # the outputs of the model that may get a gradient
        self.grad = bool(seeded)
        self.parcels: dict[tuple[StepKind, int, int], AssembledTensor] = {}
        self.flights: dict[tuple[int, int], InFlightMicrobatch] = {}
        self.outputs: dict[tuple[str, int], Tensor] = {}  # (value, microbatch) of outputs
        self.input_leaves: dict[tuple[int, int], Tensor] = {}  # (stage, input), of inputs that require a gradient
        self.updates: dict[str, Tensor] = {}
        self.seed: Seed = lambda leaving, microbatch: None
        self.keep = False  # backward may run again

    def input(self, stage: int, number: int) -> Tensor:
        """An input of the model as a stage sees it."""
        tensor = self.inputs[number]
        if not (self.grad and tensor.requires_grad):
            return tensor.detach()
        if (stage, number) not in self.input_leaves:
            self.input_leaves[stage, number] = tensor.detach().requires_grad_()
        return self.input_leaves[stage, number]


class PipelineExecutor:
    """Runs scripts of one pipeline on one rank."""

    def __init__(self, pipeline: PipelineSpec, rank: int, transport: Transport, device: torch.device) -> None:
        self.pipeline, self.rank, self.transport, self.device = pipeline, rank, transport, device
        self._does: dict[StepKind, Callable[[ScriptStep, ScheduleRun], None]] = {
            "P": self._prologue, "F": self._forward, "B": self._backward, "W": self._weights,
        }  # fmt: skip
        self._leaving: dict[str, list[PipelineOutput]] = {}
        for out in pipeline.leaving:
            self._leaving.setdefault(out.value, []).append(out)
        self._wanted = self._values_with_gradient()
        self._shapes = self._local_shapes()

    def _values_with_gradient(self) -> frozenset[str]:
        crossing = {crossing.value for crossing in self.pipeline.crossings if crossing.gradient}
        return frozenset(crossing | {out.value for out in self.pipeline.leaving if out.gradient})

    def _local_shapes(self) -> dict[tuple[StepKind, int], tuple[int, ...]]:
        """Of every value that crosses to this rank, and every gradient that comes back to it."""
        shapes: dict[tuple[StepKind, int], tuple[int, ...]] = {}
        for number, crossing in enumerate(self.pipeline.crossings):
            sides: tuple[tuple[StepKind, int, Any], ...] = (
                ("F", crossing.receiver, crossing.target_layout),
                ("B", crossing.sender, crossing.source_layout),
            )
            for kind, stage, layout in sides:
                mesh = self.pipeline.placed[stage].mesh
                if self.rank in mesh.devices:
                    shape = layout.local_shape(crossing.shape, mesh.sizes, mesh.coordinates(self.rank))
                    shapes[kind, number] = shape
        return shapes

    def run(self, script: Script, run: ScheduleRun) -> None:
        """Run a script."""
        for placed in self.pipeline.placed:
            if placed.stage is not None:
                placed.stage.weights.collects = placed.number in script.apart
                placed.stage.weights.clear()
        sent: deque[tuple[int, Arrival]] = deque()
        with Untouched():
            for turn in script.turns:
                flight_recorder.record_step(turn.step)
                for message in turn.asks:
                    self._ask(message, run)
                self._does[turn.step.kind](turn, run)
                while sent and sent[0][0] <= turn.step.microbatch - ROOM:
                    sent.popleft()[1].wait()
                if turn.sends and script.orderly:
                    sent.append((turn.step.microbatch, self.transport.mark()))
        self.transport.flush()
        flight_recorder.record_step(None)

    # -- steps ---------------------------------------------------------------------------

    def _at(self, step: Step) -> tuple[PlacedStage, Program]:
        """The stage of a step, with the clock set to its microbatch."""
        placed = self.pipeline.placed[step.stage]
        if placed.stage is None:
            raise LayoutError(f"rank {self.rank} should run {step} but has no program of stage {step.stage}")
        self.pipeline.moment.move(step.microbatch)
        placed.stage.random.microbatch = step.microbatch
        return placed, placed.stage

    @torch.no_grad()
    def _prologue(self, turn: ScriptStep, run: ScheduleRun) -> None:
        placed, stage = self._at(turn.step)
        inputs = [run.inputs[number] for number in placed.asks]
        every: list[tuple[Tensor, ...]] = []
        for microbatch in range(self.pipeline.microbatches):
            self._at(turn.step._replace(microbatch=microbatch))
            every.append(stage.prologue(*inputs))
        totals = [
            _JOIN[count.op](torch.stack(counts))
            for count, counts in zip(stage.counts, zip(*every, strict=True), strict=True)
        ]
        for count, total in zip(stage.counts, totals, strict=True):
            if count.over is not None:
                total = comm.all_reduce(total, getattr(stage, count.over), op=count.op)
            setattr(stage.known, count.name, total)

    def _forward(self, turn: ScriptStep, run: ScheduleRun) -> None:
        step = turn.step
        placed, stage = self._at(step)
        leaves = {}
        for number in turn.takes:
            crossing = self.pipeline.crossings[number]
            leaf = self._take("F", number, step.microbatch, run)
            wants = run.grad and crossing.has_gradient(run.seeded)
            leaves[crossing.value] = leaf.requires_grad_() if wants else leaf
        args = [self._input(step, take, run) if isinstance(take, int) else leaves[take] for take in placed.takes]
        outs = self._call(stage, args, run)
        results = dict(zip(placed.gives, outs, strict=True))
        for number, legs in turn.sends:
            tensor = results[self.pipeline.crossings[number].value].detach()
            self._expect(number, step, tensor)
            self._send("F", number, step.microbatch, legs, tensor, run)
        for value in placed.gives:
            if value in self._leaving:
                run.outputs[value, step.microbatch] = results[value].detach()
        if run.grad:
            edges = [(v, get_gradient_edge(x)) for v, x in results.items() if v in self._wanted and x.requires_grad]
            trained = {value: leaf for value, leaf in leaves.items() if leaf.requires_grad}
            run.flights[placed.number, step.microbatch] = InFlightMicrobatch(tuple(edges), trained)
        self._note_updates(placed, stage, run)

    def _input(self, step: Step, number: int, run: ScheduleRun) -> Tensor:
        """An input of the model; the samples of a microbatch if each is an independent batch."""
        batch = run.input(step.stage, number)
        if not self.pipeline.rows or not self.pipeline.rows[number]:
            return batch
        size = batch.shape[0] // self.pipeline.microbatches
        return batch.narrow(0, step.microbatch * size, size)

    def _call(self, stage: Program, args: Sequence[Tensor], run: ScheduleRun) -> tuple[Tensor, ...]:
        stage.start()
        if not run.grad:
            with torch.no_grad():
                return stage.forward(*args)
        with torch.enable_grad():
            if stage.zero is None:
                return stage.forward(*args)
            with stage.zero.saving():
                return stage.forward(*args)

    @torch.no_grad()
    def _note_updates(self, placed: PlacedStage, stage: Program, run: ScheduleRun) -> None:
        """Buffers and parameters are written at the end; at once if each microbatch is an independent batch."""
        if self.pipeline.local:
            for key, value in stage.updates.items():
                self.pipeline.write(placed, key, value)
        else:
            run.updates.update(stage.updates)
        stage.updates.clear()

    def _backward(self, turn: ScriptStep, run: ScheduleRun) -> None:
        step = turn.step
        placed, stage = self._at(step)
        stage.weights.microbatch = step.microbatch
        gradients = self._entering(turn, run)
        key = placed.number, step.microbatch
        flight = run.flights[key] if run.keep else run.flights.pop(key)
        edges = [(edge, gradients[value]) for value, edge in flight.edges if value in gradients]
        if edges:
            with self._as_usual():
                torch.autograd.backward([e for e, _ in edges], [g for _, g in edges], retain_graph=run.keep)
        for number, legs in turn.sends:
            value = self.pipeline.crossings[number].value
            leaf = flight.leaves[value]
            gradient = leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)
            self._send("B", number, step.microbatch, legs, gradient, run)
        for leaf in flight.leaves.values():
            leaf.grad = None

    def _as_usual(self) -> AbstractContextManager[Any]:
        """Disable the user's autocast in backward, though both run within one call of the model."""
        kind = self.device.type
        return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()

    def _expect(self, number: int, step: Step, value: Tensor) -> None:
        """A message carries neither shape nor dtype, so a wrong one must not be sent."""
        crossing = self.pipeline.crossings[number]
        shape, dtype = self._shapes["B", number], crossing.dtype
        if value.shape != shape or value.dtype != dtype:
            raise LayoutError(
                f"{step} outputs {crossing.value} as {value.dtype} {tuple(value.shape)}; it crosses to stage "
                f"{crossing.receiver} as {dtype} {shape}"
            )

    def _entering(self, turn: ScriptStep, run: ScheduleRun) -> dict[str, Tensor]:
        """The gradients of the stage's outputs, summed over its receivers and the model's outputs."""
        gradients: dict[str, Tensor] = {}
        microbatch = turn.step.microbatch
        for number in turn.takes:
            value = self.pipeline.crossings[number].value
            gradient = self._take("B", number, microbatch, run)
            gradients[value] = gradient if value not in gradients else gradients[value] + gradient
        for value in dict.fromkeys(self.pipeline.placed[turn.step.stage].gives):
            for out in self._leaving.get(value, ()):
                seed = run.seed(out, microbatch) if out.gradient else None
                if seed is not None:
                    gradients[value] = seed if value not in gradients else gradients[value] + seed
        return gradients

    def _weights(self, turn: ScriptStep, run: ScheduleRun) -> None:
        _, stage = self._at(turn.step)
        with self._as_usual():
            stage.weights.run(turn.step.microbatch)

    # -- messages ------------------------------------------------------------------------

    def _parcel(self, kind: StepKind, number: int, microbatch: int, run: ScheduleRun) -> AssembledTensor:
        key = kind, number, microbatch
        if key not in run.parcels:
            dtype = self.pipeline.crossings[number].dtype
            out = torch.empty(self._shapes[kind, number], dtype=dtype, device=self.device)
            run.parcels[key] = AssembledTensor(out)
        return run.parcels[key]

    def _ask(self, message: ReceivedMessage, run: ScheduleRun) -> None:
        self._parcel(message.kind, message.crossing, message.microbatch, run).ask(message.leg, self.transport)

    def _take(self, kind: StepKind, number: int, microbatch: int, run: ScheduleRun) -> Tensor:
        """A received value, complete for this rank."""
        self._parcel(kind, number, microbatch, run)
        return run.parcels.pop((kind, number, microbatch)).wait()

    def _send(
        self, kind: StepKind, number: int, microbatch: int, legs: Sequence[Route], tensor: Tensor, run: ScheduleRun
    ) -> None:
        for leg in legs:
            if leg.target != self.rank:
                self.transport.send(leg.pack(tensor), leg.target)
            elif leg.same:
                run.parcels[kind, number, microbatch] = AssembledTensor(tensor)
            else:
                leg.carry(tensor, self._parcel(kind, number, microbatch, run).out)


_JOIN: dict[Reduction, Callable[[Tensor], Tensor]] = {
    "sum": lambda counts: counts.sum(0),
    "max": lambda counts: counts.amax(0),
    "min": lambda counts: counts.amin(0),
}

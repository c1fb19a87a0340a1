"""A pipeline in an unmodified loop: a call of the model is one autograd function that runs a schedule.

    backward   model(x)                                    loss.backward()
    --------   -----------------------------------------   --------------------------------------
    inside     all steps, F and B, seeded by the loss;     saved gradients times the loss's gradient
               gradients are saved
    outside    all F                                       all B, seeded by the outputs' gradients

Inside keeps no more microbatches in flight than the schedule says. It needs a loss among the outputs;
gradients of all other outputs are refused. Outside is for a loss that is computed from outputs;
every rank must then call backward with the same gradients.

The schedule is seeded with the last gradient of the loss, so that a loss scaled for float16 is
scaled within the schedule too; gradients are then multiplied by the new one over the old one, which
is mostly 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.errors import InputError, RankError

from ..collectives import process_group
from ..faults import flight_recorder
from ..faults.watch import report_failure
from ..parameters.gradient_sync import GradientSync
from ..parameters.sharded import ShardedParameter
from ..world import here
from .executor import PipelineExecutor, ScheduleRun
from .nonfinite import show_everywhere
from .outputs import OutputBroadcast, microbatch_gradient
from .script import WHOLE_STEP, Script, pairs_of, write
from .spec import PipelineOutput, PipelineSpec
from .standins import StandIns, harvest
from .ties import TiedGradients
from .transport import usual

Backward = Literal["inside", "outside"]
"""Whether backward runs within the call of the model, seeded by its loss, or when the user calls it."""


class PipelineLoop:
    """What all specializations of a model share on a rank: its transport, and the sync of its gradients.

    All ranks create it together, after the groups of all meshes.
    """

    def __init__(self, sync: GradientSync | None = None, backward: Backward = "inside") -> None:
        world = here()
        self.rank, self.device = world.rank, world.device
        self.sync, self.backward = sync, backward
        self.transport = usual()
        if sync is not None and isinstance(sync.ties, TiedGradients):
            self.transport.connect(sync.ties.pairs)
            sync.ties.connect(self.transport)
        self.anchor = torch.zeros((), device=self.device, requires_grad=True)  # a rank may have no trainable parameters
        self.scale = torch.ones((), device=self.device, dtype=torch.float64)  # the last gradient of a loss
        self.scaled = False  # whether a loss ever had a gradient other than 1: there is a loss scaler
        self.broken = False  # whether a run was interrupted
        self._task = -1  # the running backward, by autograd's number

    def begin_backward(self, parameters: Sequence[ShardedParameter], scaled: bool) -> None:
        """Backward has reached a call of the model. With a loss scaler all ranks must agree on finiteness."""
        self.scaled = scaled = self.scaled or scaled
        if self.sync is not None:
            self.sync.begin()
            scaled = scaled and self.sync.enabled
        task = torch._C._current_graph_task_id()
        if scaled and task != self._task:
            self._task = task
            end = partial(show_everywhere, list(parameters), self.device)
            torch.autograd.Variable._execution_engine.queue_callback(end)  # after that of the sync


class RunningPipeline:
    """One specialization, ready to run."""

    def __init__(self, pipeline: PipelineSpec, loop: PipelineLoop) -> None:
        self.pipeline, self.loop = pipeline, loop
        loop.transport.connect(pairs_of(pipeline))
        self.executor = PipelineExecutor(pipeline, loop.rank, loop.transport, loop.device)
        self.standins = StandIns(pipeline.placed)
        self.share = OutputBroadcast(pipeline, loop.rank, loop.device)
        self.loss = loss_of(pipeline.leaving)
        self._scripts: dict[tuple[str, frozenset[int]], Script] = {}

    def script(self, kinds: str, seeded: frozenset[int]) -> Script:
        """This rank's script for steps of these kinds, if these outputs have a gradient: none in inference."""
        key = kinds, seeded
        if key not in self._scripts:
            schedule = self.pipeline.schedule if seeded else self.pipeline.forward
            self._scripts[key] = write(self.pipeline, schedule, self.loop.rank, kinds, seeded)
        return self._scripts[key]

    def __call__(self, tensors: Sequence[Tensor], training: bool = True) -> tuple[Tensor, ...]:
        """The model's tensor outputs, replicated on every rank. `training` as in `model.training`."""
        if not (torch.is_grad_enabled() and any(out.gradient for out in self.pipeline.leaving)):
            self.standins.current()
            return tuple(self.finished(self.run(ScheduleRun(tensors), "PF", frozenset())))
        loss = self.loss if training and self.loop.backward == "inside" else None
        inside = loss is not None
        call = PipelineCall(self, tensors, range(len(self.pipeline.leaving)) if loss is None else [loss])
        function = _Inside if inside else _Outside
        with torch.no_grad():
            if inside:
                call.step()
            else:
                self.run(call.run, "PF", call.run.seeded)
            call.outputs = self.finished(call.run)
        outputs: tuple[Tensor, ...] = function.apply(call, self.loop.anchor, *call.wanting)  # type: ignore[no-untyped-call]
        call.outputs = []
        return outputs

    def run(self, run: ScheduleRun, kinds: str, seeded: frozenset[int]) -> ScheduleRun:
        """Run the steps of some kinds."""
        if self.loop.broken:
            raise RankError(
                "an earlier step of this pipeline was interrupted, with messages in flight; "
                "restart the script from a checkpoint"
            )
        self.loop.broken = True
        self.executor.run(self.script(kinds, seeded), run)
        self.loop.broken = False
        return run

    def finished(self, run: ScheduleRun) -> list[Tensor]:
        """The outputs of a run, which every rank gets."""
        outputs = self.share(run.outputs, run.updates)
        run.outputs.clear()
        return outputs


def loss_of(leaving: Sequence[PipelineOutput]) -> int | None:
    """Which output is the loss: the scalar with a gradient; of several the one called loss, or the first."""
    numbers = [at for at, out in enumerate(leaving) if out.gradient and not out.shape]
    named = [at for at in numbers if leaving[at].path == "loss"]
    return next(iter([*named, *numbers]), None)


class PipelineCall:
    """One call of the model whose gradients are wanted."""

    def __init__(self, running: RunningPipeline, tensors: Sequence[Tensor], seeded: Iterable[int]) -> None:
        self.running, self.pipeline, self.loop = running, running.pipeline, running.loop
        self.leaves = [leaf for leaf in running.standins.current() if leaf.requires_grad]
        self.inputs = [at for at, tensor in enumerate(tensors) if tensor.requires_grad]
        self.trained = running.standins.trained
        self.wanting = [*self.trained, *(tensors[at] for at in self.inputs)]
        self.run = ScheduleRun(tensors, frozenset(seeded))
        self.scale = running.loop.scale  # the seed of the schedule
        self.outputs: list[Tensor] = []
        self.gradients: list[Tensor] | None = None  # saved, in the order of `wanting`

    def step(self) -> None:
        """Run the full schedule and save its gradients. Tensors without one are dropped."""
        seeded = self.pipeline.leaving[self.running.loss]  # type: ignore[index]
        seed = self.scale.to(seeded.dtype)

        def seeds(out: PipelineOutput, microbatch: int) -> Tensor | None:
            return microbatch_gradient(out, seed, self.pipeline.microbatches, microbatch) if out is seeded else None

        self.run.seed = seeds
        gradients = self.backward(WHOLE_STEP, self.run.seeded)
        self.wanting = [
            tensor for tensor, gradient in zip(self.wanting, gradients, strict=True) if gradient is not None
        ]
        self.gradients = [gradient for gradient in gradients if gradient is not None]

    def backward(self, kinds: str, seeded: frozenset[int], keep: bool = False) -> list[Tensor | None]:
        """Run steps; returns the gradients of all tensors that require one."""
        harvest(self.leaves)
        harvest(list(self.run.input_leaves.values()))
        self.run.keep = keep
        self.running.run(self.run, kinds, seeded)
        return [*harvest(self.leaves), *(self._input(at) for at in self.inputs)]

    @report_failure
    def _input(self, number: int) -> Tensor:
        """The gradient of an input: the sum over the stages that read it, replicated on every rank."""
        total = torch.zeros_like(self.run.inputs[number], requires_grad=False)
        for (stage, at), leaf in self.run.input_leaves.items():
            first = self.pipeline.placed[stage].mesh.devices[0] == self.loop.rank
            if at == number and first and leaf.grad is not None:
                total += leaf.grad
        if dist.is_initialized() and dist.get_world_size() > 1:
            flight_recorder.enter("all_reduce", None, "the gradient of an input")
            process_group.all_reduce(total, None).wait()
        return total

    def expect_no_graph(self) -> None:
        if torch.is_grad_enabled():
            raise InputError(
                "backward(create_graph=True) reached a pipeline; double backward is not supported by its "
                "schedule; leave create_graph out, or use a plan without pp"
            )


def _differentiable(ctx: Any, call: PipelineCall) -> tuple[Tensor, ...]:
    """The outputs of a call through an autograd function that gets undefined gradients as None."""
    ctx.call = call
    ctx.set_materialize_grads(False)
    leaving = zip(call.outputs, call.pipeline.leaving, strict=True)
    ctx.mark_non_differentiable(*(tensor for tensor, out in leaving if not out.gradient))
    return tuple(call.outputs)


class _Inside(torch.autograd.Function):
    """After the full schedule: backward returns the saved gradients."""

    @staticmethod
    def forward(ctx: Any, call: PipelineCall, anchor: Tensor, *wanting: Tensor) -> tuple[Tensor, ...]:
        call.run = ScheduleRun(())
        return _differentiable(ctx, call)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        call: PipelineCall = ctx.call
        call.expect_no_graph()
        for at, (out, gradient) in enumerate(zip(call.pipeline.leaving, gradients, strict=True)):
            if gradient is not None and at != call.running.loss:
                raise InputError(
                    f"backward reached output {out.path or at} of a pipeline, whose backward runs within the call "
                    "of the model, seeded by the loss that the model returns; pass "
                    'pipeline=PipelineOptions(backward="outside") to parallelize'
                )
        gradient = gradients[call.running.loss]  # type: ignore[index]
        call.loop.begin_backward(call.trained, scaled=gradient is not None and gradient.item() != 1.0)
        if gradient is None:
            return (None, None, *(None for _ in call.wanting))
        return (None, None, *_scaled(call, gradient))


def _scaled(call: PipelineCall, gradient: Tensor) -> list[Tensor]:
    """The saved gradients scaled to the loss's gradient; freed unless backward may run again."""
    if call.gradients is None:
        raise InputError("backward ran twice through one call of a pipeline; pass retain_graph=True to the first")
    keep = torch._C._autograd._get_current_graph_task_keep_graph()
    gradients, call.gradients = call.gradients, call.gradients if keep else None
    now = gradient.detach().double()
    call.loop.scale = torch.where(torch.isfinite(now) & (now != 0), now, call.scale)
    ratio = now / call.scale
    if gradients and not (ratio.is_cpu and ratio.item() == 1.0):
        gradients = [kept_gradient.clone() for kept_gradient in gradients] if keep else gradients
        torch._foreach_mul_(gradients, ratio)
    return gradients


class _Outside(torch.autograd.Function):
    """After all F: backward runs all B."""

    @staticmethod
    def forward(ctx: Any, call: PipelineCall, anchor: Tensor, *wanting: Tensor) -> tuple[Tensor, ...]:
        ctx.done = False
        return _differentiable(ctx, call)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        call: PipelineCall = ctx.call
        call.expect_no_graph()
        if ctx.done:
            raise InputError("backward ran twice through one call of a pipeline; pass retain_graph=True to the first")
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        ctx.done = not keep
        gradient_of = {id(out): gradient for out, gradient in zip(call.pipeline.leaving, gradients, strict=True)}
        seeded = frozenset(at for at, gradient in enumerate(gradients) if gradient is not None)

        def seeds(out: PipelineOutput, microbatch: int) -> Tensor | None:
            gradient = gradient_of[id(out)]
            return (
                None if gradient is None else microbatch_gradient(out, gradient, call.pipeline.microbatches, microbatch)
            )

        call.run.seed = seeds
        call.loop.begin_backward(call.trained, scaled=True)
        return (None, None, *call.backward("BW", seeded, keep))

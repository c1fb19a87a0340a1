"""From a call to a program that runs: capture, plan, lower, emit, load, for one entry at a time.

`Compiler` is the function that a `ParallelModel` asks for the program of a call. The first
call decides how parameters are held; later entries (eval, another batch size) are solved
with that fixed. Generated files lie in a directory by content, so nothing stale is reused.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from ..capture import (
    AUTO,
    CapturedGraph,
    NoValues,
    OpaqueBody,
    OpaqueCall,
    OpaqueModule,
    Real,
    called_with_gradients,
    capture,
    cast,
    casting,
    copy_module,
    input_paths,
    register_containers,
    without_collection,
)  # fmt: skip
from ..cost import training_flops
from ..errors import InputError, PlanError, ShardwrightError
from ..ir import Graph
from ..layout import Layout, Mesh
from ..lower import LoweredProgram
from ..plan import Plan
from ..plan.file import read as read_plan
from ..plan.lowering import PipelinePrograms, lower, lower_pipeline
from ..planning import Batching, PlanLike, PlanningTask, continue_plan, make_plan, only_scalars
from ..precision import Precision
from ..probe import check_splits, probing
from ..rules import Analysis, analyse
from ..runtime.algorithms.random import Randomness
from ..runtime.model.float_inputs import NotAnInput
from ..runtime.model.inputs import CallInputs, Mode
from ..runtime.model.parallel_model import ParallelModel, Specialization
from ..runtime.model.program import Program, program_class
from ..runtime.optimizer.adopt import Optimizers, adopt, several
from ..runtime.optimizer.unadopted import watch_optimizers
from ..runtime.parameters.replaced import mark_replaced
from ..runtime.pipeline import PipelineLoop, RunningPipeline
from ..runtime.pipeline.autograd import Backward
from ..runtime.world import Groups, Moment, World
from .agreement import check_programs, check_settings
from .batched import stand_in, with_batch
from .call_mapping import ways_of
from .files import Generated, generate
from .meta_copy import calling, carry, check_effects, copy_to_meta, fixed_buffers, mask_facts, signature, thaw
from .parameters import ParameterSharder
from .pipeline import assemble
from .pipeline_ranks import PipelineRank, check_held, find_pipeline_ranks, with_masters
from .replicas import count_replicas
from .scalars import check_floats

Outputs = Literal["all", "scalars"]


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


_CAPTURING = threading.Lock()  # torch.export is not made for threads


class Compiler:
    """Makes the entries of one model."""

    know = staticmethod(register_containers)

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizers,
        world: World,
        plan: PlanLike,
        mode: Mode,
        directory: Path,
        seed: int,
        promote: bool = False,
        exact_random: bool = False,
        prefix: str = "",
        setting: PlanningTask | None = None,
        outputs: Outputs = "all",
        batching: Batching | None = None,
        backward: Backward = "inside",
        precision: Precision | None = None,
        unbatched: Sequence[str] | None = None,
    ) -> None:
        self.module: nn.Module | None = module
        self.precision = precision or Precision()
        self.skeleton = cast(copy_to_meta(module), self.precision)
        self._alive: dict[int, Any] = {}
        self._signature = signature(module, self._alive)
        self._trainable = thaw(self.skeleton, module, set())
        self.optimizer, self.world, self.requested, self.mode = optimizer, world, plan, mode
        self.directory, self.promote, self.prefix = directory, promote, prefix
        self.outputs, self.batching, self.backward = outputs, batching or Batching(), backward
        self.random, self.setting = Randomness(seed=seed, exact=exact_random), setting
        self.stated: dict[str, object] = {}  # options that others act on, which ranks must have in common too
        self.call_inputs = CallInputs(partial(input_paths, self.skeleton), unbatched, computed=bool(prefix))
        self.storage_options: list[dict[str, Layout]] = []  # for each segment, once that is decided
        self.programs: list[LoweredProgram] = []
        self.bodies: dict[str, OpaqueBody] = {}
        self.saw_values = False  # whether an opaque part had to be seen running
        self.loop: PipelineLoop | None = None
        self._agreed = False
        self.method = ""  # which is compiled, other than forward
        self.floats: Mapping[int, float] = {}
        self.unpadded = False

    def agree(self) -> None:
        """See that all ranks have the same packages and options, once. All ranks must call it."""
        if not self._agreed:
            check_settings(self)
            self._agreed = True

    def renew(self, model: ParallelModel) -> None:
        """Before anything is compiled the original is the truth, whatever was done to it since `parallelize`."""
        if self.module is None:
            return
        now = signature(self.module, self._alive)
        if now != self._signature:
            marks = {AUTO: True} if AUTO in vars(self.skeleton) else {}
            self.skeleton, self._signature = cast(copy_to_meta(self.module), self.precision), now
            vars(self.skeleton).update(marks)
            model.remake(self.skeleton, self.module)
        thaw(self.skeleton, self.module, self._trainable)

    def carry(self, shown: nn.Module, path: str, name: str, value: Any) -> None:
        """Take an attribute that the user has changed to where programs are made, and to opaque parts that run."""
        carry(self.skeleton, shown, path, name, value)
        for at, body in self.bodies.items():
            if path == at or path.startswith(f"{at}.") or not at:
                carry(body.part, shown.get_submodule(at), path[len(at) :].lstrip("."), name, value)

    def __call__(
        self, model: ParallelModel, args: tuple[Any, ...], kwargs: dict[str, Any], method: str = "",
        floats: Mapping[int, float] | None = None, unpadded: bool = False,
    ) -> Specialization:  # fmt: skip
        """The program of a call; `floats` are those of its leaves that are given as tensors.

        One that is `unpadded` is for batches in which inputs tell of no padding.
        """
        self.agree()
        self.method, self.floats, self.unpadded = method, floats or {}, unpadded
        if not self.programs:
            self._check_first(model)
        with called_with_gradients(torch.is_grad_enabled()), saved_tensors_hooks(_as_it_is, _as_it_is):
            return self._compile(model, args, kwargs)  # not with the hooks of a checkpoint that this call is in

    @torch.inference_mode(False)  # what is made for inference can't train later
    def _compile(self, model: ParallelModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Specialization:
        captured = self._capture(model, args, kwargs)
        self.saw_values = self.saw_values or any(call.observed for call in captured.opaques.values())
        graph, mode = captured.graph, "per_replica" if model.passing == "per_replica" else "global"
        with without_collection():
            analysis = analyse(graph, probing(captured.functions))
            model.plan = plan = self._plan(model.plan, graph, analysis)
            if model.training and model.flops is None:
                model.flops = training_flops(analysis) * (plan.microbatches if plan.local else 1)
            check_splits(analysis, [segment.choices for segment in plan.entries[graph.entry]])
            self.random.apart = plan.local
            if plan.is_pipeline:
                lowered = lower_pipeline(graph, plan, analysis, storage_options=self.storage_options, mode=mode)
                programs = lowered.programs
            else:
                stored = self.storage_options[0] if self.storage_options else None
                programs = (lower(graph, plan, analysis, storage_options=stored, mode=mode),)
            generated = [generate(program, self.directory) for program in programs]
        check_programs(self, graph, plan, generated)
        self.programs.append(programs[0])
        pp_ranks = find_pipeline_ranks(plan.entries[graph.entry], generated)
        if self.precision.master and self.optimizer is not None:
            pp_ranks = with_masters(pp_ranks, graph)
        groups = {pp_rank.mesh: pp_rank.groups() for pp_rank in pp_ranks}  # of all meshes, on all ranks
        if model._holding is None:
            self._hold(model, generated, pp_ranks, groups)
        check_held(pp_ranks, model._ready().pp_ranks, generated)
        model.watch(captured.reads, (*captured.variables, *fixed_buffers(model, captured)), captured.left)
        if plan.is_pipeline:
            return self._load_pipeline(model, captured, lowered, generated, groups)
        return self._load(model, captured, generated[0], next(iter(groups.values())))

    def _check_first(self, model: ParallelModel) -> None:
        if self.optimizer is not None and not model.training and torch.is_grad_enabled():
            warnings.warn(
                "the model is in eval mode and has an optimizer: it is planned for evaluation, and trained so (dropout "
                "is off, batch norms use their running statistics); call model.train() before the first call, or "
                "compile the evaluation under torch.no_grad()",
                UserWarning,
                stacklevel=2,
            )

    def _capture(self, model: ParallelModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CapturedGraph:
        entry = "train" if model.training else "eval"
        scale = count_replicas(self.requested, self.world) if model.passing == "per_replica" else 1
        parts = (self.batching.microbatches or 1) if self.batching.local else 1
        leaves, spec = pytree.tree_flatten((args, kwargs))
        batch = self.call_inputs.batch_dim(args, kwargs, model.passing, needed=scale * parts > 1)
        if batch.size is not None and batch.size % parts:
            raise InputError(f"a batch of {batch.size} rows does not divide into {parts} microbatches")
        shown = [
            stand_in(leaf, batched, scale, parts) if isinstance(leaf, Tensor) else leaf
            for leaf, batched in zip(leaves, batch.batched, strict=True)
        ]
        call = (args, kwargs)
        args, kwargs = pytree.tree_unflatten(shown, spec)
        number = sum(program.graph.entry.split("-")[0] == entry for program in self.programs)
        entry = f"{entry}-{number}" if number else entry
        real = self._real(model, call, batch.batched, scale)
        called = calling(self.skeleton, self.method)
        with _CAPTURING, casting(called, self.precision):
            if self.floats:
                self._check_floats(called, shown, spec, real)
            captured = capture(called, args, kwargs, entry=entry, promote=self.promote, real=real,
                               masks=mask_facts(self.module, model, self.unpadded))  # fmt: skip
        check_effects(called, self.skeleton, self.method, captured)
        captured = with_batch(captured, batch, batch.size and batch.size * scale // parts)
        return captured if self.outputs == "all" else replace(captured, graph=only_scalars(captured.graph))

    def _check_floats(self, called: nn.Module, leaves: Sequence[Any], spec: pytree.TreeSpec, real: Real) -> None:
        if self.precision.casts:
            raise NotAnInput("a precision casts what is computed with a number")

        def trace(call: list[Any]) -> CapturedGraph:
            args, kwargs = pytree.tree_unflatten(call, spec)
            return capture(called, args, kwargs, entry="floats", promote=self.promote, real=real)

        check_floats(trace, leaves, self.floats)

    def _real(self, model: ParallelModel, call: Any, batched: Sequence[bool], scale: int) -> Real:
        """The model and the arguments of a call with values, for what only shows when the model runs.

        The rows of other groups are not here: the own ones are repeated. Once the pieces are the truth, the whole
        is gathered, if anything had to be looked at in the first run.
        """
        module = self.module
        if module is None:
            module = self._gathered(model) if self.saw_values else self.skeleton

        def make() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
            if self.precision.casts:
                raise NoValues("an opaque submodule has to be seen running, which is not done under a precision")
            leaves, spec = pytree.tree_flatten(call)
            global_leaves = [torch.cat([x] * scale) if has else x for x, has in zip(leaves, batched, strict=True)]
            return calling(module, self.method), *pytree.tree_unflatten(global_leaves, spec)

        return make

    def _gathered(self, model: ParallelModel) -> nn.Module:
        """The original with the values that it has now. All ranks must call it."""
        module = copy_module(self.skeleton).to_empty(device=self.world.device)
        state = {**model.full_state_dict(), **model._ready().buffers}
        with torch.no_grad():
            for key, tensor in (*module.named_parameters(), *module.named_buffers()):
                tensor.copy_(state[key])
        return module

    def _plan(self, known: Plan | None, graph: Graph, analysis: Analysis) -> Plan:
        def make() -> Plan:
            if known is None:
                return make_plan(graph, analysis, self.requested, self.world.size, self.setting, self.batching)
            return continue_plan(known, graph, analysis, self.world.size, self.setting)

        if (self.requested if known is None else known.policy) != "auto" or not dist.is_initialized():
            return make()
        return self._plan_on_first_rank(make, graph)

    def _plan_on_first_rank(self, make: Callable[[], Plan], graph: Graph) -> Plan:
        """The first rank searches and tells the others, since two machines may break a tie in two ways."""
        message: list[str] = ["", ""]
        if self.world.rank == 0:
            try:
                message[0] = make().to_json()
            except ShardwrightError as error:
                message[1] = str(error)
        dist.broadcast_object_list(message, src=0)
        if message[1]:
            raise PlanError(message[1])
        return read_plan(message[0], graph)

    def _hold(
        self,
        model: ParallelModel,
        generated: Sequence[Generated],
        pp_ranks: Sequence[PipelineRank],
        groups: Mapping[Mesh, Groups],
    ) -> None:
        assert self.module is not None
        holder = ParameterSharder(
            module=self.module, world=self.world, random=self.random, promote=self.promote, prefix=self.prefix,
            dtypes={key: buffer.dtype for key, buffer in self.skeleton.named_buffers(remove_duplicate=False)},
            wire=None if self.precision.sync is None else getattr(torch, self.precision.sync),
        )  # fmt: skip
        units = dict.fromkeys(unit for file in generated for unit in getattr(file.module, "UNITS", ()))
        holding = holder.hold(pp_ranks, groups, tuple(units))
        model.hold(holding)
        self.storage_options = [{p.name: p.layout for p in file.program.parameters} for file in generated]
        replaced = holder.replaced(holding.parameters, pp_ranks)
        for optimizer in several(self.optimizer):
            adopt(optimizer, replaced)
        watch_optimizers()
        mark_replaced(dict(self.module.named_parameters()), replaced)
        self.module = None  # from here on the pieces are the truth
        self._alive, self._signature = {}, []

    def _load(self, model: ParallelModel, captured: CapturedGraph, file: Generated, groups: Groups) -> Specialization:
        program = file.program
        return Specialization(
            stage=self._stage(model, captured, file, groups),
            path=file.path,
            per_replica=tuple(
                model.passing == "per_replica" and name is not None and any(program.layouts[name].shards)
                for name in program.outputs
            ),
            **ways_of(captured, model.passing),
        )

    def _load_pipeline(
        self,
        model: ParallelModel,
        captured: CapturedGraph,
        lowered: PipelinePrograms,
        generated: Sequence[Generated],
        groups: Mapping[Mesh, Groups],
    ) -> Specialization:
        holding = model._ready()
        if self.loop is None:
            self.loop = PipelineLoop(holding.sync, self.backward)

        def make(file: Generated, moment: Moment) -> Program:
            return self._stage(model, captured, file, groups[holding.groups.mesh], moment)

        pipeline = assemble(lowered, generated, captured, holding, self.world, make)
        joined = {output.value for output in lowered.exits if output.how == "cat"}
        if self.mode == "per_replica" and joined and count_replicas(self.requested, self.world) > 1:
            raise InputError(
                f'with inputs="per_replica" a pipeline of several data-parallel replicas returns scalars only, and the '
                f"model returns {', '.join(sorted(joined))} with rows; compute the loss in the model and pass "
                'outputs="scalars", or pass inputs="global"'
            )
        here = next(file for file, place in zip(generated, pipeline.placed, strict=True) if place.stage is not None)
        return Specialization(
            running=RunningPipeline(pipeline, self.loop),
            path=here.path,
            per_replica=tuple(model.passing == "per_replica" and out.value in joined for out in captured.graph.outputs),
            **ways_of(captured, model.passing),
        )

    def _stage(
        self,
        model: ParallelModel,
        captured: CapturedGraph,
        generated: Generated,
        groups: Groups,
        moment: Moment | None = None,
    ) -> Program:
        holding, module = model._ready(), generated.module
        stage = program_class(module)(groups, module.GROUPS, self.world.device, holding.random, moment)
        stage.zero = holding.zero
        read = {p.name for p in generated.program.parameters}  # a loop over layers must find those of its stage
        for spec in holding.specs:
            for key in spec.keys if spec.name in read else ():
                stage.place(key, holding.parameters[spec.name])
        for buffer in generated.program.graph.buffers:
            constant = captured.constants.get(buffer.value)
            tensor = holding.buffers[buffer.key] if constant is None else constant.to(self.world.device)
            stage.place(buffer.key, tensor, unchanging=buffer.update is None)
        stage.parts = {key: self._part(call) for key, call in captured.opaques.items()}
        stage.renew()
        return stage

    def _part(self, call: OpaqueCall) -> OpaqueModule:
        """A submodule that stays as it is. All entries share one copy of it, so that what it remembers is one."""
        like = self.skeleton.get_submodule(call.path)
        if call.path not in self.bodies:
            self.bodies[call.path] = OpaqueBody(copy_module(like))
        return OpaqueModule(call, self.bodies[call.path], [module.training for module in like.modules()])

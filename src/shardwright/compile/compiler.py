"""From a call to a program that runs: capture, plan, lower, emit, load, for one kind of call at a time.

`Compiler` is the function that a `ParallelModel` calls with a `ModelCall`, which says all that matters about the model;
it returns a `CompiledCall`, which the model installs. Neither writes into the other. The first call decides how
parameters are stored; later ones (eval, another batch size) are solved with that fixed, which is all that a compiler
remembers. Generated files lie in a directory by content, so nothing stale is reused.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from ..capture import (
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
    find_opaque,
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
from ..planning import continue_plan, make_plan, only_scalars, with_batch_norm
from ..probe import check_splits, probing
from ..rules import Analysis, analyse
from ..runtime.algorithms.random import Randomness
from ..runtime.model.float_inputs import NotAnInput
from ..runtime.model.inputs import CallInputs
from ..runtime.model.specialization import CompiledCall, ModelCall, RankState, ReplacedParameters
from ..runtime.optimizer.adopt import Optimizers
from ..runtime.pipeline import PipelineLoop
from ..runtime.world import Groups, World
from .agreement import check_programs, check_settings
from .batched import stand_in, with_batch
from .files import Generated, generate
from .loading import ProgramLoader
from .meta_copy import calling, carry, check_effects, copy_to_meta, fixed_buffers, mask_facts, signature, thaw
from .parameters import ParameterSharder
from .pipeline_ranks import PipelineRank, check_held, find_pipeline_ranks, with_masters
from .replicas import count_replicas
from .scalars import check_floats
from .settings import CompilerSettings


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


_CAPTURING = threading.Lock()  # torch.export is not made for threads


class Compiler:
    """Compiles the calls of one model."""

    def __init__(
        self, module: nn.Module, optimizer: Optimizers, world: World, settings: CompilerSettings | None = None
    ) -> None:
        self.settings = settings or CompilerSettings()
        self.original: nn.Module | None = module  # until the first call is compiled: from then on the shards are true
        self.optimizer, self.world, self.mode = optimizer, world, self.settings.inputs
        self.cache_size = self.settings.cache_size
        self.skeleton = self._copy(module)
        self._alive: dict[int, Any] = {}
        self._signature = signature(module, self._alive)
        self._trainable = thaw(self.skeleton, module, set())
        self.random = Randomness(seed=self.settings.seed, exact=self.settings.exact_random)
        self.call_inputs = CallInputs(
            partial(input_paths, self.skeleton), self.settings.unbatched, computed=bool(self.settings.prefix)
        )
        self.storage_options: list[dict[str, Layout]] = []  # for each stage, once that is decided
        self.programs: list[LoweredProgram] = []  # one for each compiled call: of a pipeline that of its first stage
        self._bodies: dict[str, OpaqueBody] = {}
        self._saw_values = False  # whether an opaque part had to be seen running
        self._loop: PipelineLoop | None = None
        self._agreed = False

    def _copy(self, module: nn.Module) -> nn.Module:
        return find_opaque(cast(copy_to_meta(module), self.settings.precision), self.settings.opaque)

    def agree(self) -> None:
        """See that all ranks have the same packages and options, once. All ranks must call it."""
        if not self._agreed:
            check_settings(self)
            self._agreed = True

    def renew(self, skeleton: nn.Module) -> nn.Module:
        """The skeleton of the original as it is now, whatever was done to it since `parallelize`."""
        if self.original is None:
            return skeleton
        now = signature(self.original, self._alive)
        if now != self._signature:
            skeleton, self._signature = self._copy(self.original), now
        thaw(skeleton, self.original, self._trainable)
        return skeleton

    def register(self, arguments: Any) -> None:
        """Have torch look into objects that are passed, such as a cache."""
        register_containers(arguments)

    def carry(self, skeleton: nn.Module, shown: nn.Module, path: str, name: str, value: Any) -> None:
        """Take an attribute that the user has changed to where programs are made, and to opaque parts that run."""
        carry(skeleton, shown, path, name, value)
        for at, body in self._bodies.items():
            if path == at or path.startswith(f"{at}.") or not at:
                carry(body.part, shown.get_submodule(at), path[len(at) :].lstrip("."), name, value)

    def __call__(self, call: ModelCall) -> CompiledCall:
        """The program of a call, and all that comes with it."""
        self.agree()
        if not self.programs:
            self._check_first(call)
        with called_with_gradients(torch.is_grad_enabled()), saved_tensors_hooks(_as_it_is, _as_it_is):
            return self._compile(call)  # not with the hooks of a checkpoint that this call is in

    @torch.inference_mode(False)  # what is made for inference can't train later
    def _compile(self, call: ModelCall) -> CompiledCall:
        captured = self._capture(call)
        self._saw_values = self._saw_values or any(opaque.observed for opaque in captured.opaques.values())
        graph = captured.graph
        with without_collection():
            analysis = analyse(graph, probing(captured.functions))
            plan = self._plan(call.plan, graph, analysis)
            flops = self._flops(call, plan, analysis)
            check_splits(analysis, [stage.choices for stage in plan.entries[graph.entry]])
            lowered = self._lower(call, plan, analysis)
            generated = [generate(program, self.settings.directory) for program in lowered.programs]
        check_programs(self.world, graph, plan, generated)
        self.random.apart = plan.local
        pp_ranks = find_pipeline_ranks(plan.entries[graph.entry], generated)
        if self.settings.precision.master and self.optimizer is not None:
            pp_ranks = with_masters(pp_ranks, graph)
        groups = {pp_rank.mesh: pp_rank.groups() for pp_rank in pp_ranks}  # of all meshes, on all ranks
        state, replaced = call.state, None
        if state is None:
            state, replaced = self._shard(call, generated, pp_ranks, groups)
        check_held(pp_ranks, state.pp_ranks, generated)
        loader = ProgramLoader(compiler=self, call=call, captured=captured, state=state, groups=groups)
        specialization = loader.pipeline(lowered, generated) if plan.is_pipeline else loader.flat(generated[0])
        self._remember(generated)
        return CompiledCall(
            specialization=specialization,
            plan=plan,
            flops=flops,
            state=state,
            replaced=replaced,
            reads=captured.reads,
            variables=(*captured.variables, *fixed_buffers(state, captured)),
            left=captured.left,
        )

    def _check_first(self, call: ModelCall) -> None:
        if self.optimizer is not None and not call.training and torch.is_grad_enabled():
            warnings.warn(
                "the model is in eval mode and has an optimizer: it is planned for evaluation, and trained so (dropout "
                "is off, batch norms use their running statistics); call model.train() before the first call, or "
                "compile the evaluation under torch.no_grad()",
                UserWarning,
                stacklevel=2,
            )

    def _capture(self, call: ModelCall) -> CapturedGraph:
        settings = self.settings
        entry = "train" if call.training else "eval"
        scale = count_replicas(settings.request.source, self.world.size) if call.passing == "per_replica" else 1
        options = settings.request.options
        parts = (options.microbatches or 1) if options.local else 1
        leaves, spec = pytree.tree_flatten((call.args, call.kwargs))
        batch = self.call_inputs.batch_dim(call.args, call.kwargs, call.passing, needed=scale * parts > 1)
        if batch.size is not None and batch.size % parts:
            raise InputError(f"a batch of {batch.size} samples does not divide into {parts} microbatches")
        shown = [
            stand_in(leaf, batched, scale, parts) if isinstance(leaf, Tensor) else leaf
            for leaf, batched in zip(leaves, batch.batched, strict=True)
        ]
        args, kwargs = pytree.tree_unflatten(shown, spec)
        number = sum(program.graph.entry.split("-")[0] == entry for program in self.programs)
        entry = f"{entry}-{number}" if number else entry
        real = self._real(call, batch.batched, scale)
        called = calling(call.skeleton, call.method)
        with _CAPTURING, casting(called, settings.precision):
            if call.floats:
                self._check_floats(call, called, shown, real)
            captured = capture(
                called, args, kwargs, entry=entry, promote=settings.promote, real=real,
                masks=mask_facts(self.original, call),
            )  # fmt: skip
        check_effects(called, call.skeleton, call.method, captured)
        captured = with_batch(captured, batch, batch.size and batch.size * scale // parts)
        graph = with_batch_norm(captured.graph, settings.batch_norm)
        return replace(captured, graph=graph if settings.outputs == "all" else only_scalars(graph))

    def _check_floats(self, call: ModelCall, called: nn.Module, leaves: Sequence[Any], real: Real) -> None:
        if self.settings.precision.casts:
            raise NotAnInput("a precision casts what is computed with a number")
        _, spec = pytree.tree_flatten((call.args, call.kwargs))

        def trace(call: list[Any]) -> CapturedGraph:
            args, kwargs = pytree.tree_unflatten(call, spec)
            return capture(called, args, kwargs, entry="floats", promote=self.settings.promote, real=real)

        check_floats(trace, leaves, call.floats)

    def _real(self, call: ModelCall, batched: Sequence[bool], scale: int) -> Real:
        """The model and the arguments of a call with values, for what only shows when the model runs.

        The samples of other groups are not here: the own ones are repeated. Once the shards are the truth, the whole
        is gathered, if anything had to be looked at in the first run.
        """
        module = self.original
        if module is None:
            module = self._gathered(call) if self._saw_values else call.skeleton

        def make() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
            if self.settings.precision.casts:
                raise NoValues("an opaque submodule has to be seen running, which is not done under a precision")
            leaves, spec = pytree.tree_flatten((call.args, call.kwargs))
            global_leaves = [torch.cat([x] * scale) if has else x for x, has in zip(leaves, batched, strict=True)]
            return calling(module, call.method), *pytree.tree_unflatten(global_leaves, spec)

        return make

    def _gathered(self, call: ModelCall) -> nn.Module:
        """The original with the values that it has now. All ranks must call it."""
        assert call.state is not None
        module = copy_module(call.skeleton).to_empty(device=self.world.device)
        values = {**call.gather(), **call.state.buffers}
        with torch.no_grad():
            for key, tensor in (*module.named_parameters(), *module.named_buffers()):
                tensor.copy_(values[key])
        return module

    def _plan(self, known: Plan | None, graph: Graph, analysis: Analysis) -> Plan:
        request = self.settings.request

        def make() -> Plan:
            if known is None:
                return make_plan(graph, analysis, request, self.world.size)
            return continue_plan(known, graph, analysis, request)

        searches = request.searches if known is None else known.policy == "auto"
        if not searches or not dist.is_initialized():
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
        return replace(read_plan(message[0], graph), made_for=self.settings.request.cluster)

    def _flops(self, call: ModelCall, plan: Plan, analysis: Analysis) -> float | None:
        """Of the first training call."""
        if not call.training or any(known.graph.entry.startswith("train") for known in self.programs):
            return None
        return training_flops(analysis) * (plan.microbatches if plan.local else 1)

    def _lower(self, call: ModelCall, plan: Plan, analysis: Analysis) -> PipelinePrograms:
        """The programs of a plan; without stages there is one."""
        graph, known = analysis.graph, self.storage_options
        mode = "per_replica" if call.passing == "per_replica" else "global"
        if plan.is_pipeline:
            return lower_pipeline(graph, plan, analysis, storage_options=known, mode=mode)
        program = lower(graph, plan, analysis, storage_options=known[0] if known else None, mode=mode)
        return PipelinePrograms(
            plan=plan, graph=graph, microbatches=plan.microbatches, programs=(program,), passages=(), exits=()
        )

    def _shard(
        self,
        call: ModelCall,
        generated: Sequence[Generated],
        pp_ranks: Sequence[PipelineRank],
        groups: Mapping[Mesh, Groups],
    ) -> tuple[RankState, ReplacedParameters]:
        """The state of this rank, taken from the original. All ranks must call it."""
        assert self.original is not None
        settings, wire = self.settings, self.settings.precision.sync
        sharder = ParameterSharder(
            module=self.original, world=self.world, random=self.random, promote=settings.promote,
            prefix=settings.prefix, wire=None if wire is None else getattr(torch, wire),
            dtypes={key: buffer.dtype for key, buffer in call.skeleton.named_buffers(remove_duplicate=False)},
        )  # fmt: skip
        units = dict.fromkeys(unit for file in generated for unit in getattr(file.module, "UNITS", ()))
        state = sharder.hold(pp_ranks, groups, tuple(units))
        shards = sharder.replaced(state.parameters, pp_ranks)
        return state, ReplacedParameters(originals=dict(self.original.named_parameters()), shards=shards)

    def _remember(self, generated: Sequence[Generated]) -> None:
        """A call was compiled: what the next ones have to keep to. The shards are the truth from here on."""
        self.programs.append(generated[0].program)
        if self.original is not None:
            self.storage_options = [{p.name: p.layout for p in file.program.parameters} for file in generated]
            self.original = None
            self._alive, self._signature = {}, []

    def loop(self, state: RankState) -> PipelineLoop:
        """The loop that runs pipelines; all programs share one."""
        if self._loop is None:
            self._loop = PipelineLoop(state.sync, self.settings.backward)
        return self._loop

    def part(self, skeleton: nn.Module, call: OpaqueCall) -> OpaqueModule:
        """A submodule that stays as it is. All programs share one copy of it, so that what it remembers is one."""
        like = skeleton.get_submodule(call.path)
        if call.path not in self._bodies:
            self._bodies[call.path] = OpaqueBody(copy_module(like))
        return OpaqueModule(call, self._bodies[call.path], [module.training for module in like.modules()])

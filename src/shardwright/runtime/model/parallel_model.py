"""The compiled model as the user sees it: a module that works in an ordinary loop.

It holds the shards under the original names, finds the program for the call at hand (training or eval, these arguments,
this batch size, padding or none), runs it, and keeps gradients, buffers and random numbers right. Making a program is
not its business: it describes the call (`ModelCall`) to its compiler, and installs what that returns (`CompiledCall`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import InputError

from ..algorithms.random import Randomness
from ..collectives import comm
from ..faults import watch
from ..faults.input_comparison import InputComparison
from ..optimizer.adopt import adopt, several
from ..optimizer.unadopted import watch_optimizers
from ..parameters.gradient_sync import Accumulation, GradientSync, check_frozen
from ..parameters.replaced import mark_replaced
from . import input_gradients
from .float_inputs import Arguments, FloatInputs, NotAnInput, dtype_of_floats
from .guards import warn_of_many, why_new
from .inputs import Mode, check_dtypes
from .overrides import check_names, check_state
from .padding import is_unpadded
from .program import Program, shown
from .reduction import LossReduction, Reduction, total
from .shared_outputs import watch_gradient
from .specialization import CompiledCall, ModelCall, ModelCompiler, RankState, ReplacedParameters, Specialization
from .specialization_cache import SpecializationCache
from .step_times import StepTimes
from .view import ModelView, view_class


class ParallelModel(ModelView):
    """What `sw.parallelize` returns. `plan` and `generated` say what was decided and where its code lies."""

    plan: Any
    flops: float | None  # of the matmuls of the first training call, forward and backward, over all ranks

    def __init__(self, compiler: ModelCompiler, accumulate: int = 1, reduction: LossReduction = "mean") -> None:
        super().__init__()
        skeleton, world = compiler.skeleton, compiler.world
        self._reduction = Reduction(reduction)
        self._around: dict[str, Any] = {"skeleton": skeleton, "compiler": compiler}
        self._world, self._mode, self._turns = world, compiler.mode, Accumulation(accumulate)
        self._entries = SpecializationCache(compiler.cache_size)
        self._state: RankState | None = None
        self.call_inputs = compiler.call_inputs
        self._comparison = InputComparison(first_only=self.call_inputs.computed)
        self._global_batch = False
        self._flags = tuple(module.training for module in skeleton.modules())
        self._parts: list[nn.Module] = []  # as the user sees them, in the order of the skeleton's
        self._outside_sync: GradientSync | None = None  # of the module that this is a part of
        self._scalars = FloatInputs(world.device)
        self._float = dtype_of_floats(skeleton.parameters())
        self._place: tuple[int, int] | None = None  # data_rank and data_size, where they are known before a plan is
        self.register_load_state_dict_pre_hook(_load_inside)  # type: ignore[no-untyped-call]
        self.step_times = StepTimes(world.device, accumulate)
        self.plan = self.flops = None
        self.training = skeleton.training
        check_names(self, skeleton)
        self.__class__ = view_class(type(self), type(skeleton))

    # -- what the user reads -------------------------------------------------------------

    @property
    def generated(self) -> Path | None:
        """The newest generated file."""
        return self._entries.newest.path if self._entries.newest is not None else None

    @property
    def input_mode(self) -> Mode:
        """What `inputs` was said to be: "global", "per_replica" or "per_rank"."""
        return self._mode

    @property
    def _passing(self) -> Mode:
        """What the next call passes: `input_mode`, unless `pass_whole` says otherwise."""
        return "global" if self._global_batch else self._mode

    def pass_whole(self, global_batch: bool) -> None:
        """Whether the next calls pass the whole batch on every rank: a last one that groups can't share evenly."""
        self._global_batch = global_batch

    @property
    def data_rank(self) -> int:
        """Which data-parallel group this rank is in: for a sampler that gives each group its rows."""
        return self._place[0] if self._place is not None else self._ready().data_rank

    @property
    def data_size(self) -> int:
        """The number of data-parallel groups."""
        return self._place[1] if self._place is not None else self._ready().data_size

    @property
    def random(self) -> Randomness:
        """What the model draws from; a checkpoint has its step."""
        compiler: ModelCompiler = self._around["compiler"]
        return self._state.random if self._state is not None else compiler.random

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within this, backward adds up local gradients; the next backward outside of it makes them true."""
        with ExitStack() as stack:
            for sync in (self._ready().sync, self._outside_sync):
                if sync is not None:
                    stack.enter_context(sync.no_sync())
            yield

    def total(self, count: float | Tensor) -> Tensor:
        """The sum of a number over data-parallel groups, such as labels that count. All ranks must call it."""
        holding = self._ready()
        return total(count, holding.groups, holding.replica_axes, self._world.device)

    def counted(self, own: int | Tensor, window: int | Tensor | None = None) -> None:
        """With reduction="token": how many labels this group's loss, a mean, is over. All ranks say it before backward.

        Where gradients of several backwards are added up, `window` is this group's count in all of them.
        """
        self._reduction.set(own, self.total(own if window is None else window))

    def stand(self, rank: int, size: int) -> None:
        """Which data-parallel group this rank is in, for a part of a module: known before the part is compiled."""
        self._place = (rank, size)

    def sync_by_hand(self) -> None:
        """The loop says by `no_sync` when gradients are summed; `accumulate` was for the plan alone."""
        self._turns.every = 1

    def sync_too(self, sync: GradientSync) -> None:
        """Put the sync of gradients outside of this part off whenever its own is."""
        self._outside_sync, sync.turns = sync, self._turns

    # -- state ---------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The original keys; plain tensors, or what a rank has of them, as values (see `state_values`)."""
        if self._state is None:
            return dict(self._user.state_dict(*args, **kwargs))
        check_state(self._around["skeleton"], "save")
        values = self.shard_state_dict()
        into: dict[str, Any] | None = kwargs.get("destination")  # of the module that this is a part of
        if into is None and not kwargs.get("prefix"):
            return values
        into = {} if into is None else into
        into.update({kwargs.get("prefix", "") + key: value for key, value in values.items()})
        return into

    def shard_state_dict(self) -> dict[str, Any]:
        """What this rank has under the original keys: what checkpoints save, whatever the user's classes do to it."""
        return self._ready().state_dict()

    def full_state_dict(self, rank: int | None = None) -> dict[str, Tensor]:
        """Everything whole, under the original keys, on every rank or on one."""
        state = self._ready()
        self._comparison.settle()
        return state.full_state_dict(rank)

    def load_state_dict(self, values: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load whole tensors or shards, saved under this plan or another."""
        if self._state is None:
            options = {**({} if strict else {"strict": False}), **({"assign": True} if assign else {})}
            return self._user.load_state_dict(values, **options)
        check_state(self._around["skeleton"], "load")
        return self._state.load(values, strict)

    def _install(self, key: Any, compiled: CompiledCall) -> Specialization:
        """Take in what was compiled for a kind of call; from the first on the shards are the model."""
        self.plan = compiled.plan
        self.flops = compiled.flops if self.flops is None else self.flops
        if self._state is None:
            self._hold(compiled.state)
        if compiled.replaced is not None:
            self._replace_original(compiled.replaced)
        self.watch(compiled.reads, compiled.variables, compiled.left)
        self._entries.add(key, compiled.specialization)
        return compiled.specialization

    def _hold(self, state: RankState) -> None:
        """Have the shards under the original names."""
        self._state = state
        if state.sync is not None:
            state.sync.turns = self._turns
        tensors: dict[str, Tensor] = {}
        for spec in state.specs:
            tensors.update(dict.fromkeys(spec.keys, state.parameters[spec.name]))
        tensors.update(state.buffers)
        self.show(shown(self._around["skeleton"], tensors))
        self.guard()

    def _replace_original(self, replaced: ReplacedParameters) -> None:
        """Have the optimizers train the shards, and the original's parameters refuse to be trained."""
        compiler: ModelCompiler = self._around["compiler"]
        for optimizer in several(compiler.optimizer):
            adopt(optimizer, replaced.shards)
        watch_optimizers()
        mark_replaced(replaced.originals, replaced.shards)

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compile for a call without making it."""
        self.call_inputs.check_plain(args, kwargs)
        self._know((args, kwargs))
        with watch.calling():
            self._entry(*(self.call_inputs.gather(args, kwargs) if self._mode == "per_rank" else (args, kwargs)))

    def show(self, module: nn.Module) -> None:
        """Have the parts of a module: of the original until the first call, of its shards then."""
        self._around["root"] = module
        self._parameters, self._buffers, self._modules = module._parameters, module._buffers, module._modules
        self._non_persistent_buffers_set = module._non_persistent_buffers_set
        self._parts = list(self.modules())

    def _ready(self) -> RankState:
        if self._state is None:
            raise InputError(
                "the model is not compiled yet, since no example was given; call it once, or pass example=(...) to "
                "parallelize"
            )
        return self._state

    # -- running -------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with watch.calling():
            return self._run(args, kwargs)

    def run_method(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with watch.calling():
            return self._run(args, kwargs, name)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], method: str = "") -> Any:
        self.call_inputs.check_plain(args, kwargs)
        input_gradients.expect_no_transform((args, kwargs))
        self._know((args, kwargs))
        if self._passing == "per_rank":
            input_gradients.expect_none(args, kwargs)
            args, kwargs = self.call_inputs.gather(args, kwargs)
        (args, kwargs), entry = self._find(args, kwargs, method)
        holding = self._ready()
        holding.check_filled()
        check_frozen(holding.sync, self._outside_sync)
        for stage in entry.stages:
            stage.renew()
        tensors = entry.flatten(args, kwargs)
        signature = entry.signature if entry.stage is None else entry.signature.with_frozen(holding.frozen)
        place = (self.data_rank, self.data_size) if self._passing == "per_replica" else (0, 1)
        self._comparison.begin(signature, tensors, place, at_once=self._global_batch)
        if self._place is not None:  # outside of a part gradients are those of the own rows' mean
            tensors = [comm.scale_gradient(tensor, float(self.data_size)) for tensor in tensors]
        elif self._passing == "per_replica":
            own = [
                per_replica
                for per_replica, literal in zip(entry.per_replica, entry.literals, strict=True)
                if not literal
            ]
            tensors = input_gradients.unweighed(tensors, own, self._reduction.kind, self.data_size, entry.stage is None)
        if self.training and torch.is_grad_enabled():
            holding.random.advance()
            self.step_times.begin(entry)
        else:
            self.step_times.interrupt()
        results = self._forward(entry.stage, holding, tensors) if entry.stage else self._pipeline(entry, tensors)
        self._comparison.until_backward(results)
        outputs = self._out(entry, results)
        for tensor, path in zip(outputs, entry.shared, strict=False):
            if path and tensor is not None and self._world.size > 1:
                watch_gradient(tensor, path)
        return entry.unflatten(outputs)

    def _forward(self, stage: Program, holding: RankState, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        with ExitStack() as stack:
            stack.enter_context(torch._C.DisableTorchFunctionSubclass())
            if holding.zero is not None and torch.is_grad_enabled():
                stack.enter_context(holding.zero.saving())
            stage.start()
            results = stage.forward(*tensors)
            self._write_updates(stage, holding)
        return results

    def _pipeline(self, entry: Specialization, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        assert entry.running is not None
        return entry.running(tensors, self.training)

    def _out(self, entry: Specialization, results: Sequence[Tensor]) -> list[Tensor | None]:
        left = iter(results)
        outputs: list[Tensor | None] = []
        for literal, per_replica in zip(entry.literals, entry.per_replica, strict=True):
            tensor = None if literal else next(left)
            if per_replica and tensor is not None and tensor.is_floating_point():
                tensor = self._reduction.weigh(tensor, self.data_size)
            outputs.append(tensor)
        return outputs

    @torch.no_grad()
    def _write_updates(self, stage: Program, holding: RankState) -> None:
        stage.share_local_statistics()
        for key, value in stage.updates.items():
            holding.write(key, value)
        stage.updates.clear()

    def _know(self, arguments: Arguments) -> None:
        """Have torch look into objects that are passed, such as a cache, before anything goes by what is in them."""
        known = (Tensor, bool, int, float, complex, str, type(None))
        if not all(isinstance(x, known) for x in torch.utils._pytree.tree_leaves(arguments)):
            self._around["compiler"].register(arguments)

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any], method: str) -> tuple[Arguments, Specialization]:
        """The program of a call, and what it is given: floats may be inputs."""
        narrow = torch.is_autocast_enabled(self._world.device.type)
        lifted, floats = self._scalars.lift((args, kwargs), method, None if narrow else self._float)
        if floats:
            try:
                entry = self._entry(*lifted, method, floats)
                self._scalars.decide((args, kwargs), method, floats, inputs=True)
                return lifted, entry
            except NotAnInput:
                self._scalars.decide((args, kwargs), method, floats, inputs=False)
        return (args, kwargs), self._entry(args, kwargs, method)

    def _entry(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], method: str = "", floats: Mapping[int, float] | None = None
    ) -> Specialization:
        key = self._key(args, kwargs, method)
        extra = {**({"method": method} if method else {}), **({"floats": floats} if floats else {})}
        entry = self._compiled(key, args, kwargs, extra)
        if entry.padding and is_unpadded(entry, args, kwargs, alike=self._passing != "per_replica"):
            return self._compiled((*key[:3], f"{key[3]}, unpadded"), args, kwargs, {**extra, "unpadded": True})
        return entry

    def _compiled(self, key: Any, args: Any, kwargs: Any, extra: Mapping[str, Any]) -> Specialization:
        if key not in self._entries:
            if not torch.is_autocast_enabled(self._world.device.type):
                self._check_dtypes(key)
            self.call_inputs.check(args, kwargs, why=why_new(self._entries, key))
            self.catch_up()
            warn_of_many(self._entries, key)
            compiler: ModelCompiler = self._around["compiler"]
            self._install(key, compiler(self._describe(args, kwargs, extra)))
            constants = self.constants(extra.get("method", ""))  # a trace may fill a cache of the model
            self._entries.add((constants, *key[1:]), self._entries[key])
        return self._entries.use(key)

    def _describe(self, args: tuple[Any, ...], kwargs: dict[str, Any], extra: Mapping[str, Any]) -> ModelCall:
        return ModelCall(
            skeleton=self._around["skeleton"], args=args, kwargs=kwargs, training=self.training, passing=self._passing,
            plan=self.plan, state=self._state, gather=self.full_state_dict, **extra,
        )  # fmt: skip

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any], method: str) -> tuple[Any, ...]:
        """What calls of one program have in common."""
        leaves, spec = torch.utils._pytree.tree_flatten((args, kwargs))
        shapes = tuple(
            (tuple(x.shape), x.dtype, x.requires_grad, x.layout) if isinstance(x, Tensor) else repr(x) for x in leaves
        )
        return self.constants(method), str(spec), shapes, self._passing

    def _check_dtypes(self, key: Any) -> None:
        """A new program is made for other shapes or another mode, and for other dtypes only where autocast casts."""
        for (constants, spec, shapes, _), entry in self._entries.items():
            if spec == key[1] and constants[0] == key[0][0]:
                known, passed = (
                    [leaf[1] for leaf in leaves if not isinstance(leaf, str)] for leaves in (shapes, key[2])
                )
                if len(known) == len(passed) == len(entry.dtypes):
                    check_dtypes([path for path, _ in entry.dtypes], known, passed)
                return


def _load_inside(model: ParallelModel, values: dict[str, Any], prefix: str, *_: Any) -> None:
    """A state dict is loaded into the module that this model is a part of: load the own values, and leave shards."""
    state = model._state
    if state is None:
        return
    mine = {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
    state.load(mine, strict=False)
    with torch._C.DisableTorchFunctionSubclass():
        for spec in state.specs:
            local = state.parameters[spec.name].detach().as_subclass(Tensor)
            values.update({prefix + key: local for key in spec.keys if key in mine})

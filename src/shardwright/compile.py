"""From a call to a program that runs: capture, plan, lower, emit, load, for one entry at a time.

`Compiler` is the function that a `ParallelModel` asks for the program of a call. The first
call decides how parameters are held; later entries (eval, another batch size) are solved
with that fixed. Generated files lie in a directory by content, so nothing stale is reused.
"""

from __future__ import annotations

import copy
import hashlib
import math
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .capture import Body, Captured, Function, Opaque, OpaquePart, Real, capture, without_collection
from .emit import emit
from .errors import InputError, PlanError, ShardwrightError
from .ir import Graph
from .layout import Layout, Mesh
from .lower import Program, lower
from .plan import Plan, read_request
from .plan.file import read as read_plan
from .plan.rows import replica_axes
from .plan.strings import REPLICAS
from .planning import PlanLike, Setting, continue_plan, make_plan, only_scalars
from .probe import probing
from .rules import Analysis, analyse
from .runtime.gradients import GradientSync
from .runtime.holding import Held, coordinates, kept_layout, parse, scatter, wanted_groups
from .runtime.inputs import Mode, rows_of
from .runtime.model import Entry, Holding, ParallelModel
from .runtime.optimizer import adopt
from .runtime.parameters import ShardParameter, make_parameter
from .runtime.random import Randomness
from .runtime.stage import load_file, stage_class
from .runtime.world import Groups, World
from .runtime.zero import Zero3

Outputs = Literal["all", "scalars"]

_CAPTURING = threading.Lock()  # torch.export is not made for threads


def skeleton_of(module: nn.Module) -> nn.Module:
    """A copy of a module in which parameters and buffers are on meta: what capture needs, and no memory."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(module, memo)


def compile_graph(
    graph: Graph,
    wish: Callable[[Analysis], Plan],
    *,
    homes: Mapping[str, Layout] | None = None,
    mode: str = "same",
    functions: Mapping[str, Function] | None = None,
) -> tuple[Plan, Program, str]:
    """Everything after capture: atoms, plan, lowering, text. `functions` are the user's, which may be probed."""
    with without_collection():
        facts = analyse(graph, probing(functions))
        plan = wish(facts)
        program = lower(graph, plan, facts, homes=homes, mode=mode)
        return plan, program, emit(program).text


def replicas_of(wish: PlanLike, world: World) -> tuple[Mesh, tuple[str, ...]]:
    """The mesh that a plan will have and its axes that split the batch, before there is a plan."""
    if isinstance(wish, Plan):
        return wish.mesh, replica_axes(wish.mesh)
    if not isinstance(wish, str) or wish.endswith(".json"):
        raise InputError(
            'inputs="rows" needs a plan string or a Plan, so that the global batch is known before planning'
        )
    text = wish if wish != "auto" else f"dp={world.size}" if world.size > 1 else "single"
    request = read_request(text, world.size)
    return request.mesh, tuple(axis.name for policy, axis in request.parts if policy in REPLICAS)


class Compiler:
    """Makes the entries of one model."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        world: World,
        wish: PlanLike,
        mode: Mode,
        directory: Path,
        seed: int,
        promote: bool = False,
        exact_random: bool = False,
        prefix: str = "",
        setting: Setting | None = None,
        outputs: Outputs = "all",
    ) -> None:
        self.module: nn.Module | None = module
        self.skeleton = skeleton_of(module)
        self.optimizer, self.world, self.wish, self.mode = optimizer, world, wish, mode
        self.directory, self.promote, self.prefix = directory, promote, prefix
        self.outputs = outputs
        self.random, self.setting = Randomness(seed=seed, exact=exact_random), setting
        self.homes: dict[str, Layout] | None = None
        self.programs: list[Program] = []
        self.bodies: dict[str, Body] = {}
        self.looked = False  # whether an opaque part had to be seen running

    def __call__(self, model: ParallelModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry:
        captured = self._capture(model, args, kwargs)
        self.looked = self.looked or any(call.looked for call in captured.opaques.values())
        model.plan, program, text = compile_graph(
            captured.graph,
            lambda facts: self._plan(model.plan, captured.graph, facts),
            homes=self.homes,
            mode="rows" if self.mode == "rows" else "same",
            functions=captured.functions,
        )
        path = write(text, self.directory, program)
        name = f"shardwright_generated_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
        module = load_file(path, name)
        self.programs.append(program)
        if model._holding is None:
            self._hold(model, module, program, captured)
        return self._load(model, module, captured, program, path)

    def _capture(self, model: ParallelModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Captured:
        entry = "train" if model.training else "eval"
        scale = self._replicas() if self.mode == "rows" else 1
        leaves, spec = pytree.tree_flatten((args, kwargs))
        rows = rows_of([leaf for leaf in leaves if isinstance(leaf, Tensor)])
        shown = [_stand_in(leaf, rows, scale) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        given = (args, kwargs)
        args, kwargs = pytree.tree_unflatten(shown, spec)
        number = sum(program.graph.entry.split("-")[0] == entry for program in self.programs)
        entry = f"{entry}-{number}" if number else entry
        real = self._real(model, given, rows, scale)
        with _CAPTURING:
            found = capture(self.skeleton, args, kwargs, entry=entry, promote=self.promote, real=real)
        return found if self.outputs == "all" else replace(found, graph=only_scalars(found.graph))

    def _real(self, model: ParallelModel, given: Any, rows: int | None, scale: int) -> Real:
        """The model and the arguments of a call with values, for what only shows when the model runs.

        The rows of other groups are not here: the own ones are repeated. Once the pieces are the truth, the whole
        is gathered, if anything had to be looked at in the first run.
        """
        module = self.module or (self._gathered(model) if self.looked else self.skeleton)

        def make() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
            leaves, spec = pytree.tree_flatten(given)
            many = [isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] == rows for x in leaves]
            whole = [torch.cat([x] * scale) if has else x for x, has in zip(leaves, many, strict=True)]
            return module, *pytree.tree_unflatten(whole, spec)

        return make

    def _gathered(self, model: ParallelModel) -> nn.Module:
        """The original with the values that it has now. All ranks must call it."""
        made = copy.deepcopy(self.skeleton).to_empty(device=self.world.device)
        state = {**model.full_state_dict(), **model._ready().buffers}
        with torch.no_grad():
            for key, tensor in (*made.named_parameters(), *made.named_buffers()):
                tensor.copy_(state[key])
        return made

    def _replicas(self) -> int:
        """How many data-parallel groups there will be; "rows" mode needs to know before it captures."""
        mesh, axes = replicas_of(self.wish, self.world)
        return math.prod(mesh.sizes[name] for name in axes)

    def _plan(self, known: Plan | None, graph: Graph, facts: Analysis) -> Plan:
        def make() -> Plan:
            if known is None:
                return make_plan(graph, facts, self.wish, self.world.size, self.setting)
            return continue_plan(known, graph, facts, self.world.size, self.setting)

        if (self.wish if known is None else known.policy) != "auto" or not dist.is_initialized():
            return make()
        return self._told(make, graph)

    def _told(self, make: Callable[[], Plan], graph: Graph) -> Plan:
        """The first rank searches and tells the others, since two machines may break a tie in two ways."""
        said: list[str] = ["", ""]
        if self.world.rank == 0:
            try:
                said[0] = make().to_json()
            except ShardwrightError as error:
                said[1] = str(error)
        dist.broadcast_object_list(said, src=0)
        if said[1]:
            raise PlanError(said[1])
        return read_plan(said[0], graph)

    def _hold(self, model: ParallelModel, module: Any, program: Program, captured: Captured) -> None:
        assert self.module is not None
        mesh = program.mesh
        used = _use_order(program)
        keys = [held.key for held in sorted(program.holdings, key=lambda held: used.get(held.value, len(used)))]
        held = parse(module.PIECES, mesh, keys)
        groups = Groups(mesh, [*(tuple(name.split("_")) for name in module.GROUPS), *wanted_groups(held, mesh)])
        old = dict(self.module.named_parameters(remove_duplicate=False))
        pieces: dict[str, ShardParameter] = {}
        replaced: dict[nn.Parameter, ShardParameter | None] = {}
        for one in held:
            local = self._piece(old[one.name], one, groups)
            pieces[one.name] = make_parameter(local, one, groups)
            pieces[one.name].prefix = self.prefix
            replaced.update({old[key]: pieces[one.name] for key in one.keys})
        buffers = {key: self._shared(tensor) for key, tensor in self.module.named_buffers(remove_duplicate=False)}
        pairs: list[tuple[Held, nn.Parameter]] = [(one, pieces[one.name]) for one in held]
        trained = [(one, p) for one, p in pairs if one.trainable]
        units: dict[str, list[tuple[Held, nn.Parameter]]] = {}
        for one, p in pairs:
            if one.level == 3:
                units.setdefault(one.unit, []).append((one, p))
        model.hold(
            Holding(
                groups=groups,
                held=held,
                parameters=pieces,
                buffers=buffers,
                sync=GradientSync(trained, groups) if mesh.size > 1 else None,
                zero=Zero3(units, groups, [u for u in module.UNITS if u in units]) if units else None,
                random=self.random,
                replica_axes=replica_axes(program.mesh),
                persistent=tuple(key for key in self.module.state_dict(keep_vars=True) if key in buffers),
            )
        )
        self.homes = {one.key: one.layout for one in program.holdings}
        if self.optimizer is not None:
            adopt(self.optimizer, replaced)
        self.module = None  # from here on the pieces are the truth

    def _piece(self, whole: Tensor, held: Held, groups: Groups) -> Tensor:
        full = self._shared(whole).to(held.dtype)
        return scatter(full, held, groups.mesh.sizes, coordinates(groups), kept_layout(held, groups.mesh.sizes))

    def _shared(self, tensor: Tensor) -> Tensor:
        """A copy on this rank's device that is the same everywhere, since unseeded scripts differ."""
        if tensor.is_meta:
            raise InputError("the model has parameters on meta; materialise and initialise them before parallelize")
        copied = tensor.detach().to(self.world.device, copy=True).contiguous()
        if self.promote and copied.is_floating_point():
            copied = copied.double()
        if dist.is_initialized() and self.world.size > 1:
            dist.broadcast(copied, 0)
        return copied

    def _load(self, model: ParallelModel, module: Any, captured: Captured, program: Program, path: Path) -> Entry:
        holding = model._ready()
        mesh = program.mesh
        held = parse(module.PIECES, mesh, [one.key for one in program.holdings])
        wanted = [*(tuple(name.split("_")) for name in module.GROUPS), *wanted_groups(held, mesh)]
        stage = stage_class(module)(Groups(mesh, wanted), module.GROUPS, self.world.device, holding.random)
        stage.zero = holding.zero
        for one in holding.held:
            for key in one.keys:
                stage.place(key, holding.parameters[one.name])
        for buffer in captured.graph.buffers:
            constant = captured.constants.get(buffer.value)
            tensor = holding.buffers[buffer.key] if constant is None else constant.to(self.world.device)
            stage.place(buffer.key, tensor)
        stage.parts = {key: self._part(call) for key, call in captured.opaques.items()}
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass(), torch.device(self.world.device):
            stage.constants()
        outputs = captured.graph.outputs
        leaves = {leaf.value: leaf.path for leaf in captured.input_leaves if leaf.value is not None}
        values = captured.graph.values
        return Entry(
            stage=stage,
            path=path,
            flatten=captured.flatten,
            unflatten=captured.unflatten,
            literals=tuple(output.value is None for output in outputs),
            rows=tuple(
                self.mode == "rows" and name is not None and any(program.layouts[name].cuts) for name in program.outputs
            ),
            dtypes=tuple((leaves[held.value], values[held.value].dtype) for held in captured.graph.inputs),
        )

    def _part(self, call: Opaque) -> OpaquePart:
        """A submodule that stays as it is. All entries share one copy of it, so that what it remembers is one."""
        like = self.skeleton.get_submodule(call.path)
        if call.path not in self.bodies:
            self.bodies[call.path] = Body(copy.deepcopy(like))
        return OpaquePart(call, self.bodies[call.path], [held.training for held in like.modules()])


def _stand_in(tensor: Tensor, rows: int | None, scale: int) -> Tensor:
    """A tensor without memory, at global shape."""
    shape = list(tensor.shape)
    if scale > 1 and shape and shape[0] == rows:
        shape[0] *= scale
    made = torch.empty(shape, dtype=tensor.dtype, device="meta")
    return made.requires_grad_(tensor.requires_grad)


def _use_order(program: Program) -> dict[str, int]:
    found: dict[str, int] = {}
    for number, op in enumerate(program.body):
        for name in op.inputs:
            found.setdefault(name.split("@")[0], number)
    return found


def write(text: str, directory: Path, program: Program) -> Path:
    """Write a generated file under a name that says what it is; the same content has the same name."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    folder = directory / f"{program.graph.name}-{program.plan_policy.replace('=', '').replace(',', '-')}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{program.graph.entry.replace('-', '_')}_{digest}.py"
    if not path.exists() or path.read_text() != text:
        draft = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.part")  # ranks may be threads
        draft.write_text(text)
        draft.replace(path)
    return path

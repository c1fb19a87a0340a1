"""Heavy parts of a module compiled, the rest of it left as it is: ordinary eager code, data-parallel.

    model, optimizer = sw.parallelize(
        model, optimizer, plan="dp=2,tp=2", compile=sw.CompileOptions(parts=["backbone"])
    )

Each part is replaced by its compiled self, in its place in the module. The parameters of the rest
are replicated on every rank. With inputs="global" all ranks compute the rest alike, on the global batch,
and nothing has to be summed. With inputs="per_replica" a data-parallel group computes the rest on its own
rows, and gradients are averaged over the groups, as DDP does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .compile import Compiler, CompilerSettings, replicas_of
from .errors import InputError, raise_all
from .layout import REPLICATE, make_layout
from .plan.request import PlanLike, PlanSource, read_source
from .runtime.algorithms.random import seed_of
from .runtime.model.inputs import Mode
from .runtime.model.parallel_model import ParallelModel
from .runtime.optimizer.adopt import Optimizers
from .runtime.parameters.gradient_sync import GradientSync, check_alone
from .runtime.world import Groups, World
from .storage import ParameterSpec, wanted_groups

Parts = Sequence[str] | Mapping[str, PlanLike]


def replace_parts(
    model: nn.Module, optimizer: Optimizers, world: World, settings: CompilerSettings, parts: Parts
) -> None:
    """Compile the parts of a module, each at its first call, and make the rest data-parallel."""
    request, mode = settings.request, settings.inputs
    sources = (
        {path: read_source(plan) for path, plan in parts.items()}
        if isinstance(parts, Mapping)
        else dict.fromkeys(parts, request.source)
    )
    _check(model, list(sources), mode)
    rest = _rest(model, list(sources))
    for tensor in (*rest.values(), *_rest_buffers(model, list(sources)).values()):
        _share(tensor, world)
    if mode == "global":
        _draw_alike(world)
    compiled: list[ParallelModel] = []
    for path, source in sources.items():
        part = model.get_submodule(path)
        own = replace(
            settings, request=replace(request, source=source), seed=seed_of((settings.seed, path)), prefix=f"{path}."
        )
        compiled_part = ParallelModel(Compiler(part, optimizer, world, own), settings.accumulate)
        compiled_part.show(part)
        parent, _, name = path.rpartition(".")
        model.get_submodule(parent)._modules[name] = compiled_part
        compiled.append(compiled_part)
    if mode == "per_replica":
        _average(model, rest, list(sources.values()), compiled, world)


def _check(model: nn.Module, paths: Sequence[str], mode: Mode) -> None:
    known = [path for path, _ in model.named_modules() if path]
    some = ", ".join(known[:8])
    faults = [f"{path!r} is no submodule; there are {some}" for path in paths if path not in known]
    faults += [f"{path} is inside of {other}" for path in paths for other in paths if path.startswith(f"{other}.")]
    if mode == "per_rank":
        faults.append(
            'inputs="per_rank" makes no sense for parts: the rest would see other rows than they; use "per_replica"'
        )
    if mode == "per_replica":
        faults += [
            f"{path} has max_norm and is in no part: each replica would rescale rows by its own samples; add it to the "
            'parts, or use inputs="global"'
            for path, part in model.named_modules()
            if getattr(part, "max_norm", None) is not None and _part_of(f"{path}.", paths) is None
        ]
    where: dict[int, str] = {}
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for key, tensor in tensors:
        first = where.setdefault(id(tensor), key)
        if _part_of(first, paths) != _part_of(key, paths):
            faults.append(f"{first} and {key} are tied, and only one of them is in a part; compile what holds both")
    raise_all(InputError, f"these parts of {type(model).__name__} can't be compiled on their own:", faults)


def _part_of(key: str, paths: Sequence[str]) -> str | None:
    return next((path for path in paths if key.startswith(f"{path}.")), None)


def _rest(model: nn.Module, paths: Sequence[str]) -> dict[str, nn.Parameter]:
    """The parameters outside of all parts, which from now on know their key (an optimizer's state is saved by it)."""
    rest = {key: parameter for key, parameter in model.named_parameters() if _part_of(key, paths) is None}
    for key, parameter in rest.items():
        parameter.key = key  # type: ignore[attr-defined]
    return rest


def _rest_buffers(model: nn.Module, paths: Sequence[str]) -> dict[str, Tensor]:
    return {key: buffer for key, buffer in model.named_buffers() if _part_of(key, paths) is None}


@torch.no_grad()
def _share(tensor: Tensor, world: World) -> None:
    """Unseeded scripts differ: what rank 0 has is what all have."""
    if tensor.is_meta:
        raise InputError("the model has parameters on meta; materialise and initialise them before parallelize")
    tensor.data = tensor.data.to(world.device).contiguous()
    if dist.is_initialized() and world.size > 1:
        dist.broadcast(tensor.data, 0)


def _draw_alike(world: World) -> None:
    """All ranks compute the rest on the same batch, so that its dropout must be the same too."""
    if dist.is_initialized() and world.size > 1:
        state = torch.get_rng_state().to(world.device)
        dist.broadcast(state, 0)
        torch.set_rng_state(state.cpu())


def _average(
    model: nn.Module, rest: Mapping[str, nn.Parameter], sources: Sequence[PlanSource],
    compiled: Sequence[ParallelModel], world: World,
) -> None:  # fmt: skip
    """Gradients of the rest are means over the data-parallel groups, and its buffers those of the first."""
    replicas = [replicas_of(source, world.size) for source in sources]
    if any(other != replicas[0] for other in replicas):
        raise InputError("the parts have different data-parallel groups; give them plans with the same mesh")
    mesh, axes = replicas[0]
    layouts = {key: make_layout([[] for _ in p.shape], dict.fromkeys(axes, REPLICATE)) for key, p in rest.items()}
    specs = [
        ParameterSpec(
            keys=(key,),
            shape=tuple(p.shape),
            dtype=str(p.dtype).removeprefix("torch."),
            layout=layouts[key],
            trainable=p.requires_grad,
        )
        for key, p in rest.items()
    ]
    groups = Groups(mesh, [*wanted_groups(specs, mesh), axes], apart=True)
    for parameter in rest.values():
        if parameter.requires_grad:
            check_alone(parameter, 0)
            parameter.register_hook(lambda gradient: gradient / groups[axes].size)  # type: ignore[no-untyped-call]
    sync = GradientSync(list(zip(specs, rest.values(), strict=True)), groups)
    compiled[0].sync_too(sync)
    for part in compiled:
        part.stand(groups[axes].index, groups[axes].size)
    paths = [path for path, other in model.named_modules() if other in compiled]
    buffers = list(_rest_buffers(model, paths).values())

    def share(module: nn.Module, args: object) -> None:
        if module.training and groups[axes].process_group is not None:
            for buffer in buffers:
                dist.broadcast(buffer, groups[axes].ranks[0], group=groups[axes].process_group)

    if buffers:
        model.register_forward_pre_hook(share)

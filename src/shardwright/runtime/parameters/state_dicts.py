"""State dicts with the original keys, whose values are pieces that know where they belong.

Values are plain tensors where they are replicated on every rank, and shards where they are not (`state_values`).
Optimizer state goes the same way, under the keys of the parameters it belongs to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.errors import InputError, LayoutError, raise_all
from shardwright.layout import Mesh
from shardwright.storage import ParameterSpec

from ..world import Groups, here
from .full_tensors import gather_tensor, true_dtype
from .refresh import renew
from .sharded import ShardedParameter, Untouched, true_value
from .state_values import PartialState, ShardTensor, as_state, local_of, region_of_value

# -- the model ---------------------------------------------------------------------------------


def state_dict(
    specs: Iterable[ParameterSpec],
    parameters: Mapping[str, ShardedParameter],
    buffers: Mapping[str, Tensor],
    groups: Groups,
) -> dict[str, Tensor]:
    """Every key of the original model that is here, with this rank's piece; buffers whole. Shares the model's memory.

    Of a parameter with a float32 master it is the master: what is saved in one precision is loaded in another.
    """
    values: dict[str, Tensor] = {}
    for spec in specs:
        true = true_value(parameters[spec.name])
        value = as_state(true, spec, true.spread, groups)
        values.update(dict.fromkeys(spec.keys, value))
    values.update({key: buffer.detach() for key, buffer in buffers.items()})
    return PartialState(values) if groups.mesh.size < here().size else values


def full_state_dict(
    specs: Iterable[ParameterSpec],
    parameters: Mapping[str, ShardedParameter],
    buffers: Mapping[str, Tensor],
    groups: Groups,
    rank: int | None = None,
    pp_ranks: Seats = (),
) -> dict[str, Tensor]:
    """Whole tensors under the original keys, on every rank or only on `rank`. All ranks must call it."""
    values: dict[str, Tensor] = {}
    keep = rank is None or here().rank == rank
    own: dict[str, Tensor] = {}
    for spec in specs:
        with Untouched():
            true = true_value(parameters[spec.name])
            full = gather_tensor(true, spec, groups, true.spread).as_subclass(Tensor)
        if keep or len(pp_ranks) > 1:
            own[spec.name] = full
    every = [spec for _, stage_specs in pp_ranks for spec in stage_specs] if len(pp_ranks) > 1 else specs
    whole_of = spread_out(own, pp_ranks)
    for spec in every if keep else ():
        tensor = whole_of[spec.name]
        assert tensor is not None
        values.update(dict.fromkeys(spec.keys, tensor))
    return {**values, **{key: buffer.detach().clone() for key, buffer in buffers.items()}} if keep else {}


Seats = Sequence[tuple[Mesh, Sequence[ParameterSpec]]]
"""For each mesh of a pipeline what its ranks hold; () if there is one mesh."""


def spread_out(values: Mapping[str, Tensor | None], pp_ranks: Seats) -> dict[str, Tensor | None]:
    """Whole tensors by first key, on all ranks, from the first mesh that holds each. All ranks must call it."""
    if len(pp_ranks) < 2:
        return dict(values)
    gathered: dict[str, Tensor | None] = {}
    device = here().device
    for mesh, specs in pp_ranks:
        source = mesh.devices[0]
        for spec in (spec for spec in specs if spec.name not in gathered):
            own = values.get(spec.name)
            there = torch.tensor(own is not None, device=device)
            dist.broadcast(there, source)
            if bool(there):
                empty = torch.empty(spec.shape if own is None else (), dtype=true_dtype(spec), device=device)
                full = empty if own is None else own.contiguous()
                dist.broadcast(full, source)
                gathered[spec.name] = full
            else:
                gathered[spec.name] = None
    return gathered


@torch.no_grad()
def load_state(
    values: Mapping[str, Any],
    specs: Iterable[ParameterSpec],
    parameters: Mapping[str, ShardedParameter],
    buffers: Mapping[str, Tensor],
    groups: Groups,
    strict: bool = True,
    elsewhere: Iterable[str] = (),
) -> Any:
    """Load whole tensors (each rank cuts its piece) or pieces: of the same layout as they are, else by gathering.

    Returns what `nn.Module.load_state_dict` returns: the missing and the unexpected keys.
    """
    specs = list(specs)
    known = {key for spec in specs for key in spec.keys} | set(buffers) | set(elsewhere)
    missing = [spec.name for spec in specs if not any(key in values for key in spec.keys)]
    missing += [key for key in buffers if key not in values]
    unexpected = [key for key in values if key not in known]
    if strict:
        faults = [f"missing: {key}" for key in missing] + [f"unexpected: {key}" for key in unexpected]
        raise_all(InputError, f"the state dict does not fit the model{_wrapped_keys(unexpected)}:", faults)
    for spec in specs:
        key = next((key for key in spec.keys if key in values), None)
        if key is not None:
            true = true_value(parameters[spec.name])
            local = region_of_value(values[key], spec, true.spread, groups)
            with Untouched():
                true.copy_(local)
    renew(parameters[spec.name] for spec in specs)
    for key, buffer in buffers.items():
        if key in values:
            value = values[key]
            buffer.copy_(value.full_tensor() if isinstance(value, (DTensor, ShardTensor)) else value)
    return torch.nn.modules.module._IncompatibleKeys(missing, unexpected)


def _wrapped_keys(unexpected: Sequence[str]) -> str:
    """What to do about keys that a wrapper of the saved model has left."""
    for prefix in ("module.", "_orig_mod."):
        if unexpected and all(key.startswith(prefix) for key in unexpected):
            return f" (DDP or torch.compile left {prefix!r} in its keys; take it off: key.removeprefix({prefix!r}))"
    return ""


# -- the optimizer -----------------------------------------------------------------------------


def loaded_state(state: Mapping[str, Any], leaf: Any) -> dict[str, Any]:
    """A parameter's state, of whole tensors or pieces, as it is kept here: cut as the leaf is, with its own memory."""
    if not isinstance(leaf, ShardedParameter) or leaf.groups is None:
        return {key: _own(value) for key, value in state.items()}
    spec, groups = leaf.spec, leaf.groups
    fits = {k for k, v in state.items() if isinstance(v, Tensor) and tuple(v.shape) == spec.shape}
    leaf.sharded_keys = frozenset(fits) if spec.shape else None
    return {
        k: region_of_value(v, spec, leaf.spread, groups).clone() if k in fits else _own(v) for k, v in state.items()
    }


def name_of(leaf: Any) -> str:
    """The key of what an optimizer updates, in the user's module: of a piece, or of a parameter beside the parts."""
    if isinstance(leaf, ShardedParameter) and leaf.groups is not None:
        return (leaf if leaf.owner is None else leaf.owner).prefix + leaf.spec.name
    if not hasattr(leaf, "key"):
        raise LayoutError("the optimizer holds a parameter that is no piece of the model; save its state yourself")
    return str(leaf.key)


def state_value(leaf: Any, name: str, value: Any) -> Any:
    """A value of an optimizer's state, as a piece if it is one of those with the parameter's shape."""
    if not isinstance(value, Tensor) or not isinstance(leaf, ShardedParameter):
        return value
    sharding = (
        name in leaf.sharded_keys if leaf.sharded_keys is not None else value.shape == leaf.shape and value.dim() > 0
    )
    assert leaf.groups is not None
    return as_state(value, leaf.spec, leaf.spread, leaf.groups) if sharding else value


def _own(value: Any) -> Any:
    return local_of(value).clone() if isinstance(value, Tensor) else value

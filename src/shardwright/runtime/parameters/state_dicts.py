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
from torch.optim import Optimizer

from shardwright.errors import InputError, LayoutError, raise_all
from shardwright.layout import Mesh
from shardwright.storage import ParameterSpec

from ..world import Groups, here
from .full_tensors import gather_tensor, true_dtype
from .refresh import renew
from .sharded import ShardedParameter, Untouched, keeps_share, true_value
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


def optimizer_state_dict(optimizer: Optimizer) -> dict[str, Any]:
    """{"state": {key: {name: value}}, "param_groups": [..]} with parameters named by their first key."""
    state: dict[str, dict[str, Any]] = {}
    groups = []
    for group in optimizer.param_groups:
        names = []
        for leaf in group["params"]:
            names.append(name_of(leaf))
            if leaf in optimizer.state:
                state[names[-1]] = {k: state_value(leaf, k, v) for k, v in optimizer.state[leaf].items()}
        groups.append({**{key: value for key, value in group.items() if key != "params"}, "params": names})
    return {"state": state, "param_groups": groups}


def load_optimizer_state_dict(optimizer: Optimizer, values: Mapping[str, Any]) -> None:
    """Load what `optimizer_state_dict` gave, under this or another plan, with whole tensors or pieces."""
    if len(values["param_groups"]) != len(optimizer.param_groups):
        raise InputError(
            f"the state has {len(values['param_groups'])} param groups, the optimizer {len(optimizer.param_groups)}; "
            "build the optimizer as it was when the state was saved"
        )
    for group, saved in zip(optimizer.param_groups, values["param_groups"], strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})
        for leaf in group["params"]:
            state = values["state"].get(name_of(leaf))
            if state is None:
                optimizer.state.pop(leaf, None)
                continue
            optimizer.state[leaf] = loaded_state(state, leaf)


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


def fill_state(optimizer: Optimizer) -> None:
    """Give a fresh optimizer the state it would have after a step, as a place to load into; changes no parameter."""
    if optimizer.state:
        return
    leaves = [leaf for group in optimizer.param_groups for leaf in group["params"] if leaf.requires_grad]
    owners: list[Any] = [leaf if getattr(leaf, "owner", None) is None else leaf.owner for leaf in leaves]
    takers = [leaf if keeps_share(leaf) else owner for leaf, owner in zip(leaves, owners, strict=True)]
    with Untouched(), torch.no_grad():
        before = [(tensor, tensor.detach().clone()) for tensor in dict.fromkeys((*owners, *leaves))]
        gradients = [taker.grad for taker in takers]
        for taker in takers:
            taker.grad = torch.zeros_like(taker, dtype=taker.grad_dtype)
    optimizer.step()
    with Untouched(), torch.no_grad():
        for owner, value in before:
            owner.copy_(value)
        for taker, gradient in zip(takers, gradients, strict=True):
            taker.grad = gradient


def without_unsaved(values: dict[str, Any], saved: Iterable[str], prefix: str = "optimizer") -> dict[str, Any]:
    """An optimizer's state dict without the parameters that had no state when `saved` keys were written.

    `saved` are the keys of a checkpoint's metadata, `prefix` is where in the checkpoint the optimizer is.
    A parameter that was never used has no state there, and asking for it would be an error.
    """
    keys = tuple(saved)
    there = {name for name in values["state"] if any(key.startswith(f"{prefix}.state.{name}.") for key in keys)}
    return {**values, "state": {name: state for name, state in values["state"].items() if name in there}}


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

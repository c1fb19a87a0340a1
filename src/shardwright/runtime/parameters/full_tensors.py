"""Between full tensors and the shards of a rank, as a `ParameterSpec` describes them. Autograd has no part in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardwright.errors import LayoutError
from shardwright.layout import Layout, Shard
from shardwright.storage import ParameterSpec, stored_layout

from ..collectives import blocks, process_group
from ..faults import flight_recorder
from ..world import Groups


def compute_dtype(spec: ParameterSpec) -> torch.dtype:
    """The dtype that a parameter is computed with and sent in."""
    return torch_dtype(spec.dtype)


def true_dtype(spec: ParameterSpec) -> torch.dtype:
    """The dtype of a parameter's true value and of its gradient."""
    return torch_dtype(spec.true_dtype)


def torch_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def coordinates(groups: Groups) -> dict[str, int]:
    """Where this rank stands on each axis of the mesh."""
    return {name: groups[name].index for name in groups.mesh.names}


def shard_tensor(
    full: Tensor, spec: ParameterSpec, sizes: Mapping[str, int], at: Mapping[str, int], layout: Layout | None = None
) -> Tensor:
    """This rank's shard of a full tensor (a value or a gradient), with its own memory."""
    if tuple(full.shape) != spec.shape:
        raise LayoutError(
            f"parameter {spec.name} has shape {spec.shape}, got a tensor of shape {tuple(full.shape)}; "
            "load a state dict of the model that was compiled"
        )
    local = full.detach().as_subclass(Tensor)
    for dim, shards in enumerate((layout or stored_layout(spec, sizes)).shards):
        for sharding in shards:
            local = blocks.shard(local, dim, sharding, sizes[sharding.axis], at[sharding.axis])
    return local.clone(memory_format=torch.contiguous_format)


def gather_tensor(local: Tensor, spec: ParameterSpec, groups: Groups, layout: Layout | None = None) -> Tensor:
    """The full tensor from every rank's shard, on every rank. All ranks of the mesh must call it."""
    sizes = groups.mesh.sizes
    full = local.detach().as_subclass(Tensor)
    for dim, shards in enumerate((layout or stored_layout(spec, sizes)).shards):
        for sharding in reversed(shards):  # only the minor-most shard can be joined directly
            full = _gather_shard(full, dim, sharding, groups)
    return full.clone() if full.data_ptr() == local.data_ptr() else full


def _gather_shard(local: Tensor, dim: int, sharding: Shard, groups: Groups) -> Tensor:
    group = groups[sharding.axis]
    if group.process_group is None:
        return local
    mine = blocks.fill(local, dim, sharding, group.size, group.index).contiguous()
    every = mine.new_empty((group.size, *mine.shape))
    flight_recorder.enter("all_gather", group.process_group, "a whole tensor")
    process_group.all_gather(every.view(-1), mine.view(-1), group.process_group).wait()
    return blocks.unstack(every, dim, sharding).contiguous()


def name_some(names: Sequence[str]) -> str:
    """Some names of many."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"

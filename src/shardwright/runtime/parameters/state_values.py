"""The values of state dicts: what a rank holds of a tensor, and of which part of the whole.

    the tensor is                                      its value
    ------------------------------------------------   ------------------------------------------------------
    replicated on every rank                           a plain tensor, as on one device
    one box of the whole, as a DTensor can say it      a `ShardedState`: a DTensor, which other tools understand
    several boxes (the rows of q, k and v), or cut     a `ShardTensor`
    by two axes in another order than a DTensor's
    in a pipeline, where other ranks have other keys   one of the two, though it may be whole

    rows of (3 h e), h cut over tp     rank 0  [q0 q1][k0 k1][v0 v1]    three boxes

`torch.distributed.checkpoint` saves them under one plan and loads them under another, since both say which
boxes they hold; both have `full_tensor()`. What no rank can do alone is write the model: `torch.save` on rank
0 would keep a part of it. So both refuse to be pickled, and name what does it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

from shardwright.errors import InputError
from shardwright.layout import Layout, Mesh, local_region
from shardwright.storage import ParameterSpec, sharding_axes

from ..world import Groups, here
from .full_tensors import coordinates, gather_tensor, shard_tensor
from .local_ops import INSTEAD
from .sharded import Untouched


class Unpicklable:
    """A shard, which one rank must not write as if it were the tensor; ranks may copy it in memory."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        name, local, shape = self._described()
        raise InputError(
            f"{name} is not whole here: this rank holds {tuple(local)} of {tuple(shape)}, and what it writes by itself "
            f"would be a part of {'the model' if local != shape else 'a pipeline'}. {INSTEAD}"
        )

    def _described(self) -> tuple[str, torch.Size, torch.Size]:
        raise NotImplementedError

    __reduce_ex__ = storage = untyped_storage = data_ptr = numpy = _refuse


class PartialState(dict[str, Any]):
    """A state dict of which other ranks have other keys, as in a pipeline."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise InputError(f"this rank has the state of its own pipeline stages only, not of all. {INSTEAD}")

    def __deepcopy__(self, memo: dict[int, Any]) -> PartialState:
        return PartialState(copy.deepcopy(dict(self), memo))


class ShardTensor(Unpicklable, Tensor):
    """Some boxes of a whole tensor: has the whole's shape, holds `local`. Implements torch's _Checkpointable."""

    local: Tensor
    spec: ParameterSpec
    spread: Layout
    groups: Groups

    def __new__(cls, local: Tensor, spec: ParameterSpec, layout: Layout, groups: Groups) -> ShardTensor:
        tensor = torch.Tensor._make_wrapper_subclass(cls, spec.shape, dtype=local.dtype, device=local.device)
        tensor.local, tensor.spec, tensor.spread, tensor.groups = local.detach(), spec, layout, groups
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0]._like(args[0].local)
        if func in (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            return args[0]._like(func(args[0].local, *args[1:], **(kwargs or {})))
        name = args[0].spec.name if args and isinstance(args[0], ShardTensor) else "a parameter"
        raise InputError(
            f"{func} was called on a shard of {name}; use .full_tensor() for the whole, .local for what this rank holds"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardTensor:
        return memo.setdefault(id(self), self._like(self.local.clone()))  # type: ignore[no-any-return]

    def _described(self) -> tuple[str, torch.Size, torch.Size]:
        return self.spec.name, self.local.shape, torch.Size(self.spec.shape)

    def _like(self, local: Tensor) -> ShardTensor:
        return ShardTensor(local, self.spec, self.spread, self.groups)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardTensor({self.spec.name}, {tuple(self.local.shape)} of {self.spec.shape}, {self.spread})"

    def full_tensor(self) -> Tensor:
        """The whole tensor. All ranks must call it."""
        return gather_tensor(self.local, self.spec, self.groups, self.spread)

    @property
    def boxes(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...]:
        """(offset in the whole, offset in `local`, sizes) of each box."""
        sizes = self.groups.mesh.sizes
        return local_region(self.spread, self.spec.shape, sizes, coordinates(self.groups)).boxes

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(self.spec.shape)),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offset), torch.Size(size)) for offset, _, size in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for offset, at, sizes in self.boxes:
            if index.offset is not None and tuple(index.offset) == offset:
                shard = self.local
                for dim, (start, length) in enumerate(zip(at, sizes, strict=True)):
                    shard = shard.narrow(dim, start, length)
                return shard
        raise InputError(f"{index.fqn}: this rank holds no box at {index.offset}")


class ShardedState(Unpicklable, DTensor):
    """A DTensor of which this rank has a shard. What is computed of it is one too, so that it can't be pickled."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        with Untouched():
            result = func(*args, **(kwargs or {}))
        return pytree.tree_map_only(DTensor, sharded_state, result)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedState:
        return memo.setdefault(id(self), self.clone())  # type: ignore[no-any-return]

    def _described(self) -> tuple[str, torch.Size, torch.Size]:
        return "a tensor", self._local_tensor.shape, self.shape


def sharded_state(value: DTensor) -> DTensor:
    """A DTensor as the value of a state dict, if ranks have shards of it."""
    if type(value) is not DTensor or value.requires_grad or all(placed.is_replicate() for placed in value.placements):
        return value
    return ShardedState(value._local_tensor, value._spec, requires_grad=False)  # type: ignore[no-untyped-call]


_meshes: WeakKeyDictionary[Groups, DeviceMesh | None] = WeakKeyDictionary()


def as_state(local: Tensor, spec: ParameterSpec, layout: Layout, groups: Groups) -> Tensor:
    """What a rank holds as the value of a state dict (see above for which kind)."""
    if groups not in _meshes:
        _meshes[groups] = groups.device_mesh()
    mesh = _meshes[groups]
    with Untouched():
        local = local.detach().as_subclass(Tensor)
    if not sharding_axes(layout, groups.mesh) and groups.mesh.size == here().size:
        return local
    placements = _placements(layout, groups.mesh)
    if placements is None or mesh is None or all(placed.is_replicate() for placed in placements):
        return ShardTensor(local, spec, layout, groups)
    return _from_local(local, mesh, placements, torch.Size(spec.shape))


def _from_local(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return sharded_state(DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride))


def _placements(layout: Layout, mesh: Mesh) -> list[Placement] | None:
    """The layout in DTensor's words, for the axes longer than one, or None if it has no words for it."""
    names = [axis.name for axis in mesh.axes if axis.size > 1]
    placements: list[Placement] = [Replicate() for _ in names]
    for dim, every in enumerate(layout.shards):
        shards = [sharding for sharding in every if sharding.axis in names]
        order = [names.index(sharding.axis) for sharding in shards]
        if order != sorted(order):
            return None
        for sharding in shards:
            parts = mesh.sizes[sharding.axis]
            if not sharding.simple(parts) or not (sharding.even(parts) or sharding.blocks[0].inner == 1):
                return None
            placements[names.index(sharding.axis)] = Shard(dim)
    return placements


def shard_like(value: Tensor) -> Tensor:
    """The same shard with memory of its own, to be filled."""
    if isinstance(value, ShardTensor):
        return value._like(torch.empty_like(value.local))
    assert isinstance(value, DTensor)
    return _from_local(torch.empty_like(value.to_local()), value.device_mesh, value.placements, value.shape)


def local_of(value: Tensor) -> Tensor:
    if isinstance(value, ShardTensor):
        return value.local
    return value.to_local() if isinstance(value, DTensor) else value


def region_of_value(value: Tensor, spec: ParameterSpec, layout: Layout, groups: Groups) -> Tensor:
    """What this rank holds under `layout` of a value that is whole or a shard."""
    if isinstance(value, ShardTensor):
        same = value.spread.shards == layout.shards and value.groups.mesh == groups.mesh
        value = value.local if same else value.full_tensor()
        if same:
            return value
    elif isinstance(value, DTensor):
        mine = as_state(torch.empty(0), spec, layout, groups) if _placements(layout, groups.mesh) is not None else None
        if isinstance(mine, DTensor) and mine.device_mesh == value.device_mesh and mine.placements == value.placements:
            return value.to_local()
        value = value.full_tensor()
    return shard_tensor(value, spec, groups.mesh.sizes, coordinates(groups), layout)

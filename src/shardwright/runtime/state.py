"""State dicts with the original keys, whose values are pieces that know where they belong.

`torch.distributed.checkpoint` saves a state dict under one plan and loads it under another
if its values say which boxes of the whole tensor they hold. A DTensor says it for one box,
and is what other tools understand, so it is used wherever it is true. A piece of a fused
weight is several boxes (the rows of q, k and v), and a dim cut by two axes may be cut in
another order than a DTensor's mesh has; for these there is `PieceTensor`. Both have
`full_tensor()`.

    rows of (3 h e), h cut over tp     rank 0  [q0 q1][k0 k1][v0 v1]    three boxes

Optimizer state goes the same way, under the keys of the parameters it belongs to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.optim import Optimizer

from shardwright.errors import InputError, LayoutError, raise_all
from shardwright.layout import Layout, Mesh, piece_of

from .holding import Held, coordinates, gather, scatter
from .parameters import ShardParameter, Untouched, keeps_share, true_value
from .refresh import renew
from .world import Groups, here


class PieceTensor(Tensor):
    """Some boxes of a whole tensor: has the whole's shape, holds `local`. Implements torch's _Checkpointable."""

    local: Tensor
    held: Held
    spread: Layout
    groups: Groups

    def __new__(cls, local: Tensor, held: Held, layout: Layout, groups: Groups) -> PieceTensor:
        made = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=local.dtype, device=local.device)
        made.local, made.held, made.spread, made.groups = local.detach(), held, layout, groups
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0]._like(args[0].local)
        if func is torch.ops.aten.clone.default:
            return args[0]._like(args[0].local.clone())
        name = args[0].held.name if args and isinstance(args[0], PieceTensor) else "a parameter"
        raise InputError(
            f"{func} was called on a piece of {name}; use .full_tensor() for the whole, .local for what this rank holds"
        )

    def _like(self, local: Tensor) -> PieceTensor:
        return PieceTensor(local, self.held, self.spread, self.groups)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PieceTensor({self.held.name}, {tuple(self.local.shape)} of {self.held.shape}, {self.spread})"

    def full_tensor(self) -> Tensor:
        """The whole tensor. All ranks must call it."""
        return gather(self.local, self.held, self.groups, self.spread)

    @property
    def boxes(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...]:
        """(offset in the whole, offset in `local`, sizes) of each box."""
        sizes = self.groups.mesh.sizes
        return piece_of(self.spread, self.held.shape, sizes, coordinates(self.groups)).boxes

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(self.held.shape)),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offset), torch.Size(size)) for offset, _, size in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for offset, at, sizes in self.boxes:
            if index.offset is not None and tuple(index.offset) == offset:
                found = self.local
                for dim, (start, length) in enumerate(zip(at, sizes, strict=True)):
                    found = found.narrow(dim, start, length)
                return found
        raise InputError(f"{index.fqn}: this rank holds no box at {index.offset}")


_meshes: WeakKeyDictionary[Groups, DeviceMesh | None] = WeakKeyDictionary()


def as_state(local: Tensor, held: Held, layout: Layout, groups: Groups) -> Tensor:
    """A piece as the value of a state dict: a DTensor if that can say it, a `PieceTensor` if not."""
    if groups not in _meshes:
        _meshes[groups] = groups.device_mesh()
    mesh = _meshes[groups]
    with Untouched():
        local = local.detach().as_subclass(Tensor)
    if mesh is None:
        return local
    placements = _placements(layout, groups.mesh)
    if placements is None:
        return PieceTensor(local, held, layout, groups)
    whole = torch.empty(held.shape, device="meta")
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(held.shape), stride=whole.stride()
    )


def _placements(layout: Layout, mesh: Mesh) -> list[Placement] | None:
    """The layout in DTensor's words, for the axes longer than one, or None if it has no words for it."""
    names = [axis.name for axis in mesh.axes if axis.size > 1]
    found: list[Placement] = [Replicate() for _ in names]
    for dim, every in enumerate(layout.cuts):
        cuts = [cut for cut in every if cut.axis in names]
        order = [names.index(cut.axis) for cut in cuts]
        if order != sorted(order):
            return None
        for cut in cuts:
            parts = mesh.sizes[cut.axis]
            if not cut.simple(parts) or not (cut.even(parts) or cut.blocks[0].inner == 1):
                return None
            found[names.index(cut.axis)] = Shard(dim)
    return found


def piece_like(value: Tensor) -> Tensor:
    """The same piece with memory of its own, to be filled."""
    if isinstance(value, PieceTensor):
        return value._like(torch.empty_like(value.local))
    assert isinstance(value, DTensor)
    local = torch.empty_like(value.to_local())
    placed = (value.device_mesh, value.placements)
    return DTensor.from_local(local, *placed, run_check=False, shape=value.shape, stride=value.stride())


def _local(value: Tensor) -> Tensor:
    if isinstance(value, PieceTensor):
        return value.local
    return value.to_local() if isinstance(value, DTensor) else value


# -- the model ---------------------------------------------------------------------------------


def state_dict(
    held: Iterable[Held], parameters: Mapping[str, ShardParameter], buffers: Mapping[str, Tensor], groups: Groups
) -> dict[str, Tensor]:
    """Every key of the original model with this rank's piece; buffers whole. Shares memory with the model.

    Of a parameter with a float32 master it is the master: what is saved in one precision is loaded in another.
    """
    found: dict[str, Tensor] = {}
    for one in held:
        true = true_value(parameters[one.name])
        value = as_state(true, one, true.spread, groups)
        found.update(dict.fromkeys(one.keys, value))
    return {**found, **{key: buffer.detach() for key, buffer in buffers.items()}}


def full_state_dict(
    held: Iterable[Held],
    parameters: Mapping[str, ShardParameter],
    buffers: Mapping[str, Tensor],
    groups: Groups,
    rank: int | None = None,
    seats: Seats = (),
) -> dict[str, Tensor]:
    """Whole tensors under the original keys, on every rank or only on `rank`. All ranks must call it."""
    found: dict[str, Tensor] = {}
    keep = rank is None or here().rank == rank
    own: dict[str, Tensor] = {}
    for one in held:
        with Untouched():
            true = true_value(parameters[one.name])
            whole = gather(true, one, groups, true.spread).as_subclass(Tensor)
        if keep or len(seats) > 1:
            own[one.name] = whole
    every = [one for _, helds in seats for one in helds] if len(seats) > 1 else held
    whole_of = spread_out(own, seats)
    for one in every if keep else ():
        tensor = whole_of[one.name]
        assert tensor is not None
        found.update(dict.fromkeys(one.keys, tensor))
    return {**found, **{key: buffer.detach().clone() for key, buffer in buffers.items()}} if keep else {}


Seats = Sequence[tuple[Mesh, Sequence[Held]]]
"""For each mesh of a pipeline what its ranks hold; () if there is one mesh."""


def spread_out(values: Mapping[str, Tensor | None], seats: Seats) -> dict[str, Tensor | None]:
    """Whole tensors by first key, on all ranks, from the first mesh that holds each. All ranks must call it."""
    if len(seats) < 2:
        return dict(values)
    found: dict[str, Tensor | None] = {}
    device = here().device
    for mesh, helds in seats:
        source = mesh.devices[0]
        for held in (one for one in helds if one.name not in found):
            own = values.get(held.name)
            there = torch.tensor(own is not None, device=device)
            dist.broadcast(there, source)
            if bool(there):
                empty = torch.empty(held.shape if own is None else (), dtype=held.true_dtype, device=device)
                whole = empty if own is None else own.contiguous()
                dist.broadcast(whole, source)
                found[held.name] = whole
            else:
                found[held.name] = None
    return found


@torch.no_grad()
def load_state(
    values: Mapping[str, Any],
    held: Iterable[Held],
    parameters: Mapping[str, ShardParameter],
    buffers: Mapping[str, Tensor],
    groups: Groups,
    strict: bool = True,
    elsewhere: Iterable[str] = (),
) -> Any:
    """Load whole tensors (each rank cuts its piece) or pieces: of the same layout as they are, else by gathering.

    Returns what `nn.Module.load_state_dict` returns: the missing and the unexpected keys.
    """
    held = list(held)
    known = {key for one in held for key in one.keys} | set(buffers) | set(elsewhere)
    missing = [one.name for one in held if not any(key in values for key in one.keys)]
    missing += [key for key in buffers if key not in values]
    unexpected = [key for key in values if key not in known]
    if strict:
        faults = [f"missing: {key}" for key in missing] + [f"unexpected: {key}" for key in unexpected]
        raise_all(InputError, "the state dict does not fit the model:", faults)
    for one in held:
        key = next((key for key in one.keys if key in values), None)
        if key is not None:
            true = true_value(parameters[one.name])
            piece = piece_of_value(values[key], one, true.spread, groups)
            with Untouched():
                true.copy_(piece)
    renew(parameters[one.name] for one in held)
    for key, buffer in buffers.items():
        if key in values:
            given = values[key]
            buffer.copy_(given.full_tensor() if isinstance(given, (DTensor, PieceTensor)) else given)
    return torch.nn.modules.module._IncompatibleKeys(missing, unexpected)


def piece_of_value(value: Tensor, held: Held, layout: Layout, groups: Groups) -> Tensor:
    """What this rank holds under `layout` of a value that is whole or a piece."""
    if isinstance(value, PieceTensor):
        same = value.spread.cuts == layout.cuts and value.groups.mesh == groups.mesh
        value = value.local if same else value.full_tensor()
        if same:
            return value
    elif isinstance(value, DTensor):
        mine = as_state(torch.empty(0), held, layout, groups) if _placements(layout, groups.mesh) is not None else None
        if isinstance(mine, DTensor) and mine.device_mesh == value.device_mesh and mine.placements == value.placements:
            return value.to_local()
        value = value.full_tensor()
    return scatter(value, held, groups.mesh.sizes, coordinates(groups), layout)


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
            given = values["state"].get(name_of(leaf))
            if given is None:
                optimizer.state.pop(leaf, None)
                continue
            if not isinstance(leaf, ShardParameter):
                optimizer.state[leaf] = {k: _own(v) for k, v in given.items()}
                continue
            held, groups = leaf.held, leaf.groups
            assert groups is not None
            fits = {k for k, v in given.items() if isinstance(v, Tensor) and tuple(v.shape) == held.shape}
            optimizer.state[leaf] = {
                k: piece_of_value(v, held, leaf.spread, groups).clone() if k in fits else _own(v)
                for k, v in given.items()
            }
            leaf.cut_state = frozenset(fits) if held.shape else None


def fill_state(optimizer: Optimizer) -> None:
    """Give a fresh optimizer the state it would have after a step, as a place to load into; changes no parameter."""
    if optimizer.state:
        return
    leaves = [leaf for group in optimizer.param_groups for leaf in group["params"] if leaf.requires_grad]
    owners: list[Any] = [leaf if getattr(leaf, "owner", None) is None else leaf.owner for leaf in leaves]
    takers = [leaf if keeps_share(leaf) else owner for leaf, owner in zip(leaves, owners, strict=True)]
    with Untouched(), torch.no_grad():
        before = [(held, held.detach().clone()) for held in dict.fromkeys((*owners, *leaves))]
        kept = [taker.grad for taker in takers]
        for taker in takers:
            taker.grad = torch.zeros_like(taker, dtype=taker.grad_dtype)
    optimizer.step()
    with Untouched(), torch.no_grad():
        for owner, value in before:
            owner.copy_(value)
        for taker, gradient in zip(takers, kept, strict=True):
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
    if isinstance(leaf, ShardParameter) and leaf.groups is not None:
        return (leaf if leaf.owner is None else leaf.owner).prefix + leaf.held.name
    if not hasattr(leaf, "key"):
        raise LayoutError("the optimizer holds a parameter that is no piece of the model; save its state yourself")
    return str(leaf.key)


def state_value(leaf: Any, name: str, value: Any) -> Any:
    """A value of an optimizer's state, as a piece if it is one of those with the parameter's shape."""
    if not isinstance(value, Tensor) or not isinstance(leaf, ShardParameter):
        return value
    cut = name in leaf.cut_state if leaf.cut_state is not None else value.shape == leaf.shape and value.dim() > 0
    assert leaf.groups is not None
    return as_state(value, leaf.held, leaf.spread, leaf.groups) if cut else value


def _own(value: Any) -> Any:
    return _local(value).clone() if isinstance(value, Tensor) else value

"""What DTensor says about an op: which shardings of its inputs it takes as they are, and what comes out.

Asked one op at a time on a mesh of two that exists only in name. A layout of ours with one plain cut is
a `Shard`, one without is `Replicate` (DTensor says nothing about gradients), a partial sum is `Partial`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwright.ir import Dtype, Op
from shardwright.ir.graph import Slot
from shardwright.layout import Axis, Layout, Mesh
from shardwright.layout import Partial as Sum
from shardwright.rules import Analysis

Placements = tuple[str, ...]
Opinion = dict[Placements, Placements]
"""From the placements of the inputs to those of the outputs."""


@contextmanager
def mesh_of_two() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        dist.destroy_process_group()


def overload_of(target: str) -> Any:
    space, name, overload = target.split(".")
    return getattr(getattr(getattr(torch.ops, space), name), overload)


def knows(target: str) -> bool:
    prop = DTensor._op_dispatcher.sharding_propagator
    op = overload_of(target)
    return op in prop.op_strategy_funcs or op in prop.op_to_rules or op in prop.op_single_dim_strategy_funcs


def theirs(mesh: DeviceMesh, analysis: Analysis, op: Op) -> Opinion:
    """Every sharding of the inputs, one dim of each or none, that DTensor takes without moving data."""
    shapes = [analysis.graph.values[name].shape for name in op.inputs]
    ways = [[None, *(dim for dim, size in enumerate(shape) if size > 1)] for shape in shapes]
    metas = [_meta(analysis, name) for name in op.inputs]
    by_name: Opinion = {}
    with _shapes_once():
        for picked in itertools.product(*ways):
            if all(dim is None for dim in picked):
                continue
            specs = [
                DTensorSpec(mesh, (Replicate() if dim is None else Shard(dim),), meta)
                for dim, meta in zip(picked, metas, strict=True)
            ]
            built = _propagated(op, specs)
            if built is not None:
                by_name[tuple(_letter(spec) for spec in specs)] = tuple(_letter(spec) for spec in built)
    return by_name


@contextmanager
def _shapes_once() -> Iterator[None]:
    """Within this DTensor finds out once what shapes an op makes: they are the same for all shardings."""
    prop = DTensor._op_dispatcher.sharding_propagator
    find: Any = prop._propagate_tensor_meta_non_cached
    known: list[Any] = []

    def once(schema: OpSchema) -> Any:
        if not known:
            known.append(find(schema))
        return known[0]

    with mock.patch.object(prop, "_propagate_tensor_meta_non_cached", once):
        yield


def _propagated(op: Op, specs: list[DTensorSpec]) -> list[DTensorSpec] | None:
    """The specs of the outputs, or None if DTensor would move data first, or can't."""
    overload = overload_of(op.target)
    by_key = {name: _placed(value, specs) for name, value in op.arguments}
    args = []
    schema = [argument for argument in overload._schema.arguments if not argument.kwarg_only]
    for argument in schema:
        if argument.name not in by_key:
            break
        args.append(by_key.pop(argument.name))
    prop = DTensor._op_dispatcher.sharding_propagator
    try:
        actual = prop.propagate_op_sharding_non_cached(OpSchema(overload, tuple(args), by_key))
    except Exception:  # DTensor raises many kinds of error for what it can't shard
        return None
    if actual.needs_redistribute or actual.output_spec is None:
        return None
    stored = actual.output_spec if isinstance(actual.output_spec, tuple | list) else (actual.output_spec,)
    return [spec for spec in stored if spec is not None]


def _placed(value: Any, specs: list[DTensorSpec]) -> Any:
    if isinstance(value, Slot):
        return specs[value.index]
    if isinstance(value, Dtype):
        return getattr(torch, value)
    return [_placed(item, specs) for item in value] if isinstance(value, tuple) else value


def _meta(analysis: Analysis, name: str) -> TensorMeta:
    value = analysis.graph.values[name]
    tensor = torch.empty(value.shape, dtype=getattr(torch, value.dtype), device="meta")
    return TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)


def _letter(spec: DTensorSpec) -> str:
    (placement,) = spec.placements
    if isinstance(placement, Shard):
        return f"S{placement.dim}"
    if isinstance(placement, Partial):
        return f"P{placement.reduce_op}"
    return "R" if isinstance(placement, Replicate) else str(placement)


def ours(analysis: Analysis, op: Op) -> tuple[Opinion, int]:
    """The same of our rule, and how many of its splits DTensor has no words for (a factor of a dim, sections)."""
    mesh = Mesh(axes=(Axis(name="tp", size=2),))
    signature = analysis.signatures[op.name]
    by_name: Opinion = {}
    beyond = 0
    for role in signature.roles:
        if not role.fills(2):
            continue
        inputs, outputs = signature.layouts({"tp": role.name}, mesh)
        message = [[_ours_said(layout) for layout in side] for side in (inputs, outputs)]
        if any(word is None for side in message for word in side):
            beyond += 1
        else:
            by_name[tuple(map(str, message[0]))] = tuple(map(str, message[1]))
    return by_name, beyond


def _ours_said(layout: Layout) -> str | None:
    for dim, cuts in enumerate(layout.shards):
        for cut in cuts:
            (block, *more) = cut.blocks
            return f"S{dim}" if not more and block.outer == 1 and cut.repeat == 1 else None
    placement = layout.placement("tp")
    return f"P{placement.op}" if isinstance(placement, Sum) else "R"

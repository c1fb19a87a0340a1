"""Tied weights: a parameter of several stages has one gradient, the sum over all stages, equal to the last bit.

Each stage first reduces its own gradient over its mesh, as usual. Then every stage sends it to the
others, point to point and in their layouts, and all add up in the order of the stages:

    stage 0    dW0 ──┐ ┌──▶ dW0 + dW1
    stage 1    dW1 ──┴─┴──▶ dW0 + dW1

With the same gradient and the same optimizer the copies stay equal. A flag goes with each
message: a parameter that no stage used keeps its `.grad`. This happens at the end of a
sync (`GradientSync`), so that it is deferred with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.errors import LayoutError
from shardwright.layout import Layout, Mesh
from shardwright.storage import ParameterSpec, stored_layout, zero_axes

from ..parameters.buckets import BucketSlot, TiedBucket
from ..parameters.full_tensors import true_dtype
from ..parameters.sharded import ShardedParameter, keeps_share, raw_gradient, set_raw_gradient, wrap_gradient
from ..world import here
from .routes import Route, routes
from .transport import Arrival, Transport

Coming = tuple[int, Route, Tensor, Arrival]
"""A received gradient: the stage, the request, the buffer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedParameter:
    """One parameter, on the ranks of several meshes, seen from one of them."""

    shape: tuple[int, ...]  # of this rank's shard
    stages: int
    own: int  # which of the stages this is
    sends: tuple[Route, ...]
    takes: tuple[tuple[int, Route], ...]  # (stage, route from it)


class TiedGradients:
    """The parameters that this rank shares with other stages, by name."""

    def __init__(self, pp_ranks: Sequence[tuple[Mesh, Sequence[ParameterSpec]]]) -> None:
        self.rank = here().rank
        self.pairs: set[tuple[int, int]] = set()
        self._ties: dict[str, TiedParameter] = {}
        self._transport: Transport | None = None
        sides: dict[str, list[tuple[Mesh, ParameterSpec]]] = {}
        for mesh, specs in pp_ranks:
            for spec in specs:
                sides.setdefault(spec.name, []).append((mesh, spec))
        for name, owners in sorted(sides.items()):
            if len(owners) > 1 and owners[0][1].trainable:
                self._tie(name, owners)

    def _tie(self, name: str, sides: Sequence[tuple[Mesh, ParameterSpec]]) -> None:
        here = [at for at, (mesh, _) in enumerate(sides) if self.rank in mesh.devices]
        if len(here) > 1:
            raise LayoutError(f"parameter {name} is stored twice on rank {self.rank}; its stages there can share it")
        sends: list[Route] = []
        takes: list[tuple[int, Route]] = []
        for at, (sender, spec) in enumerate(sides):
            for to, (receiver, other) in enumerate(sides):
                if at != to:
                    legs = routes(
                        _summed_layout(spec, sender), sender, _summed_layout(other, receiver), receiver, spec.shape
                    )
                    self.pairs |= {(leg.source, leg.target) for leg in legs}
                    sends += [leg for leg in legs if leg.source == self.rank]
                    takes += [(at, leg) for leg in legs if leg.target == self.rank]
        if here:
            mesh, own_spec = sides[here[0]]
            shape = _summed_layout(own_spec, mesh).local_shape(own_spec.shape, mesh.sizes, mesh.coordinates(self.rank))
            self._ties[name] = TiedParameter(
                shape=shape, stages=len(sides), own=here[0], sends=tuple(sends), takes=tuple(takes)
            )

    def __contains__(self, name: object) -> bool:
        return name in self._ties

    def connect(self, transport: Transport) -> None:
        """Set the transport to the other stages."""
        self._transport = transport

    @torch.no_grad()
    def finish(self, buckets: Sequence[TiedBucket]) -> None:
        """Exchange the sums of this stage, and set the total. All ranks that share any must call it."""
        if self._transport is None:
            raise LayoutError("parameters are shared by several stages, but there is no transport between them")
        totals = {entry.spec.name: (entry, total) for bucket in buckets for entry, total in bucket.totals()}
        coming = {name: self._exchange(self._ties[name], *totals[name], self._transport) for name in sorted(totals)}
        for name, (entry, own) in sorted(totals.items()):
            total = _added(self._ties[name], own, coming[name])
            if total is not None:
                _hand_out(entry, total)
        self._transport.flush()

    @staticmethod
    def _exchange(tie: TiedParameter, entry: BucketSlot, own: Tensor | None, transport: Transport) -> list[Coming]:
        """Send this stage's sum, and post receives for the others."""
        like = entry.parameter.detach().as_subclass(Tensor)
        mine = torch.zeros_like(like, dtype=entry.bucket.dtype) if own is None else own
        flag = mine.new_full((1,), float(own is not None))
        for leg in tie.sends:
            transport.send(torch.cat([leg.pack(mine).view(-1), flag]), leg.target)
        coming = []
        for stage, leg in tie.takes:
            buffer = mine.new_empty(leg.elements + 1)
            coming.append((stage, leg, buffer, transport.receive(buffer, leg.source)))
        return coming


def _added(tie: TiedParameter, own: Tensor | None, coming: Sequence[Coming]) -> Tensor | None:
    """The sum over all stages, or None if none had a gradient."""
    parts: dict[int, Tensor] = {} if own is None else {tie.own: own}
    for stage, leg, buffer, arrival in coming:
        arrival.wait()
        if buffer[-1].item():
            if stage not in parts:
                parts[stage] = buffer.new_empty(tie.shape)
            leg.unpack(buffer[:-1], parts[stage])
    total: Tensor | None = None
    for stage in sorted(parts):
        total = parts[stage].clone() if total is None else total.add_(parts[stage])
    return total


def _hand_out(entry: BucketSlot, total: Tensor) -> None:
    """Set `.grad` to the total; under ZeRO-2 only this rank's shard."""
    if not entry.seen:
        entry.set_aside()
    parameter = entry.parameter
    shard = parameter.shard if isinstance(parameter, ShardedParameter) and keeps_share(parameter) else None
    if shard is None or shard.slot is None or shard.groups is None:
        entry.hand_out(total)
        return
    place = shard.groups[zero_axes(entry.spec, shard.groups.mesh.sizes)].index
    share, old = shard.slot.owned(total, place).to(shard.device, true_dtype(entry.spec)), raw_gradient(shard)
    if entry.hooks.before:
        share = entry.hooks.change(wrap_gradient(shard, share))
    set_raw_gradient(shard, share.clone() if old is None else old.add_(share))
    set_raw_gradient(parameter, None)
    entry.hooks.tell(parameter)
    entry.seen, entry.true = False, None


def _summed_layout(spec: ParameterSpec, mesh: Mesh) -> Layout:
    """The layout of a summed gradient: that of the stored parameter, replicated on the axes that it is summed over."""
    return Layout(shards=stored_layout(spec, mesh.sizes).shards)

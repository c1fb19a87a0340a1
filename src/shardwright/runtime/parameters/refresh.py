"""After an update of what a rank owns: the rest of its parameters, from the ranks that own that.

Under ZeRO-1 and ZeRO-2 a rank updates some rows of a parameter, and needs all of them to compute with. A
float32 master is cast to the parameter's dtype on the way, so that what is sent is narrow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch

from shardwright.storage import zero_axes

from ..collectives import process_group
from ..faults import flight_recorder
from ..faults.watch import report_failure
from .full_tensors import coordinates
from .packing import Pack
from .sharded import ShardedParameter, Untouched


def renew(parameters: Iterable[ShardedParameter]) -> None:
    """Make parameters what their own shards are: those have been given values. All ranks must call it."""
    behind = [parameter for parameter in parameters if parameter.follows_shard]
    if behind:
        Refresh(behind)()


class Refresh:
    """Brings the rows that other ranks updated into the parameters, one collective for each pack."""

    def __init__(self, parameters: Sequence[ShardedParameter], pack_mb: float = 25.0) -> None:
        self._alone: list[ShardedParameter] = []  # those whose own shard is all of it
        kinds: dict[tuple[tuple[str, ...], str], list[list[ShardedParameter]]] = defaultdict(list)
        room: dict[tuple[tuple[str, ...], str], float] = {}
        for parameter in parameters:
            assert parameter.groups is not None
            axes = zero_axes(parameter.spec, parameter.groups.mesh.sizes) if parameter.slot is not None else ()
            if not axes:
                self._alone.append(parameter)
                continue
            key = (axes, parameter.spec.dtype)
            if not kinds[key] or room[key] < 0:
                kinds[key].append([])
                room[key] = pack_mb * 2**20
            kinds[key][-1].append(parameter)
            with Untouched():
                room[key] -= parameter.numel() * parameter.element_size()
        self._packs = [
            (packed, self._pack(packed, axes), axes) for (axes, _), every in kinds.items() for packed in every
        ]

    @staticmethod
    def _pack(parameters: Sequence[ShardedParameter], axes: tuple[str, ...]) -> Pack:
        groups = parameters[0].groups
        assert groups is not None
        return Pack([p.spec for p in parameters], axes, groups.mesh.sizes, coordinates(groups))

    @report_failure
    @torch.no_grad()
    def __call__(self) -> None:
        with Untouched():
            waiting = []
            for parameter in self._alone:
                assert parameter.shard is not None
                parameter.copy_(parameter.shard)
            for parameters, pack, axes in self._packs:
                groups = parameters[0].groups
                assert groups is not None
                row = parameters[0].new_empty(pack.width)
                for number, parameter in enumerate(parameters):
                    assert parameter.shard is not None
                    pack.own(row, number, groups[axes].index).copy_(parameter.shard)
                flat = row.new_empty(pack.parts * pack.width)
                flight_recorder.enter("all_gather", groups[axes].process_group, "updated parameters")
                work = process_group.all_gather(flat, row, groups[axes].process_group)
                waiting.append((parameters, pack, flat, work))
            for parameters, pack, flat, work in waiting:
                work.wait()
                for number, parameter in enumerate(parameters):
                    pack.take(pack.by_rank(flat), number, parameter)

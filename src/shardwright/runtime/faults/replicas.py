"""Check that what is replicated on several ranks is equal on all of them, bit for bit.

This covers data-parallel replicas, parameters replicated over tensor-parallel ranks, parameters shared by two
stages, and buffers. Each shard has a name made of its key and its region, so that ranks with the same shard find
each other under any plan. A rank sends one number per shard: a hash of its bits, summed in integers
on the device, so that it does not depend on the order of summation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwright.errors import DriftError, raise_all
from shardwright.layout import LocalRegion, local_region
from shardwright.storage import stored_layout

from ..collectives import objects, process_group
from ..model.access import is_compiled, state_of
from ..model.parallel_model import ParallelModel
from ..model.specialization import RankState
from ..parameters.full_tensors import coordinates
from ..parameters.sharded import Untouched
from ..world import here
from . import flight_recorder
from .watch import report_failure

_CHUNK = 1 << 20
_MIX = (-7046029254386353131, -4658895280553007687)  # two odd 64-bit numbers
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """A shard that is not the same on all ranks that have it."""

    name: str
    ranks: tuple[tuple[int, ...], ...]  # ranks that agree with each other; the largest group first

    def __str__(self) -> str:
        most, *others = (", ".join(map(str, ranks)) for ranks in self.ranks)
        return f"{self.name} has other values on rank {' and on rank '.join(others)} than on rank {most}"


def check_replicas(model: nn.Module) -> None:
    """Raise a DriftError that names parameters and ranks if replicas differ. All ranks must call it."""
    differences = drifts(model)
    raise_all(DriftError, "replicas have drifted apart:", [str(drift) for drift in differences])


@report_failure
@torch.no_grad()
def drifts(model: nn.Module) -> tuple[Drift, ...]:
    """Shards that differ between ranks. All ranks must call it: one small all_gather."""
    world = here()
    if world.size < 2:
        return ()
    with Untouched():
        hashes = {name: hash_of(tensor) for name, tensor in _stored_tensors(model)}
    ids = {objects.text_digest(name): name for name in hashes}
    every = _gathered([[number, hashes[name]] for number, name in ids.items()], world.device)
    by_shard: dict[int, dict[int, list[int]]] = {}
    for rank, hashes_of_rank in enumerate(every):
        for number, value in hashes_of_rank:
            by_shard.setdefault(number, {}).setdefault(value, []).append(rank)
    apart = {number: values for number, values in by_shard.items() if len(values) > 1}
    if not apart:
        return ()
    mine = {number: ids[number] for number in apart if number in ids}
    names = {
        number: name
        for their_names in objects.all_gather_objects(mine, "names of what differs")
        for number, name in their_names.items()
    }
    order = {number: at for at, number in enumerate(number for hashes_of_rank in every for number, _ in hashes_of_rank)}
    return tuple(
        Drift(name=names[number], ranks=tuple(sorted(map(tuple, apart[number].values()), key=lambda r: (-len(r), r))))
        for number in sorted(apart, key=order.__getitem__)
    )


def _stored_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All tensors of this rank, each with a name for its region of the global tensor."""
    seen: set[int] = set()
    for path, part in model.named_modules():
        holding = state_of(part) if isinstance(part, ParallelModel) and is_compiled(part) else None
        if holding is not None:
            prefix = f"{path}." if path else ""
            for name, tensor in _parameters_and_buffers(holding):
                yield prefix + name, tensor
            seen |= {id(tensor) for tensor in (*holding.parameters.values(), *holding.buffers.values())}
    for key, tensor in (*model.named_parameters(), *model.named_buffers()):
        if id(tensor) not in seen:
            yield key, tensor


def _parameters_and_buffers(holding: RankState) -> Iterator[tuple[str, Tensor]]:
    sizes, at = holding.groups.mesh.sizes, coordinates(holding.groups)
    for spec in holding.specs:
        region = local_region(stored_layout(spec, sizes), spec.shape, sizes, at)
        yield f"{spec.name}{_index_string(region)}", holding.parameters[spec.name]
    yield from holding.buffers.items()


def _index_string(region: LocalRegion) -> str:
    """The region as an index: [0:4+8:12, :]. Empty if it is the full tensor."""
    if region.local_shape == region.shape:
        return ""
    dims = [
        ":" if runs == ((0, size),) else "+".join(f"{start}:{start + length}" for start, length in runs)
        for size, runs in zip(region.shape, region.spans, strict=True)
    ]
    return f"[{', '.join(dims)}]"


def hash_of(tensor: Tensor) -> int:
    """A 64-bit hash of the bits of a tensor and their positions."""
    plain = tensor.detach()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    flat = plain.contiguous().view(-1)
    flat = (flat.view(torch.uint8) if flat.dtype is torch.bool else flat).view(_INTEGERS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK].to(torch.int64)
        places = torch.arange(start + 1, start + 1 + part.numel(), device=flat.device)
        mixed = (part + places * _MIX[0]) * _MIX[1]
        mixed ^= mixed >> 29
        total += (mixed * _MIX[0]).sum()
    return int(total)


def _gathered(pairs: list[list[int]], device: torch.device) -> list[list[list[int]]]:
    """The (name, hash) pairs of every rank; ranks may have unequal numbers of them."""
    counts = objects.all_gather_numbers(len(pairs), "how many shards ranks have")
    size, most = len(counts), max(counts)
    mine = torch.full((most, 2), -1, dtype=torch.int64, device=device)
    if pairs:
        mine[: len(pairs)] = torch.tensor(pairs, device=device)
    every = torch.empty((size * most, 2), dtype=torch.int64, device=device)
    flight_recorder.enter("all_gather", None, "hashes of what ranks hold")
    process_group.all_gather(every, mine, None).wait()
    return [[pair for pair in padded if pair[0] >= 0] for padded in every.view(size, most, 2).tolist()]

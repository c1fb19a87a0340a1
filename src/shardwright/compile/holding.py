"""The pieces that a rank holds, cut from the original, and what keeps them right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import InputError
from ..layout import Mesh
from ..plan.rows import replica_axes
from ..runtime import roll_call
from ..runtime.gradients import GradientSync
from ..runtime.holding import Held, coordinates, kept_layout, scatter, storage_layout
from ..runtime.hooks import take_hooks
from ..runtime.model import Holding
from ..runtime.parameters import ShardParameter, Untouched, join, make_parameter
from ..runtime.pipeline import Ties
from ..runtime.random import Randomness
from ..runtime.stages import Stages
from ..runtime.state import Seats
from ..runtime.world import Groups, World
from ..runtime.zero import Zero3
from .seats import Seat


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Cuts the parameters of a module. `prefix` is where it is in the user's module, if it is a part of one."""

    module: nn.Module
    world: World
    random: Randomness
    promote: bool = False
    prefix: str = ""
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)  # of buffers that are cast
    wire: torch.dtype | None = None  # in which gradients are summed, if not in their own

    def hold(self, seats: Sequence[Seat], every: Mapping[Mesh, Groups], units: Sequence[str] = ()) -> Holding:
        """What this rank holds. All ranks must call it. `units` are those of ZeRO-3, in their order."""
        self._check_meta()
        seat = next(seat for seat in seats if self.world.rank in seat.mesh.devices)
        groups = every[seat.mesh]
        old = dict(self.module.named_parameters(remove_duplicate=False))
        pieces: dict[str, ShardParameter] = {}
        own = {one.name: one for one in seat.held}
        for key in dict.fromkeys(one.name for held in seats for one in held.held):  # in one order on all ranks
            full = self._shared(old[key])
            if key in own:
                pieces[key] = self._piece(full, own[key], groups)
                take_hooks(pieces[key], old[key])
        buffers = {key: self._buffer(key, held) for key, held in self.module.named_buffers(remove_duplicate=False)}
        every_held = tuple((seat.mesh, seat.held) for seat in seats)
        if len(seats) > 1:
            join(Stages(every_held), pieces.values())
        pairs: list[tuple[Held, nn.Parameter]] = [(one, pieces[one.name]) for one in seat.held]
        holding = Holding(
            groups=groups,
            held=list(seat.held),
            parameters=pieces,
            buffers=buffers,
            sync=self._sync(pairs, groups, every_held),
            zero=self._zero3(pairs, groups, units),
            random=self.random,
            replica_axes=replica_axes(seat.mesh),
            persistent=tuple(key for key in self.module.state_dict(keep_vars=True) if key in buffers),
            seats=every_held,
            empty={key for key in own if old[key].is_meta},
        )
        for key, piece in pieces.items():  # last, since torch takes no hooks of what is frozen
            with Untouched():
                piece.requires_grad_(old[key].requires_grad)
        return holding

    def _check_meta(self) -> None:
        """Parameters may be on meta, on all ranks or on none: those with values share them, and would wait."""
        lost = [key for key, held in self.module.named_buffers() if held.is_meta]
        if lost:
            raise InputError(f"the buffers {', '.join(lost)} are on meta; parameters may be, buffers need values")
        count = sum(held.is_meta for held in self.module.parameters())
        if len(set(roll_call.numbers(count, "how many parameters are on meta"))) > 1:
            raise InputError("some ranks have parameters on meta and others have them with values; make all alike")

    def replaced(
        self, pieces: Mapping[str, ShardParameter], seats: Sequence[Seat]
    ) -> dict[nn.Parameter, ShardParameter | None]:
        """What stands for each parameter of the original on this rank: None if it is held elsewhere."""
        old = dict(self.module.named_parameters(remove_duplicate=False))
        held = [one for seat in seats for one in seat.held]
        return {old[key]: pieces.get(one.name) for one in held for key in one.keys}

    def _sync(self, pairs: Sequence[tuple[Held, nn.Parameter]], groups: Groups, seats: Seats) -> GradientSync | None:
        ties = Ties(seats) if len(seats) > 1 else None
        alone = ties is None and groups.mesh.size == 1
        return None if alone else GradientSync(pairs, groups, ties=ties, dtype=self.wire)

    def _zero3(self, pairs: Sequence[tuple[Held, nn.Parameter]], groups: Groups, order: Sequence[str]) -> Zero3 | None:
        units: dict[str, list[tuple[Held, nn.Parameter]]] = {}
        for one, parameter in pairs:
            if one.level == 3:
                units.setdefault(one.unit, []).append((one, parameter))
        return Zero3(units, groups, [unit for unit in order if unit in units], self.wire) if units else None

    def _piece(self, full: Tensor, held: Held, groups: Groups) -> ShardParameter:
        sizes = groups.mesh.sizes
        local = self._here(scatter(full.to(held.dtype), held, sizes, coordinates(groups), kept_layout(held, sizes)))
        master = None
        if held.master:
            layout = storage_layout(held, sizes)
            master = self._here(scatter(full.to(held.true_dtype), held, sizes, coordinates(groups), layout))
        made = make_parameter(local, held, groups, master)
        made.prefix = self.prefix
        return made

    def _here(self, local: Tensor) -> Tensor:
        """A piece on this rank's device; values of what was on meta come with a checkpoint, and nothing runs before."""
        return torch.empty_like(local, device=self.world.device) if local.is_meta else local

    def _buffer(self, key: str, buffer: Tensor) -> Tensor:
        shared = self._shared(buffer)
        return shared if self.promote else shared.to(self.dtypes.get(key, shared.dtype))

    def _shared(self, tensor: Tensor) -> Tensor:
        """A copy on this rank's device that is the same everywhere, since unseeded scripts differ."""
        with Untouched():
            tensor = tensor.detach()
        if tensor.is_meta:
            return tensor
        copied = tensor.to(self.world.device, copy=True).contiguous()
        if self.promote and copied.is_floating_point():
            copied = copied.double()
        if dist.is_initialized() and self.world.size > 1:
            dist.broadcast(copied, 0)
        return copied

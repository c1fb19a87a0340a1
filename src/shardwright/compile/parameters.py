"""The pieces that a rank holds, cut from the original, and what keeps them right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import InputError
from ..layout import Mesh
from ..plan.replica_axes import replica_axes
from ..runtime.algorithms.random import Randomness
from ..runtime.collectives import objects
from ..runtime.model.parallel_model import RankState
from ..runtime.parameters.gradient_sync import GradientSync
from ..runtime.parameters.hooks import take_hooks
from ..runtime.parameters.pipeline_norms import PipelineNorms
from ..runtime.parameters.sharded import ShardedParameter, Untouched, join_pipeline, make_parameter
from ..runtime.parameters.spec import ParameterSpec, coordinates, shard_tensor, storage_layout, stored_layout
from ..runtime.parameters.state_dicts import Seats
from ..runtime.parameters.zero3 import Zero3
from ..runtime.pipeline import TiedGradients
from ..runtime.world import Groups, World
from .pipeline_ranks import PipelineRank


@dataclass(frozen=True, kw_only=True)
class ParameterSharder:
    """Cuts the parameters of a module. `prefix` is where it is in the user's module, if it is a part of one."""

    module: nn.Module
    world: World
    random: Randomness
    promote: bool = False
    prefix: str = ""
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)  # of buffers that are cast
    wire: torch.dtype | None = None  # in which gradients are summed, if not in their own

    def hold(
        self, pp_ranks: Sequence[PipelineRank], every: Mapping[Mesh, Groups], units: Sequence[str] = ()
    ) -> RankState:
        """What this rank holds. All ranks must call it. `units` are those of ZeRO-3, in their order."""
        self._check_meta()
        pp_rank = next(pp_rank for pp_rank in pp_ranks if self.world.rank in pp_rank.mesh.devices)
        groups = every[pp_rank.mesh]
        old = dict(self.module.named_parameters(remove_duplicate=False))
        pieces: dict[str, ShardedParameter] = {}
        own = {one.name: one for one in pp_rank.held}
        for key in dict.fromkeys(one.name for held in pp_ranks for one in held.held):  # in one order on all ranks
            full = self._shared(old[key])
            if key in own:
                pieces[key] = self._piece(full, own[key], groups)
                take_hooks(pieces[key], old[key])
        buffers = {key: self._buffer(key, held) for key, held in self.module.named_buffers(remove_duplicate=False)}
        every_held = tuple((pp_rank.mesh, pp_rank.held) for pp_rank in pp_ranks)
        if len(pp_ranks) > 1:
            join_pipeline(PipelineNorms(every_held), pieces.values())
        pairs: list[tuple[ParameterSpec, nn.Parameter]] = [(one, pieces[one.name]) for one in pp_rank.held]
        holding = RankState(
            groups=groups,
            held=list(pp_rank.held),
            parameters=pieces,
            buffers=buffers,
            sync=self._sync(pairs, groups, every_held),
            zero=self._zero3(pairs, groups, units),
            random=self.random,
            replica_axes=replica_axes(pp_rank.mesh),
            persistent=tuple(key for key in self.module.state_dict(keep_vars=True) if key in buffers),
            pp_ranks=every_held,
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
        if len(set(objects.all_gather_numbers(count, "how many parameters are on meta"))) > 1:
            raise InputError("some ranks have parameters on meta and others have them with values; make all alike")

    def replaced(
        self, pieces: Mapping[str, ShardedParameter], pp_ranks: Sequence[PipelineRank]
    ) -> dict[nn.Parameter, ShardedParameter | None]:
        """What stands for each parameter of the original on this rank: None if it is held elsewhere."""
        old = dict(self.module.named_parameters(remove_duplicate=False))
        held = [one for pp_rank in pp_ranks for one in pp_rank.held]
        return {old[key]: pieces.get(one.name) for one in held for key in one.keys}

    def _sync(
        self, pairs: Sequence[tuple[ParameterSpec, nn.Parameter]], groups: Groups, pp_ranks: Seats
    ) -> GradientSync | None:
        ties = TiedGradients(pp_ranks) if len(pp_ranks) > 1 else None
        alone = ties is None and groups.mesh.size == 1
        return None if alone else GradientSync(pairs, groups, ties=ties, dtype=self.wire)

    def _zero3(
        self, pairs: Sequence[tuple[ParameterSpec, nn.Parameter]], groups: Groups, order: Sequence[str]
    ) -> Zero3 | None:
        units: dict[str, list[tuple[ParameterSpec, nn.Parameter]]] = {}
        for one, parameter in pairs:
            if one.level == 3:
                units.setdefault(one.unit, []).append((one, parameter))
        return Zero3(units, groups, [unit for unit in order if unit in units], self.wire) if units else None

    def _piece(self, full: Tensor, held: ParameterSpec, groups: Groups) -> ShardedParameter:
        sizes = groups.mesh.sizes
        local = self._here(
            shard_tensor(full.to(held.dtype), held, sizes, coordinates(groups), stored_layout(held, sizes))
        )
        master = None
        if held.master:
            layout = storage_layout(held, sizes)
            master = self._here(shard_tensor(full.to(held.true_dtype), held, sizes, coordinates(groups), layout))
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

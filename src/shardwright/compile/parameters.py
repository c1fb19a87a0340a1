"""The shards that a rank holds, taken from the original, and what keeps them right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import InputError
from ..layout import Mesh
from ..rules.replica_axes import replica_axes
from ..runtime.algorithms.random import Randomness
from ..runtime.collectives import objects
from ..runtime.model.specialization import RankState
from ..runtime.parameters.full_tensors import compute_dtype, coordinates, shard_tensor, true_dtype
from ..runtime.parameters.gradient_sync import GradientSync
from ..runtime.parameters.hooks import take_hooks
from ..runtime.parameters.pipeline_norms import PipelineNorms
from ..runtime.parameters.sharded import ShardedParameter, Untouched, join_pipeline, make_parameter
from ..runtime.parameters.state_dicts import PipelineRankSpecs
from ..runtime.parameters.zero3 import UnitGatherer
from ..runtime.pipeline import TiedGradients
from ..runtime.world import Groups, World
from ..storage import ParameterSpec, effective_storage, storage_layout, stored_layout
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
        shards: dict[str, ShardedParameter] = {}
        own = {spec.name: spec for spec in pp_rank.specs}
        for key in dict.fromkeys(spec.name for other in pp_ranks for spec in other.specs):  # in one order on all ranks
            full = self._shared(old[key])
            if key in own:
                shards[key] = self._make_shard(full, own[key], groups)
                take_hooks(shards[key], old[key])
        buffers = {key: self._buffer(key, buffer) for key, buffer in self.module.named_buffers(remove_duplicate=False)}
        specs_by_rank = tuple((pp_rank.mesh, pp_rank.specs) for pp_rank in pp_ranks)
        if len(pp_ranks) > 1:
            join_pipeline(PipelineNorms(specs_by_rank), shards.values())
        pairs: list[tuple[ParameterSpec, nn.Parameter]] = [(spec, shards[spec.name]) for spec in pp_rank.specs]
        holding = RankState(
            groups=groups,
            specs=list(pp_rank.specs),
            parameters=shards,
            buffers=buffers,
            sync=self._sync(pairs, groups, specs_by_rank),
            zero=self._zero3(pairs, groups, units),
            random=self.random,
            replica_axes=replica_axes(pp_rank.mesh),
            persistent=tuple(key for key in self.module.state_dict(keep_vars=True) if key in buffers),
            pp_ranks=specs_by_rank,
            empty={key for key in own if old[key].is_meta},
        )
        for key, shard in shards.items():  # last, since torch takes no hooks of what is frozen
            with Untouched():
                shard.requires_grad_(old[key].requires_grad)
        return holding

    def _check_meta(self) -> None:
        """Parameters may be on meta, on all ranks or on none: those with values share them, and would wait."""
        lost = [key for key, tensor in self.module.named_buffers() if tensor.is_meta]
        if lost:
            raise InputError(f"the buffers {', '.join(lost)} are on meta; parameters may be, buffers need values")
        count = sum(tensor.is_meta for tensor in self.module.parameters())
        if len(set(objects.all_gather_numbers(count, "how many parameters are on meta"))) > 1:
            raise InputError("some ranks have parameters on meta and others have them with values; make all alike")

    def replaced(
        self, shards: Mapping[str, ShardedParameter], pp_ranks: Sequence[PipelineRank]
    ) -> dict[nn.Parameter, ShardedParameter | None]:
        """What stands for each parameter of the original on this rank: None if it is held elsewhere."""
        old = dict(self.module.named_parameters(remove_duplicate=False))
        specs = [spec for pp_rank in pp_ranks for spec in pp_rank.specs]
        return {old[key]: shards.get(spec.name) for spec in specs for key in spec.keys}

    def _sync(
        self, pairs: Sequence[tuple[ParameterSpec, nn.Parameter]], groups: Groups, pp_ranks: PipelineRankSpecs
    ) -> GradientSync | None:
        ties = TiedGradients(pp_ranks) if len(pp_ranks) > 1 else None
        alone = ties is None and groups.mesh.size == 1
        return None if alone else GradientSync(pairs, groups, ties=ties, dtype=self.wire)

    def _zero3(
        self, pairs: Sequence[tuple[ParameterSpec, nn.Parameter]], groups: Groups, order: Sequence[str]
    ) -> UnitGatherer | None:
        units: dict[str, list[tuple[ParameterSpec, nn.Parameter]]] = {}
        for spec, parameter in pairs:
            if spec.storage.shards_parameter:
                units.setdefault(spec.unit, []).append((spec, parameter))
        return UnitGatherer(units, groups, [unit for unit in order if unit in units], self.wire) if units else None

    def _make_shard(self, full: Tensor, spec: ParameterSpec, groups: Groups) -> ShardedParameter:
        sizes = groups.mesh.sizes
        local = self._here(
            shard_tensor(full.to(compute_dtype(spec)), spec, sizes, coordinates(groups), stored_layout(spec, sizes))
        )
        own_shard, elsewhere = None, effective_storage(spec, sizes).shard_device if spec.trainable else None
        if spec.master or elsewhere is not None:
            layout = storage_layout(spec, sizes)
            own_shard = self._here(shard_tensor(full.to(true_dtype(spec)), spec, sizes, coordinates(groups), layout))
            own_shard = own_shard.to(elsewhere or own_shard.device)
        parameter = make_parameter(local, spec, groups, own_shard)
        parameter.prefix = self.prefix
        return parameter

    def _here(self, local: Tensor) -> Tensor:
        """A shard on this rank's device; values of what was on meta come with a checkpoint, and nothing runs before."""
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

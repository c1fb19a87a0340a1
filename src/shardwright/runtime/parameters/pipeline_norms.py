"""Norms over all stages of a pipeline.

Every rank holds the parameters of its own stage, and `clip_grad_norm_` is to see all. What it
does on one device is to stack the norms of all gradients and take the norm of that. So where
norms of a pipeline's gradients are stacked, ranks tell each other those that they have, and
the stack has the norms of all parameters, in one order on all ranks: the total is the same to
the last bit everywhere, and a parameter that two stages hold counts once.

All ranks that hold anything to train must stack at the same time, each with what it has of the
same parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardwright.layout import Mesh
from shardwright.storage import ParameterSpec

from ..collectives import process_group
from ..faults import flight_recorder
from ..faults.watch import report_failure
from ..world import group_of, here
from .full_tensors import true_dtype

ALL_STAGES = (
    "norms of gradients, in which all stages take part: every stage has to hold some of the parameters that one call "
    "of clip_grad_norm_ is about"
)


class PipelineNorms:
    """All parameters of a pipeline, and who speaks for each: the first rank of the first mesh that holds it.

    All ranks make it together.
    """

    def __init__(self, pp_ranks: Sequence[tuple[Mesh, Sequence[ParameterSpec]]]) -> None:
        world = here()
        self.device = world.device
        self.dtype = torch.float16
        self._numbers: dict[str, int] = {}
        self._own: set[str] = set()
        self._counts: Counter[str] = Counter(spec.name for _, specs in pp_ranks for spec in specs)
        for mesh, specs in pp_ranks:
            for spec in specs:
                if spec.name not in self._numbers:
                    self._numbers[spec.name] = len(self._numbers)
                    self.dtype = torch.promote_types(self.dtype, true_dtype(spec))
                    if world.rank == mesh.devices[0]:
                        self._own.add(spec.name)
        trains = {rank for mesh, specs in pp_ranks if any(spec.trainable for spec in specs) for rank in mesh.devices}
        self._group = group_of(sorted(trains)) if len(trains) > 1 else None

    def count(self, name: str) -> int:
        """How many stages hold a parameter."""
        return self._counts[name]

    @report_failure
    def norms(self, known: Mapping[str, Tensor]) -> list[Tensor]:
        """The norms of all parameters of which any rank knows one, in one order."""
        values = torch.zeros(2, len(self._numbers), dtype=torch.float64, device=self.device)
        mine = [name for name in known if name in self._own]
        if mine:
            at = torch.tensor([self._numbers[name] for name in mine], device=self.device)
            values[0, at] = torch.stack([known[name].detach().double() for name in mine])
            values[1, at] = 1.0
        if self._group is not None:
            flight_recorder.enter("all_reduce", self._group, ALL_STAGES)
            process_group.all_reduce(
                values, self._group
            ).wait()  # each number has one speaker: exact, also for inf and nan
        norms = dict(zip(self._numbers, values[0].to(self.dtype).unbind(), strict=True))
        there = dict(zip(self._numbers, values[1].tolist(), strict=True))
        norms |= {name: norm.to(self.dtype) for name, norm in known.items() if norm.requires_grad}  # gradients go back
        return [norm for name, norm in norms.items() if there[name]]

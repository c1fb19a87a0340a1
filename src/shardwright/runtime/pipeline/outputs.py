"""Outputs of the model: values of microbatches are combined, and every rank gets the result.

    how     the value is                        its gradient in a microbatch is
    ----    ---------------------------------   -------------------------------
    sum     the sum over microbatches           the full gradient
    mean    their mean                          the gradient divided by their number
    cat     joined along a dim                  the microbatch's slice of it
    same    any of them, since all are equal    the full gradient in the first, none in the others

Updated buffers travel with the outputs, so that they are the same everywhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.layout import Block, Shard

from ..collectives import blocks
from ..faults import flight_recorder
from ..faults.watch import report_failure
from .spec import PipelineOutput, PipelineSpec

ALIGNED = 16  # bytes


def combine(out: PipelineOutput, values: Sequence[Tensor]) -> Tensor:
    """One value from those of all microbatches."""
    if out.how == "same":
        return values[0].clone()
    if out.how == "cat":
        return blocks.unshard(values, out.dim, microbatch_shard(out)).contiguous()
    total = values[0].clone()
    for value in values[1:]:
        total += value
    return total / len(values) if out.how == "mean" else total


def microbatch_gradient(out: PipelineOutput, gradient: Tensor, microbatches: int, microbatch: int) -> Tensor:
    """The gradient of a microbatch's value from that of the combined value."""
    if out.how == "cat":
        return blocks.shard(gradient, out.dim, microbatch_shard(out), microbatches, microbatch)
    if out.how == "mean":
        return gradient / microbatches
    return gradient if out.how == "sum" or microbatch == 0 else torch.zeros_like(gradient)


def microbatch_shard(out: PipelineOutput) -> Shard:
    """How an output's dim is split into microbatches."""
    return out.sharding or Shard(axis="mb", blocks=(Block(1, out.shape[out.dim], 1),))


class OutputBroadcast:
    """Broadcasts outputs and updated buffers from the ranks that have them."""

    def __init__(self, pipeline: PipelineSpec, rank: int, device: torch.device) -> None:
        self.pipeline, self.rank, self.device = pipeline, rank, device

    @torch.no_grad()
    def __call__(self, values: Mapping[tuple[str, int], Tensor], updates: Mapping[str, Tensor]) -> list[Tensor]:
        """The model's outputs, in order; buffers are written. `values` has this rank's microbatches."""
        by_source: dict[int, list[Tensor]] = defaultdict(list)  # by the rank that has them
        outputs = []
        for out in self.pipeline.leaving:
            source = self.pipeline.placed[out.stage].mesh.devices[0]
            if (out.value, 0) in values:
                tensor = combine(out, [values[out.value, at] for at in range(self.pipeline.microbatches)])
            else:
                tensor = torch.empty(out.shape, dtype=out.dtype, device=self.device)
            by_source[source].append(tensor)
            outputs.append(tensor)
        for placed in self.pipeline.placed:
            for key in placed.updates:
                if key in updates:
                    self.pipeline.write(placed, key, updates[key])
                if key in self.pipeline.buffers:  # all ranks of the stage have written a parameter
                    by_source[placed.mesh.devices[0]].append(self.pipeline.buffers[key])
        for source, tensors in sorted(by_source.items()):
            broadcast(tensors, source, self.rank)
        return outputs


@report_failure
def broadcast(tensors: Sequence[Tensor], source: int, rank: int) -> None:
    """Broadcast tensors of one rank, in one message."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    if len(tensors) == 1 and tensors[0].is_contiguous():
        flight_recorder.enter("broadcast", None, f"outputs of rank {source}")
        dist.broadcast(_bytes(tensors[0]), source)
        return
    starts, total = [], 0
    for tensor in tensors:
        starts.append(total)
        total += -(-tensor.numel() * tensor.element_size() // ALIGNED) * ALIGNED
    flat = torch.empty(total, dtype=torch.uint8, device=tensors[0].device)
    views = [
        flat.narrow(0, start, tensor.numel() * tensor.element_size()).view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip(starts, tensors, strict=True)
    ]
    if rank == source:
        for view, tensor in zip(views, tensors, strict=True):
            view.copy_(tensor)
    flight_recorder.enter("broadcast", None, f"outputs of rank {source}")
    dist.broadcast(flat, source)
    if rank != source:
        for view, tensor in zip(views, tensors, strict=True):
            tensor.copy_(view)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)

"""The peers that share out the batch, each set up as its documentation says.

A contender takes a step on a global batch: forward, backward, optimizer. A peer that cuts the batch
takes its own rows of it, as ours does.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from .workload import Workload, optimizer_of

Step = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Contender:
    name: str
    step: Step  # (inputs, targets) -> loss
    loss_is_share: bool = False  # the loss is of this rank's rows: the mean over ranks is the loss
    is_whole: bool = True  # it does all the work, and so has the losses of one device
    alone: bool = False  # only rank 0 works
    plan: str = ""  # of ours: what was planned
    predicted: float | None = None  # of ours: seconds a step


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, rows: bool) -> Step:
    optimizer = optimizer or optimizer_of(model)
    rank, world = (dist.get_rank(), dist.get_world_size()) if rows else (0, 1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = model(x.chunk(world)[rank], y.chunk(world)[rank])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def eager(work: Workload) -> Contender:
    """One process and one thread, as a user has it before; where there are several ranks only the first works."""
    step = training_step(work.model(), rows=False)
    return Contender(name="eager", step=step if dist.get_rank() == 0 else lambda x, y: torch.zeros(()), alone=True)


def ddp(work: Workload, *, fused: bool = False) -> Contender:
    """fused: with the optimizer's fused kernel, which we take by ourselves."""
    model = DistributedDataParallel(work.model())
    optimizer = optimizer_of(model, fused=fused)
    name = "DDP, fused optimizer" if fused else "DDP"
    return Contender(
        name=name, step=training_step(model, optimizer, rows=True), loss_is_share=True, is_whole=is_by_sample(model)
    )


def fsdp2(work: Workload) -> Contender:
    """Per layer and at the root, resharded after forward: ZeRO-3."""
    model = work.model()
    by_sample = is_by_sample(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in work.layers(model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    return Contender(name="FSDP2", step=training_step(model, rows=True), loss_is_share=True, is_whole=by_sample)


def is_by_sample(model: nn.Module) -> bool:
    """Whether a replica computes the same with its own samples alone: batch norms take statistics over a batch."""
    return not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())

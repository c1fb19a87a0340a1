"""The peers, each set up as its documentation says, on the arithmetic of the same GPT.

A contender takes a step on a global batch: forward, backward, optimizer. A peer that cuts the batch
takes its own rows of it, as ours does.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from examples.gpt import GPT
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from .workload import Workload, optimizer_of

Step = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Contender:
    name: str
    step: Step  # (inputs, targets) -> loss
    loss_is_share: bool = False  # the loss is of this rank's rows: the mean over ranks is the loss
    is_whole: bool = True  # it does all the work, and so has the losses of one device


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
    return Contender(name="eager", step=training_step(work.model(), rows=False))


def ddp(work: Workload) -> Contender:
    model = DistributedDataParallel(work.model())
    return Contender(name="DDP", step=training_step(model, rows=True), loss_is_share=True)


def fsdp2(work: Workload) -> Contender:
    """Per block and at the root, resharded after forward: ZeRO-3."""
    model = work.model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    return Contender(name="FSDP2", step=training_step(model, rows=True), loss_is_share=True)


class LocalAttention(nn.Module):
    """The GPT's attention over the heads that this rank holds, whatever their number."""

    def __init__(self, qkv: nn.Module, proj: nn.Module, head: int) -> None:
        super().__init__()
        self.qkv, self.proj, self.head = qkv, proj, head

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        qkv = self.qkv(x)
        q, k, v = qkv.split(qkv.size(-1) // 3, 2)
        q = q.view(B, T, -1, self.head).transpose(1, 2)
        k = k.view(B, T, -1, self.head).transpose(1, 2)
        v = v.view(B, T, -1, self.head).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(B, T, -1))


def by_rank(rows: Tensor, world: int) -> Tensor:
    """Rows of q, k, v to the order in which a plain cut gives every rank its heads of all three."""
    return rows.unflatten(0, (3, world, -1)).transpose(0, 1).flatten(0, 2).contiguous()


def with_local_attention(model: GPT, world: int) -> GPT:
    for block in model.blocks:
        attn = block.attn
        attn.qkv.weight.data = by_rank(attn.qkv.weight.data, world)
        attn.qkv.bias.data = by_rank(attn.qkv.bias.data, world)
        block.attn = LocalAttention(attn.qkv, attn.proj, attn.qkv.in_features // attn.n_head)
    return model


def dtensor_tp(work: Workload) -> Contender:
    """parallelize_module: column-wise in, row-wise out. Norms, embedding and head are whole on each rank."""
    world = dist.get_world_size()
    mesh: DeviceMesh = init_device_mesh("cpu", (world,))
    model = with_local_attention(work.model(), world)
    for block in model.blocks:
        layers = {"attn.qkv": ColwiseParallel(), "attn.proj": RowwiseParallel()}
        parallelize_module(block, mesh, layers | {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()})
    return Contender(name="DTensor TP", step=training_step(model, rows=False))

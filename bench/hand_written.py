"""Tensor parallelism by hand, with plain tensors and two autograd functions: how fast it can be here.

Not a peer: a yardstick for the harness, and for what ours should reach.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from .peers import Contender, training_step
from .tensor_parallel import with_local_attention
from .workload import Workload


class FanOut(torch.autograd.Function):
    """Whole in; the gradients of the parts are summed in backward."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


class FanIn(torch.autograd.Function):
    """The parts are summed in forward; the gradient passes."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
        return gradient


class Column(nn.Module):
    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        self.weight = nn.Parameter(whole.weight.data.chunk(world)[rank].clone())
        self.bias = nn.Parameter(whole.bias.data.chunk(world)[rank].clone())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(FanOut.apply(x), self.weight, self.bias)


class Row(nn.Module):
    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        self.weight = nn.Parameter(whole.weight.data.chunk(world, 1)[rank].clone())
        self.bias = nn.Parameter(whole.bias.data.clone())

    def forward(self, x: Tensor) -> Tensor:
        return FanIn.apply(F.linear(x, self.weight)) + self.bias


def hand_written_tp(work: Workload) -> Contender:
    model = with_local_attention(work.model(), dist.get_world_size())
    for block in model.blocks:
        block.attn.qkv, block.attn.proj = Column(block.attn.qkv), Row(block.attn.proj)
        block.mlp.up, block.mlp.down = Column(block.mlp.up), Row(block.mlp.down)
    return Contender(name="hand-written TP", step=training_step(model, rows=False))

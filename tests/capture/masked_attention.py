"""Self-attention with a mask that is made by hand, captured."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.capture import capture, run
from shardwright.ir import Graph, MaskStructure, Op
from shardwright.ops.attention import STRUCTURED

LENGTH = 10
CAUSAL = MaskStructure(after=0)
NONE = -math.inf


class Attention(nn.Module):
    """Self-attention with a mask that is made in forward."""

    def __init__(self, make_mask: Callable[..., Tensor | None], heads: int = 2) -> None:
        super().__init__()
        self.qkv, self.make_mask, self.heads = nn.Linear(8, 24), make_mask, heads
        self.register_buffer("bias", torch.ones(32, 32).tril().view(1, 1, 32, 32))
        self.constant = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()

    def forward(self, x: Tensor, *data: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, self.make_mask(self, x.shape[1], *data)).square().mean()


def attention_of(graph: Graph) -> Op:
    (op,) = [op for op in graph.ops if "scaled_dot_product" in op.target or op.target == STRUCTURED]
    return op


def structured(make_mask: Callable[..., Tensor | None], *data: Tensor, length: int = LENGTH) -> tuple[Op, Graph]:
    """The attention of a model with this mask; what the graph computes is compared with the model."""
    torch.manual_seed(0)
    model = Attention(make_mask).double()
    inputs = (torch.randn(2, length, 8, dtype=torch.float64), *data)
    captured = capture(model, inputs)
    outputs, _, _ = run(captured, inputs, dict(model.named_parameters()), dict(model.named_buffers()))
    assert outputs[0] is not None
    torch.testing.assert_close(outputs[0], model(*inputs), rtol=1e-12, atol=1e-12)
    parameters = list(model.parameters())
    gradients = (torch.autograd.grad(loss, parameters) for loss in (outputs[0], model(*inputs)))
    for actual, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    return attention_of(captured.graph), captured.graph


def mask_of(op: Op) -> str | None:
    return op.tensor("attn_mask")

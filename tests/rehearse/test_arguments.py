"""The sizes among an op's arguments follow the shapes: every op makes what the small graph says."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwright.capture import capture
from shardwright.capture.interpret import run_op
from shardwright.rehearse.arguments import Resized, resize_arguments

BIG, SMALL = {"B": 8, "S": 12, "D": 16}, {"B": 3, "S": 5, "D": 4}


def attended(x, n, seen):
    """Attention in which a query sees keys by the difference of places, and by the place of the key."""
    q, places = x.unflatten(-1, (2, n["D"] // 2)).transpose(1, 2), torch.arange(n["S"])
    return F.scaled_dot_product_attention(q, q, q, seen(places[:, None], places[None]))


OPS = {
    "view": lambda x, n: x.view(n["B"] * n["S"], n["D"]),
    "expand": lambda x, n: x[:, :1].expand(-1, n["S"], n["D"]),
    "half": lambda x, n: x[..., n["D"] // 2 :],
    "shift": lambda x, n: x[:, 1:],
    "last": lambda x, n: x[:, -1],
    "split": lambda x, n: torch.cat(x.split(n["D"] // 2, -1)[::-1], -1),
    "arange": lambda x, n: x + torch.arange(n["S"])[:, None],
    "norm": lambda x, n: F.layer_norm(x, (n["S"], n["D"])),
    "zeros": lambda x, n: x + torch.zeros(n["B"], n["S"], n["D"]),
    "repeat": lambda x, n: x.repeat(2, 1, 1),
    "interleave": lambda x, n: x.repeat_interleave(2, dim=1),
    "one_hot": lambda x, n: F.one_hot(torch.arange(n["S"]) % 2, n["D"]) + x,
    "unflatten": lambda x, n: x.unflatten(-1, (2, n["D"] // 2)),
    "scatter": lambda x, n: x.slice_scatter(x[:, 1:], 1, 0, n["S"] - 1),
    "depthwise": lambda x, n: F.conv1d(x.transpose(1, 2), torch.ones(n["D"], 1, 3), groups=n["D"]),
    "window": lambda x, n: attended(x, n, lambda q, k: (k <= q) & (q - k <= n["S"] // 2)),
    "prefix": lambda x, n: attended(x, n, lambda q, k: (k <= q) | (k < n["S"] // 3)),
    "top": lambda x, n: x.topk(n["D"] // 2)[0],
}


class Wrapped(nn.Module):
    def __init__(self, call, sizes):
        super().__init__()
        self.call, self.sizes = call, sizes

    def forward(self, x):
        return self.call(x, self.sizes)


def graph_of(name, sizes):
    x = torch.zeros(sizes["B"], sizes["S"], sizes["D"])
    return capture(Wrapped(OPS[name], sizes), (x,), {}, entry="train").graph


@pytest.mark.parametrize("name", OPS)
def test_an_op_of_the_real_graph_makes_the_shapes_of_the_small_one(name):
    real, small = graph_of(name, BIG), graph_of(name, SMALL)
    assert [op.target for op in real.ops] == [op.target for op in small.ops]

    for op, like in zip(real.ops, small.ops, strict=True):
        resized = resize_arguments(
            Resized(
                op=op,
                inputs=[real.values[name].shape for name in op.inputs],
                outputs=[real.values[name].shape for name in op.outputs],
                small_inputs=[small.values[name].shape for name in like.inputs],
                small_outputs=[small.values[name].shape for name in like.outputs],
            )
        )
        inputs = [
            torch.zeros(small.values[name].shape, dtype=getattr(torch, small.values[name].dtype))
            for name in like.inputs
        ]
        shapes = [tuple(output.shape) for output in run_op(resized, inputs, {})]
        assert shapes == [small.values[name].shape for name in like.outputs], op.target
        assert resized.arguments == like.arguments or op.target == "aten.slice.Tensor", op.target

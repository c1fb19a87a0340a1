"""Every role of every op, on 2 and on 3 shards, forward and backward, against the op run whole.

First ops by family, each in a module of one line; then every distinct op of the models.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.models.zoo import ZOO
from tests.rules.oracle import check_split, observe, splits


class Applied(nn.Module):
    """A function of the arguments and of some parameters."""

    def __init__(self, function, *shapes) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(torch.randn(shape, dtype=torch.float64) for shape in shapes)

    def forward(self, *args):
        return self.function(*args, *self.weights)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(6, shape)


# (what is computed, the arguments, the shapes of parameters, the roles that there must be on "the" op)
FAMILIES = {
    "linear": (lambda x, w, b: F.linear(x, w, b), [randn(6, 4, 6)], [(8, 6), (8,)], "linear", 4),
    "matmul": (lambda x, w: x @ w, [randn(6, 4, 6)], [(6, 8)], "matmul", 4),
    "matmul, broadcast": (lambda x, w: x @ w, [randn(6, 1, 4, 6)], [(3, 6, 8)], "matmul", 5),
    "einsum": (lambda x, w: torch.einsum("bik,bkj->bij", x, w), [randn(6, 4, 6)], [(6, 6, 8)], None, 0),
    "conv": (lambda x, w, b: F.conv2d(x, w, b, padding=1), [randn(6, 5, 5, 5)], [(6, 5, 3, 3), (6,)], "conv2d", 3),
    "conv, groups": (lambda x, w: F.conv2d(x, w, groups=6), [randn(6, 12, 5, 5)], [(18, 2, 3, 3)], "conv2d", 4),
    "conv, transposed": (lambda x, w: F.conv_transpose2d(x, w), [randn(6, 5, 5, 5)], [(5, 6, 3, 3)], None, 0),
    "reshape": (lambda x, w: (x * w).view(24, 6), [randn(6, 4, 6)], [(6,)], "view", 3),
    "flattened rows": (lambda x, w: (x * w).flatten(0, 1), [randn(6, 4, 6)], [(6,)], None, 0),
    "reshape, clash": (lambda x, w: (x * w).reshape(6, 8, 3), [randn(6, 4, 6)], [(6,)], None, 0),
    "permute": (lambda x, w: (x * w).permute(2, 0, 1), [randn(6, 4, 6)], [(6,)], "permute", 3),
    "halves": (lambda x, w: torch.cat([-(x * w)[..., 4:], (x * w)[..., :4]], -1), [randn(6, 4, 8)], [(8,)], "slice", 3),
    "odd slice": (lambda x, w: (x * w)[:, 1:4], [randn(6, 5, 6)], [(6,)], "slice", 2),
    "equal parts": (lambda x, w: (x * w).chunk(2, -1)[0] * 2, [randn(6, 4, 12)], [(12,)], None, 0),
    "sections": (lambda x, w: F.linear(x, w).split([8, 4, 4], -1)[1], [randn(6, 4, 6)], [(16, 6)], None, 0),
    "stack and unbind": (lambda x, w: torch.stack([x * w, x], 1).unbind(1)[0], [randn(6, 4, 6)], [(6,)], "stack", 3),
    "expand": (lambda x, w: x * w.expand(6, 4, 6), [randn(6, 4, 6)], [(6,)], None, 0),
    "repeat": (lambda x, w: (x * w).repeat(1, 2, 1), [randn(6, 4, 6)], [(6,)], "repeat", 3),
    "pad": (lambda x, w: F.pad(x * w, (1, 2)), [randn(6, 4, 6)], [(6,)], None, 0),
    "tril": (lambda x, w: (x * w).tril(), [randn(6, 4, 4)], [(4,)], "tril", 1),
    "roll and flip": (lambda x, w: (x * w).roll(1, 1).flip(1), [randn(6, 4, 6)], [(6,)], None, 0),
    "broadcast add": (lambda x, w: x + w, [randn(6, 4, 6)], [(4, 1)], "add", 3),
    "divide": (lambda x, w: x / (w.square() + 1), [randn(6, 4, 6)], [(6,)], "div", 3),
    "where": (lambda x, w: torch.where(x > 0, x * w, w), [randn(6, 4, 6)], [(6,)], "where", 3),
    "masked fill": (lambda x, w: (x * w).masked_fill(x > 0, 3.0), [randn(6, 4, 6)], [(6,)], None, 0),
    "mean": (lambda x, w: (x * w).mean((0, 2)), [randn(6, 4, 6)], [(6,)], "mean", 3),
    "sum, kept": (lambda x, w: (x * w).sum(1, keepdim=True), [randn(6, 4, 6)], [(6,)], "sum", 3),
    "softmax": (lambda x, w: (x * w).softmax(1), [randn(6, 4, 6)], [(6,)], "softmax", 2),
    "logsumexp": (lambda x, w: (x * w).logsumexp(-1), [randn(6, 4, 6)], [(6,)], None, 0),
    "variance": (lambda x, w: (x * w).var(-1), [randn(6, 4, 6)], [(6,)], None, 0),
    "cumsum": (lambda x, w: (x * w).cumsum(1), [randn(6, 4, 6)], [(6,)], "cumsum", 2),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (6,), w, b), [randn(6, 4, 6)], [(6,), (6,)], "layer_norm", 2),
    "rms norm": (lambda x, w: F.rms_norm(x, (6,), w), [randn(6, 4, 6)], [(6,)], None, 0),
    "group norm": (lambda x, w, b: F.group_norm(x, 2, w, b), [randn(6, 4, 6)], [(4,), (4,)], "group_norm", 1),
    "pool": (lambda x, w: F.max_pool2d(x * w, 2), [randn(6, 5, 6, 6)], [(6,)], "max_pool2d", 2),
    "embedding": (lambda i, w: F.embedding(i, w), [ids(6, 4)], [(6, 8)], "embedding", 4),
    "gather": (lambda x, i, w: (x * w).gather(1, i % 4), [randn(6, 4, 6), ids(6, 3, 6)], [(6,)], "gather", 2),
    "index": (lambda i, w: w[i], [ids(6, 4)], [(6, 8)], "index", 3),
    "attention": (
        lambda x, w: F.scaled_dot_product_attention(x * w, x, x, is_causal=True), [randn(6, 4, 3, 5)], [(5,)],
        "scaled_dot_product_attention", 2,
    ),
    "attention, mask": (
        lambda x, m, w: F.scaled_dot_product_attention(x * w, x, x, attn_mask=m),
        [randn(6, 4, 3, 5), randn(6, 1, 3, 3)], [(5,)], "scaled_dot_product_attention", 3,
    ),
    "attention, grouped": (
        lambda q, k, w: F.scaled_dot_product_attention(q * w, k, k, enable_gqa=True),
        [randn(6, 12, 3, 5), randn(6, 4, 3, 5)], [(5,)], "scaled_dot_product_attention", 4,
    ),
    "mse": (lambda x, y, w: F.mse_loss(x * w, y), [randn(6, 4), randn(6, 4)], [(4,)], "mse_loss", 2),
    "kl": (lambda x, y, w: F.kl_div(x * w, y.exp(), reduction="mean"), [randn(6, 4), randn(6, 4)], [(4,)], "kl_div", 2),
    "cross entropy": (
        lambda x, i, w: F.cross_entropy(x * w, i, reduction="sum"), [randn(6, 6), ids(6)], [(6,)], None, 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_every_split_of_the_family_recombines_to_the_unsplit_result(family):
    torch.manual_seed(0)
    function, args, shapes, kind, count = FAMILIES[family]

    analysis, seen = observe(Applied(function, *shapes), args)

    for op, role, parts in splits(analysis):
        check_split(analysis, seen, op, role, parts)
    if kind is not None:
        roles = [analysis.signatures[op.name].roles for op in analysis.graph.ops if op.target.split(".")[1] == kind]
        assert roles, f"{kind} is not in the graph"
        assert len(roles[0]) >= count, f"{kind} can be split on {[role.name for role in roles[0]]} only"


MODELS = "gpt gqa_fused rotary swiglu resnet unet contrastive hf_llama hf_gpt2 hf_vit hf_t5".split()


@pytest.mark.parametrize("name", MODELS)
def test_every_split_of_every_op_of_the_model_recombines_to_the_unsplit_result(name):
    torch.manual_seed(0)
    case = ZOO[name](dtype=torch.float64)

    analysis, seen = observe(case.module.double(), case.args, case.kwargs)

    checked = sum(check_split(analysis, seen, op, role, parts) for op, role, parts in splits(analysis))
    assert checked > 40


def test_the_oracle_refuses_a_wrong_rule():
    """A softmax split along the dim that it looks along."""
    from shardwright.rules import registry
    from shardwright.rules.notation import parse

    wrong = {**registry._TABLE, "aten.softmax.int": lambda call: parse("a b -> a b")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_TABLE", wrong)
        analysis, seen = observe(Applied(lambda x, w: (x * w).softmax(1), (6,)), [randn(4, 6)])
        (op,) = (op for op in analysis.graph.ops if "softmax" in op.target)
        check_split(analysis, seen, op, "a", 2)
        with pytest.raises(AssertionError, match=r"softmax.* on b over 2"):
            check_split(analysis, seen, op, "b", 2)

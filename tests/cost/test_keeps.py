"""The table of what autograd keeps, against what autograd keeps."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.cost import TrainingSetup, local_call
from shardwright.cost.saved_for_backward import saved_bytes
from shardwright.layout import Axis, Mesh
from tests.models.zoo import ZOO

from .kept import allocated, analysed, predicted, predicted_peak, saved

SCALARS = 512  # bytes: counts and factors that no prediction needs
LOW, HIGH = 0.02, 2.0  # below what is allocated, and above it in sizes of its largest tensor
LABELS = torch.zeros(64, dtype=torch.long)
PICKED = torch.zeros(5, dtype=torch.long)

OPS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "add": (lambda x, y: x + y, ((64, 32), (64, 32))),
    "mul": (lambda x, y: x * y, ((64, 32), (64, 32))),
    "mul by a number": (lambda x: x * 3.0, ((64, 32),)),
    "mul without gradient": (lambda x, y: x * y.detach(), ((64, 32), (64, 32))),
    "div": (lambda x, y: x / y, ((64, 32), (64, 32))),
    "pow": (lambda x: x**2, ((64, 32),)),
    "rsqrt": (lambda x: x.square().rsqrt(), ((64, 32),)),
    "exp": (lambda x: x.exp(), ((64, 32),)),
    "where": (lambda x, y: torch.where(x > 0, x, y), ((64, 32), (64, 32))),
    "masked_fill": (lambda x: x.masked_fill(x > 0, 0.0), ((64, 32),)),
    "gelu": (lambda x: F.gelu(x), ((64, 32),)),
    "relu": (lambda x: F.relu(x), ((64, 32),)),
    "silu": (lambda x: F.silu(x), ((64, 32),)),
    "sigmoid": (lambda x: x.sigmoid(), ((64, 32),)),
    "softmax": (lambda x: x.softmax(-1), ((64, 32),)),
    "log_softmax": (lambda x: x.log_softmax(-1), ((64, 32),)),
    "softplus": (lambda x: F.softplus(x), ((64, 32),)),
    "clamp": (lambda x: x.clamp(0, 1), ((64, 32),)),
    "cat": (lambda x, y: torch.cat([x, y]), ((64, 32), (64, 32))),
    "slice": (lambda x: x[:, :7] * x[:, 7:14], ((64, 32),)),
    "amax": (lambda x: x.amax(-1), ((64, 32),)),
    "max": (lambda x: x.max(-1)[0], ((64, 32),)),
    "topk": (lambda x: x.topk(4)[0], ((64, 32),)),
    "var": (lambda x: x.var(-1), ((64, 32),)),
    "logsumexp": (lambda x: x.logsumexp(-1), ((64, 32),)),
    "linear": (lambda x, w: F.linear(x, w), ((4, 64, 32), (16, 32))),
    "linear of rows apart": (lambda x, w: F.linear(x.transpose(0, 1), w), ((4, 64, 32), (16, 32))),
    "linear, frozen": (lambda x, w: F.linear(x, w.detach()), ((4, 64, 32), (16, 32))),
    "matmul": (lambda x, y: x @ y, ((64, 32), (32, 16))),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (32,), w, b), ((64, 32), (32,), (32,))),
    "rms_norm": (lambda x, w: F.rms_norm(x, (32,), w), ((64, 32), (32,))),
    "group_norm": (lambda x: F.group_norm(x, 2), ((4, 8, 16, 16),)),
    "conv2d": (lambda x, w: F.conv2d(x, w), ((4, 8, 16, 16), (8, 8, 3, 3))),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), ((4, 8, 16, 16),)),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), ((4, 8, 16, 16),)),
    "pool to one": (lambda x: F.adaptive_avg_pool2d(x, 1), ((4, 8, 16, 16),)),
    "embedding": (lambda w: F.embedding(LABELS, w), ((16, 32),)),
    "index_select": (lambda x: x.index_select(0, PICKED), ((64, 32),)),
    "cross_entropy": (lambda x: F.cross_entropy(x, LABELS), ((64, 32),)),
    "mse_loss": (lambda x, y: F.mse_loss(x, y), ((64, 32), (64, 32))),
    "dropout": (lambda x: F.dropout(x, 0.5), ((64, 32),)),
    "attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), ((2, 4, 64, 16),) * 3),
    "attention, masked": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, torch.ones(64, 64, dtype=torch.bool).tril().triu(-8)),
        ((2, 4, 64, 16),) * 3,
    ),
    "attention, biased": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m),
        (*((2, 4, 64, 16),) * 3, (2, 4, 64, 64)),
    ),
    "attention, causal mask": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, torch.ones(64, 64, dtype=torch.bool).tril()),
        ((2, 4, 64, 16),) * 3,
    ),
    "attention, grouped": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        ((2, 4, 64, 16), (2, 2, 64, 16), (2, 2, 64, 16)),
    ),
    "attention, grouped and dropped": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, None, 0.1, enable_gqa=True),
        ((2, 4, 64, 16), (2, 2, 64, 16), (2, 2, 64, 16)),
    ),
    "attention, dropped": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, None, 0.1), ((2, 4, 64, 16),) * 3),
    "abs": (lambda x: x.abs(), ((64, 32),)),
    "square": (lambda x: x.square(), ((64, 32),)),
    "log": (lambda x: x.square().log(), ((64, 32),)),
    "cos": (lambda x: x.cos(), ((64, 32),)),
    "erf": (lambda x: x.erf(), ((64, 32),)),
    "asin": (lambda x: (x * 0.1).asin(), ((64, 32),)),
    "reciprocal": (lambda x: x.reciprocal(), ((64, 32),)),
    "pow of two tensors": (lambda x, y: x.square() ** y, ((64, 32), (64, 32))),
    "sub": (lambda x, y: x - y, ((64, 32), (64, 32))),
    "sub from itself": (lambda x: x - x, ((64, 32),)),
    "maximum": (lambda x, y: torch.maximum(x, y), ((64, 32), (64, 32))),
    "div by a column": (lambda x, y: x / y, ((64, 32), (64, 1))),
    "outer": (lambda x, y: torch.outer(x, y), ((64,), (64,))),
    "norm": (lambda x: x.norm(dim=-1), ((64, 32),)),
    "cumsum": (lambda x: x.cumsum(0), ((64, 32),)),
    "largest of all": (lambda x: x.max(), ((64, 32),)),
    "conv1d of a transposed value": (lambda x, w: F.conv1d(x.transpose(1, 2), w), ((8, 64, 32), (32, 32, 3))),
    "conv2d, 3 channels": (lambda x, w: F.conv2d(x, w, padding=1), ((8, 3, 32, 32), (64, 3, 3, 3))),
    "conv_transpose2d": (lambda x, w: F.conv_transpose2d(x, w, stride=2), ((4, 16, 16, 16), (16, 16, 2, 2))),
    "max_pool1d": (lambda x: F.max_pool1d(x, 2), ((4, 8, 256),)),
    "instance_norm": (lambda x: F.instance_norm(x), ((4, 8, 16, 16),)),
    "smooth_l1_loss": (lambda x, y: F.smooth_l1_loss(x, y), ((64, 32), (64, 32))),
    "huber_loss": (lambda x, y: F.huber_loss(x, y), ((64, 32), (64, 32))),
    "l1_loss": (lambda x, y: F.l1_loss(x, y), ((64, 32), (64, 32))),
    "sum of a mean and a value": (lambda x: x.mean() + (x * 2.0).square(), ((64, 32),)),
    "reshape that views": (lambda x: x.view(4, 16, 32).reshape(64, 32).exp(), ((64, 32),)),
    "reshape that copies": (lambda x: F.gelu(x.t().reshape(64, 32)), ((64, 32),)),
}


class Of(nn.Module):
    """An op on values that have a gradient; what makes them keeps nothing."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.weights = nn.ParameterList(torch.rand(shape) for shape in OPS[name][1])

    def forward(self, x: Tensor) -> Tensor:
        call, _ = OPS[self.name]
        return call(*(-tensor for tensor in self.weights)).sum() + x.sum()


@pytest.mark.parametrize("name", OPS)
def test_an_op_keeps_what_the_table_says(name, tmp_path):
    module, args = Of(name), (torch.zeros(4),)
    assert predicted(module, args, {}) == pytest.approx(saved(module, args, {}, tmp_path), abs=64)


class Expanded(nn.Module):
    """An op on values whose gradients are summed at once, so that nothing but the op is at the peak."""

    def __init__(self, name: str, dense: bool) -> None:
        super().__init__()
        self.name, self.dense = name, dense
        self.weights = nn.ParameterList(torch.rand((1,) * len(shape)) for shape in OPS[name][1])

    def forward(self, x: Tensor) -> Tensor:
        call, shapes = OPS[self.name]
        result = call(*(-weight.expand(shape) for weight, shape in zip(self.weights, shapes, strict=True)))
        return (-result if self.dense else result).sum() + x.sum()


@pytest.mark.parametrize("dense", [True, False], ids=["", "gradient of a sum"])
@pytest.mark.parametrize("name", OPS)
def test_an_op_needs_what_its_definition_says(name, dense):
    """The peaks of forward and backward against what torch allocates: none is lower, and none much higher."""
    case = Expanded(name, dense), (torch.zeros(4),), {}
    peak, truth = predicted_peak(*case), allocated(case)
    call, shapes = OPS[name]
    unit = 4 * max(*map(math.prod, shapes), call(*map(torch.rand, shapes)).numel())
    for predicted_bytes, real in ((peak.forward, truth.forward), (peak.backward, truth.backward)):
        assert -LOW * real - SCALARS < predicted_bytes - real < HIGH * unit, (predicted_bytes / unit, real / unit)


@pytest.mark.parametrize(
    "name",
    ["mlp", "swiglu", "resnet", "unet", "gpt", "dropout_gpt", "gqa_fused", "rotary", "lora", "contrastive", "repeated",
     "hf_llama", "hf_gpt2", "hf_bert_pretraining", "hf_t5", "hf_vit"],
)  # fmt: skip
def test_a_model_keeps_what_the_table_says(name, tmp_path):
    case = ZOO[name](batch=8)
    assert predicted(*case) == pytest.approx(saved(*case, tmp_path), rel=0.03)


def test_a_region_that_is_recomputed_keeps_only_what_goes_into_it():
    whole = predicted(*ZOO["gpt"]())
    assert predicted(*ZOO["checkpointed_gpt"]()) < 0.5 * whole


def test_under_no_grad_nothing_is_kept():
    class Quiet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(32, 64)
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                y = F.gelu(self.up(x)).mean()
            return y * self.scale

    assert predicted(Quiet(), (torch.randn(16, 32),), {}) <= 8


def test_the_planner_gets_the_same_numbers_of_a_share():
    analysis = analysed(*ZOO["dropout_gpt"]())
    mesh = Mesh(axes=(Axis(name="dp", size=2),))
    name = next(op.name for op in analysis.graph.ops if "dropout" in op.target)
    signature = analysis.signatures[name]
    (role,) = [role for role in signature.roles if role.atom in analysis.batch]
    whole = saved_bytes(local_call(signature, {}, mesh, TrainingSetup()), signature)
    half = saved_bytes(local_call(signature, {"dp": role.name}, mesh, TrainingSetup()), signature)
    assert whole == ((False,), (False,), 4 * 12 * 32)
    assert half == ((False,), (False,), 2 * 12 * 32)

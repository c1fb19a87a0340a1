"""DTensor's tensor and sequence parallelism, as its tutorial sets them up: `parallelize_module` with a plan per layer.

Column-wise in, row-wise out. Sequence parallelism shards norms and residuals along the tokens, too.
"""

from collections.abc import Callable, Mapping

import torch.distributed as dist
import torch.nn.functional as F
from examples.gpt import GPT
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from .peers import Contender, training_step
from .workload import Workload

Styles = dict[str, ParallelStyle]


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


def _columns_and_rows(columns: str, rows: str) -> Callable[[], Styles]:
    def styles() -> Styles:
        split = {name: ColwiseParallel() for name in columns.split()}
        return split | {name: RowwiseParallel() for name in rows.split()}

    return styles


_LLAMA = ("self_attn.q_proj self_attn.k_proj self_attn.v_proj mlp.gate_proj mlp.up_proj",
          "self_attn.o_proj mlp.down_proj")  # fmt: skip
TENSOR: dict[str, Callable[[], Styles]] = {
    "gpt": _columns_and_rows("attn.qkv mlp.up", "attn.proj mlp.down"),
    "llama": _columns_and_rows(*_LLAMA),
    "bert": _columns_and_rows(
        "attention.self.query attention.self.key attention.self.value intermediate.dense",
        "attention.output.dense output.dense",
    ),
    "vit": _columns_and_rows("attention.q_proj attention.k_proj attention.v_proj mlp.fc1",
                             "attention.o_proj mlp.fc2"),
}  # fmt: skip
"""The plan of a layer, by kind of model."""


def _split_embedding(head: ParallelStyle) -> Styles:
    return {"model.model.embed_tokens": RowwiseParallel(input_layouts=Replicate()), "model.lm_head": head}


OUTSIDE: dict[str, Callable[[], Styles]] = {
    "llama": lambda: _split_embedding(ColwiseParallel(output_layouts=Replicate())),
}
"""The plan of what is outside of layers; a table that the head shares with the embedding stays on every rank."""


def dtensor_tp(work: Workload) -> Contender:
    world = dist.get_world_size()
    mesh: DeviceMesh = init_device_mesh("cpu", (world,))
    model = work.model()
    if isinstance(model, GPT):
        with_local_attention(model, world)
    for layer in work.layers(model):
        parallelize_module(layer, mesh, TENSOR[work.kind]())
    if work.kind in OUTSIDE:
        parallelize_module(model, mesh, OUTSIDE[work.kind]())
    return Contender(name="DTensor TP", step=training_step(model, rows=False))


def _gathered(*names: str) -> PrepareModuleInput:
    """A module that takes a sequence that is sharded, and works on all of it."""
    if names:
        sharded, whole = dict.fromkeys(names, Shard(1)), dict.fromkeys(names, Replicate())
        return PrepareModuleInput(input_kwarg_layouts=sharded, desired_input_kwarg_layouts=whole)
    return PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))


def _along_tokens(norms: str, takes: Mapping[str, PrepareModuleInput], columns: str, rows: str) -> Styles:
    styles: Styles = {name: SequenceParallel() for name in norms.split()} | dict(takes)
    styles |= {name: ColwiseParallel() for name in columns.split()}
    return styles | {name: RowwiseParallel(output_layouts=Shard(1)) for name in rows.split()}


SEQUENCE: dict[str, Callable[[], Styles]] = {
    "gpt": lambda: _along_tokens(
        "ln1 ln2", {"attn": _gathered(), "mlp": _gathered()}, "attn.qkv mlp.up", "attn.proj mlp.down"
    ),
    "llama": lambda: _along_tokens(
        "input_layernorm post_attention_layernorm", {"self_attn": _gathered("hidden_states"), "mlp": _gathered()},
        *_LLAMA,
    ),
}  # fmt: skip
SEQUENCE_OUTSIDE: dict[str, Callable[[], Styles]] = {
    "gpt": lambda: {
        "ln": SequenceParallel(),
        "head": PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True
        ),
    },
    "llama": lambda: {
        "model.model.norm": SequenceParallel(),
        **_split_embedding(ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())),
    },
}


def dtensor_sp(work: Workload) -> Contender:
    world = dist.get_world_size()
    mesh: DeviceMesh = init_device_mesh("cpu", (world,))
    model = work.model()
    if isinstance(model, GPT):
        with_local_attention(model, world)
    layers = work.layers(model)
    for layer in layers:
        parallelize_module(layer, mesh, SEQUENCE[work.kind]())
    enters = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True)
    parallelize_module(layers[0], mesh, enters)
    parallelize_module(model, mesh, SEQUENCE_OUTSIDE[work.kind]())
    return Contender(name="DTensor SP", step=training_step(model, rows=False))

"""A published run as `sw.plan` is asked for it: the model on the meta device, the plan or constraints, the cluster."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import shardwright as sw
from shardwright.cluster import AttentionPrice, Efficiency, NodeGroup, parse, save
from shardwright.cluster.catalogue import FLASH_2
from shardwright.cluster.curve import Curve
from shardwright.plan import Plan

from .language import Language
from .published_rows import Row

OUTPUTS = sw.CompileOptions(outputs="scalars")

MEMORY = "200GiB"
"""More than the devices have: the time of a pipeline is asked for, also where ours would not fit."""

TRITON = AttentionPrice()
"""Flash attention 1, in Triton."""

OLDER_KERNELS = {
    ("llm-foundry", "A100"): (TRITON, 0.38), ("llm-foundry", "H100"): (TRITON, 0.20),
    ("torchtitan", "H100"): (FLASH_2, 0.30), ("fms-fsdp", "H100"): (FLASH_2, 0.30),
}  # fmt: skip
"""Runs whose attention was by an older kernel than the catalogue's, and what it reaches of the peak.

llm-foundry's benchmarks say attn_impl: triton; what it reaches is fitted to their long sequences. torch's attention is
by flash attention 2 on an H100 unless another is asked for (pytorch/pytorch issue 142132: 329 TFLOP/s, where flash
attention 3 has 632), and 0.8 of that in long runs, as in the catalogue.
"""

SLOW_MEMORY = 2.4e12
"""Bytes a second of the H100s of torchtitan's runs, which have 96 GB of an older memory (its docs/performance.md)."""


def predicted_seconds(row: Row) -> float:
    """Seconds of a step, as `sw.plan` predicts them."""
    return float(predicted_plan(row).predicted["train"]["seconds"])


def predicted_plan(row: Row) -> Plan:
    return _pipeline(row) if row.pp > 1 else _flat(row)


def _flat(row: Row) -> Plan:
    """By a plan string. Layers that are recomputed in part are put into the plan, which is priced again."""
    model, example = language_model(row, row.microbatch * row.dp)
    options = {
        "cluster": cluster(row), "precision": precision(row), "accumulate": row.accumulate, "compile": OUTPUTS
    }  # fmt: skip
    plan = sw.plan(model, example=example, plan=plan_string(row), **options)
    if row.recompute in ("none", "full"):
        return plan
    (stage,) = plan.entries["train"]
    again = replace(stage, recompute=recomputed_modules(row, model))
    return sw.plan(model, example=example, plan=replace(plan, entries={"train": (again,)}), **options)


def _pipeline(row: Row) -> Plan:
    """By constraints on the search, which says what a pipeline takes."""
    model, example = language_model(row, row.batch)
    schedule = "1f1b" if row.virtual == 1 else f"interleaved={row.virtual}"
    constraints: list[dict[str, Any]] = [
        {"stages": row.pp}, {"microbatches": row.accumulate}, {"schedule": schedule}, {"zero": int(row.zero)},
    ]  # fmt: skip
    if row.dp > 1:
        constraints.append({"axis": "dp", "size": row.dp, "splits": "batch"})
    if row.tp > 1:
        constraints.append({"axis": "tp", "size": row.tp})
    if row.recompute == "none":
        constraints.append({"recompute": False})
    else:
        constraints.append({"module": list(recomputed_modules(row, model)), "recompute": True})
    return sw.plan(
        model, example=example, plan="auto", cluster=cluster(row), precision=precision(row), constraints=constraints,
        memory=MEMORY, compile=OUTPUTS,
    )  # fmt: skip


def cluster(row: Row) -> str | Path:
    """The name of a run's cluster, or a file that says what was other than in the catalogue."""
    program, gpu = row.family.split()[0], parse(row.cluster).device(0).name.split("-")[0]
    if (program, gpu) not in OLDER_KERNELS:
        return row.cluster
    return cluster_file(row.cluster, *OLDER_KERNELS[program, gpu], SLOW_MEMORY if program == "torchtitan" else None)


@cache
def cluster_file(name: str, kernel: AttentionPrice, efficiency: float, bandwidth: float | None) -> Path:
    """A cluster of the catalogue, but with this attention, and maybe with another memory."""
    known = parse(name)
    (group,) = known.groups
    device = group.node.device
    others = tuple(item for item in device.efficiency if item.kind != "attention")
    own = Efficiency(kind="attention", curve=Curve(((1.0, efficiency),)))
    changed = replace(
        device, efficiency=(*others, own), attention=kernel, bandwidth=bandwidth or device.bandwidth
    )  # fmt: skip
    node = replace(group.node, device=changed)
    path = Path(tempfile.mkdtemp()) / "cluster.yaml"
    save(replace(known, groups=(NodeGroup(node=node, nodes=group.nodes),)), path)
    return path


def plan_string(row: Row) -> str:
    replicas = row.dp // row.ep
    nodes = row.gpus // 8
    parts = {
        "0": [f"dp={replicas}"], "1": [f"zero1={replicas}"], "3": [f"zero3={replicas}"],
        "hsdp": [f"dp={nodes}", f"zero3={replicas // nodes}"],
    }[row.zero]  # fmt: skip
    parts = [part for part in parts if not part.endswith("=1")]
    parts += [f"ep={row.ep}"] if row.ep > 1 else []
    parts += [f"{'sp' if row.sp else 'tp'}={row.tp}"] if row.tp > 1 else []
    return ",".join([*parts, "recompute"] if row.recompute == "full" else parts)


def recomputed_modules(row: Row, model: nn.Module) -> tuple[str, ...]:
    """The modules that are recomputed. torchtitan's selective recomputation keeps every second matmul and attention:
    about half of a layer, so every second layer stands for it."""
    name = "blocks" if isinstance(model, Language) else "model.layers"
    if row.recompute == "attention":
        return tuple(f"{name}.{layer}.attention.scores" for layer in range(row.layers))
    part = {"full": 1.0, "selective": 0.5}.get(row.recompute)
    part = float(row.recompute) if part is None else part
    chosen = [layer for layer in range(row.layers) if int((layer + 1) * part) > int(layer * part)]
    return tuple(f"{name}.{layer}" for layer in chosen)


def precision(row: Row) -> dict[str, str]:
    """Everything is computed in 16 bits and updated in float32, as FSDP's mixed precision and Megatron have it.

    llm-foundry and fms-fsdp sum gradients in 16 bits, the others in float32.
    """
    narrow = row.family.startswith(("llm-foundry", "fms-fsdp"))
    return {"base": "bf16", "sync": "bfloat16" if narrow else "float32"}


def language_model(row: Row, samples: int) -> tuple[nn.Module, dict[str, Any]]:
    """The model of a run and an example batch."""
    config: Any = None
    sizes = {
        "vocab_size": row.vocab, "hidden_size": row.d, "num_hidden_layers": row.layers, "use_cache": False,
        "num_attention_heads": row.heads, "num_key_value_heads": row.kv_heads, "max_position_embeddings": row.seq,
    }  # fmt: skip
    with torch.device("meta"):
        ids = torch.zeros(samples, row.seq, dtype=torch.long)
        if row.arch in ("mpt", "megatron"):
            model: nn.Module = Language(
                row.arch, row.d, row.layers, row.heads, row.kv_heads, row.ffn, row.vocab, row.seq
            )
            return model, {"ids": ids, "labels": ids}
        if row.arch == "llama":
            config = transformers.LlamaConfig(**sizes, intermediate_size=row.ffn)
            return transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids, "use_cache": False}
        # The published runs of GPT-OSS had a fused kernel for its attention with sinks; Hugging Face's computes all
        # scores. So the model is Qwen's of the same sizes: without sinks, and without the window of every second
        # layer, which saves 6 % of the arithmetic.
        config = transformers.Qwen3MoeConfig(
            **sizes, moe_intermediate_size=row.ffn, num_experts=row.experts, num_experts_per_tok=row.picked,
            head_dim=64 if row.arch == "gpt-oss" else 128,
        )  # fmt: skip
        model = transformers.Qwen3MoeForCausalLM(config)
    return model, {"input_ids": ids, "labels": ids, "use_cache": False}

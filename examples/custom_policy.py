"""Train the small GPT under a policy of one's own, on two processes.

    torchrun --standalone --nproc-per-node=2 examples/custom_policy.py --policy tensor_parallel
    torchrun --standalone --nproc-per-node=2 examples/custom_policy.py --policy pipeline
    torchrun --standalone --nproc-per-node=2 examples/custom_policy.py --policy partial

At the end rank 0 trains again on one device, and compares. docs/policies.md has all verbs. On the command line of
shardwright a policy is named by its file: --plan examples/custom_policy.py:pipeline.
"""

import argparse
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn

import shardwright as sw
from gpt import GPT, GPTConfig
from shardwright.cluster import Cluster
from shardwright.ir import Graph
from shardwright.plan import Plan
from shardwright.policy import PolicyBuilder
from shardwright.runtime.world import start
from text import DATA, Characters

LAYERS = 2


def tensor_parallel(graph: Graph, cluster: Cluster) -> Plan:
    """Megatron's: QKV and the first linear of an MLP by columns; what reads them follows."""
    plan = PolicyBuilder(graph, cluster, tp=2)
    plan.split(["blocks.*.attn.qkv", "blocks.*.mlp.up"], "n", over="tp")
    plan.split(["wte", "head"], "n", over="tp")  # the vocabulary
    plan.recompute("blocks.0.mlp")
    return plan.build()


def pipeline(graph: Graph, cluster: Cluster) -> Plan:
    """A stage for each block. The first one runs a forward more before its first backward than 1F1B has it."""
    plan = PolicyBuilder(graph, cluster)
    for number in range(LAYERS):
        plan.place(f"blocks.{number}", devices=number)
    plan.schedule("1f1b", microbatches=4)
    plan.order("F0.2", "B0.0")
    return plan.build()


def partial(graph: Graph, cluster: Cluster) -> PolicyBuilder:
    """The MLPs are split as in Megatron, all blocks alike; the planner decides the rest."""
    plan = PolicyBuilder(graph, cluster, tp=2)
    plan.split("blocks.*.mlp.up", "n", over="tp")
    plan.split("blocks.*.mlp.down", "k", over="tp")
    plan.tie("blocks.*")
    return plan


POLICIES = {policy.__name__: policy for policy in (tensor_parallel, pipeline, partial)}


def build(vocab: int, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab=vocab, seq=32, n_layer=LAYERS, d=64)).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[tuple[Tensor, Tensor]]) -> list[float]:
    losses = []
    for tokens, targets in batches:
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(argv: list[str] | None = None) -> list[tuple[float, float]]:
    """Returns on rank 0 the losses in parallel and on one device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", choices=POLICIES, default="tensor_parallel")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--code", type=Path, default=Path("generated"), help="where generated code is written")
    args = parser.parse_args(argv)
    world, text = start(), Characters(DATA)
    data = list(islice(text.batches(batch=8, seq=32, seed=0, device=world.device), args.steps))
    model, optimizer = sw.parallelize(
        *build(len(text.alphabet), world.device), plan=POLICIES[args.policy], example=data[0], cluster="catalogue",
        compile=sw.CompileOptions(directory=args.code),
    )  # fmt: skip
    losses = train(model, optimizer, data)
    if world.rank != 0:
        return []
    pairs = list(zip(losses, train(*build(len(text.alphabet), world.device), data), strict=True))
    for step, (parallel, alone) in enumerate(pairs):
        print(f"step {step}: {parallel:.6f} on {world.size} ranks, {alone:.6f} on one device")
    return pairs


if __name__ == "__main__":
    main()

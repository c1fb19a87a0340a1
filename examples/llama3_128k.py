"""Llama-3-8B at 131,072 tokens: plan it for a cluster here, or train a small one at a long sequence.

    python examples/llama3_128k.py --plan-only --cluster 8xH100
    python examples/llama3_128k.py --plan-only --cluster 8x8xH100 --batch 8
    torchrun --standalone --nproc-per-node=2 examples/llama3_128k.py --seq 4096

The first two need no GPU and no weights: they show the plan, what it is predicted to take and what its memory goes to.
The last trains a model of Llama 3's shape but small, one sequence at a time, so that only the sequence, the heads
and the weights can be shared among ranks. docs/llama3_128k.md explains what is seen.
"""

import argparse
import time
from itertools import islice

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import shardwright as sw
from shardwright.huggingface import empty_model
from shardwright.plan import Plan
from shardwright.runtime.world import start
from text import DATA, Characters


def llama3_8b(seq: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=seq, tie_word_embeddings=False, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )  # fmt: skip


def small_llama3(vocabulary: int, seq: int, layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=224, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=seq, tie_word_embeddings=False, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )  # fmt: skip


def show_plan(args: argparse.Namespace) -> Plan:
    """Plan for a cluster that need not exist here: the model is on meta, and so is its batch."""
    seq = args.seq or 131072
    ids = torch.zeros(args.batch, seq, dtype=torch.int64, device="meta")
    before = time.perf_counter()
    plan = sw.plan(
        empty_model(llama3_8b(seq)), example={"input_ids": ids, "labels": torch.empty_like(ids)}, plan=args.plan,
        cluster=args.cluster, precision="bf16-mixed", compile=sw.CompileOptions(outputs="scalars"),
    )  # fmt: skip
    print(sw.explain(plan))
    print(f"captured and planned in {time.perf_counter() - before:.1f} s")
    if args.save:
        plan.save(args.save)
    return plan


def train(args: argparse.Namespace) -> list[float]:
    """A small model at a long sequence, on the ranks that torchrun started."""
    world, seq, text = start(), args.seq or 4096, Characters(DATA)

    def batches(steps: int) -> list[dict[str, Tensor]]:
        drawn = text.batches(batch=args.batch, seq=seq, seed=args.seed, device=world.device)
        return [{"input_ids": ids, "labels": ids} for ids, _ in islice(drawn, steps)]

    torch.manual_seed(args.seed)
    model = LlamaForCausalLM(small_llama3(len(text.alphabet), seq, args.layers)).to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    model, optimizer = sw.parallelize(
        model, optimizer, example=batches(1)[0], plan=args.plan,
        compile=sw.CompileOptions(outputs="scalars", directory=args.code),
    )  # fmt: skip
    if world.rank == 0:
        print(sw.explain(model.plan))
    losses = []
    for step, batch in enumerate(batches(args.steps)):
        before = time.perf_counter()
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if world.rank == 0:
            print(f"step {step + 1:3d}  loss {losses[-1]:.4f}  {time.perf_counter() - before:.2f} s", flush=True)
    return losses


def main(argv: list[str] | None = None) -> Plan | list[float]:
    """Returns the plan, or the losses."""
    args = parse(argv)
    return show_plan(args) if args.plan_only else train(args)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", default="auto", help="auto, a plan string, or a plan file")
    parser.add_argument("--plan-only", action="store_true", help="plan Llama-3-8B, and train nothing")
    parser.add_argument("--cluster", default="8xH100", help="with --plan-only: what to plan for")
    parser.add_argument("--save", help="with --plan-only: where to write the plan")
    parser.add_argument("--seq", type=int, help="tokens; 131072 to plan, 4096 to train")
    parser.add_argument("--batch", type=int, default=1, help="sequences, over all ranks")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--code", default=".shardwright", help="where generated code goes")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()

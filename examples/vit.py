"""Train a small vision transformer of transformers, on as many processes as torchrun starts.

    torchrun --standalone --nproc-per-node=2 examples/vit.py --plan tp=2

The loop is that of a single-device script. At the end rank 0 trains again on one device, and compares.
"""

import argparse
from collections.abc import Iterable
from itertools import islice

import torch
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification

import shardwright as sw
from pictures import CLASSES, pictures
from shardwright.runtime.world import start


def build(seed: int, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    config = ViTConfig(
        image_size=16, patch_size=4, hidden_size=64, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=128, num_labels=CLASSES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = ViTForImageClassification(config).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[tuple[Tensor, Tensor]]) -> list[float]:
    losses = []
    model.train()
    for image, label in batches:
        loss = model(pixel_values=image, labels=label).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(argv: list[str] | None = None) -> list[tuple[float, float]]:
    """Returns on rank 0 the losses in parallel and on one device."""
    args = parse(argv)
    world = start()

    def batches() -> Iterable[tuple[Tensor, Tensor]]:
        return islice(pictures(batch=args.batch, size=16, seed=args.seed, device=world.device), args.steps)

    model, optimizer = sw.parallelize(*build(args.seed, world.device), plan=args.plan, directory=args.code)
    losses = train(model, optimizer, batches())
    if world.rank != 0:
        return []
    pairs = list(zip(losses, train(*build(args.seed, world.device), batches()), strict=True))
    for step, (parallel, alone) in enumerate(pairs):
        print(f"step {step + 1:3d}  loss {parallel:.5f}  on one device {alone:.5f}")
    return pairs


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", default="tp=2", help="for example dp=2, tp=2, zero3=2, pp=2, auto")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--code", default=".shardwright", help="where generated code goes")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()

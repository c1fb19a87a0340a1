"""Train a small vision transformer of transformers, on as many processes as torchrun starts.

    torchrun --standalone --nproc-per-node=2 examples/vit.py --plan tp=2

The loop is that of a single-device script. At the end rank 0 trains again on one device, and compares.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification

import shardwright as sw
from pictures import CLASSES, SIZE, batches, parse, show
from shardwright.runtime.world import start


def build(seed: int, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    config = ViTConfig(
        image_size=SIZE, patch_size=4, hidden_size=64, num_hidden_layers=3, num_attention_heads=4,
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
    args = parse(argv, __doc__, plan="tp=2")
    world = start()
    model, optimizer = sw.parallelize(
        *build(args.seed, world.device), plan=args.plan, compile=sw.CompileOptions(directory=args.code)
    )
    losses = train(model, optimizer, batches(args, world.device))
    if world.rank != 0:
        return []
    pairs = list(zip(losses, train(*build(args.seed, world.device), batches(args, world.device)), strict=True))
    show(pairs)
    return pairs


if __name__ == "__main__":
    main()

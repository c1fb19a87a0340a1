"""nanoGPT's recipe on any plan: a character GPT on Paradise Lost, as `train.py` of nanoGPT trains one.

    torchrun --standalone --nproc-per-node=2 examples/nanogpt.py --plan dp=2
    torchrun --standalone --nproc-per-node=2 examples/nanogpt.py --plan zero3=2 --resume

Warm-up and cosine decay, weight decay for matrices only, gradient accumulation, clipping, evaluation on both splits,
checkpoints, resuming. `docs/nanogpt.md` says what differs from a script for DDP. `NanoGPT` and `Windows` are also what
`train_gpt.yaml` names.
"""

import argparse
import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import shardwright as sw
from gpt import GPT, GPTConfig
from shardwright.checkpoint import CheckpointFolder
from shardwright.runtime.world import start

HERE = Path(__file__).parent
TEXT = "data/paradise_lost.txt"
Batch = tuple[Tensor, Tensor]


class NanoGPT(GPT):
    """A small GPT over ASCII characters."""

    def __init__(
        self, n_layer: int = 4, n_head: int = 4, n_embd: int = 128, block_size: int = 128, dropout: float = 0.0,
        vocab_size: int = 128,
    ) -> None:  # fmt: skip
        super().__init__(
            GPTConfig(vocab=vocab_size, seq=block_size, n_layer=n_layer, n_head=n_head, d=n_embd, dropout=dropout)
        )
        for block in self.blocks:  # so that the residual stream does not grow with depth
            for last in (block.attn.proj, block.mlp.down):
                nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * n_layer))


def split_of(file: str, part: str) -> Tensor:
    """The characters of a text. The last tenth is for validation."""
    tokens = torch.tensor(list((HERE / file).read_bytes()))
    cut = len(tokens) * 9 // 10
    return tokens[:cut] if part == "train" else tokens[cut:]


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a text: the characters, and the same one further."""

    def __init__(self, file: str = TEXT, block_size: int = 128, stride: int = 64, part: str = "train") -> None:
        self.tokens, self.block_size, self.stride = split_of(file, part), block_size, stride

    def __len__(self) -> int:
        return (len(self.tokens) - self.block_size - 1) // self.stride + 1

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        window = self.tokens[row * self.stride : row * self.stride + self.block_size + 1]
        return window[:-1], window[1:]


def make_optimizer(model: nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    """Matrices and embeddings decay; biases and norms don't."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": args.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Linear warm-up, then a cosine down to `min_lr`, and that from there on."""
    if step < args.warmup:
        return args.lr * (step + 1) / (args.warmup + 1)
    progress = min(1.0, (step - args.warmup) / max(1, args.decay_steps - args.warmup))
    return args.min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * (args.lr - args.min_lr)


def batch_maker(args: argparse.Namespace, device: torch.device) -> Callable[[str, int], Batch]:
    """Random windows by number: the same on every rank, and after a stop."""
    splits = {part: split_of(TEXT, part) for part in ("train", "val")}

    def get_batch(part: str, number: int) -> Batch:
        generator = torch.Generator().manual_seed(1_000_003 * args.seed + 2 * number + (part == "val"))
        tokens = splits[part]
        starts = torch.randint(len(tokens) - args.block_size, (args.batch, 1), generator=generator)
        window = tokens[starts + torch.arange(args.block_size + 1)].to(device)
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()

    return get_batch


@torch.no_grad()
def estimate_loss(model: nn.Module, get_batch: Callable[[str, int], Batch], count: int) -> dict[str, float]:
    """The mean loss over a few batches of each split. All ranks run it: the model is spread over them."""
    model.eval()
    losses = {
        part: torch.stack([model(*get_batch(part, number)) for number in range(count)]).mean().item()
        for part in ("train", "val")
    }
    model.train()
    return losses


def main(argv: list[str] | None = None) -> dict[int, float]:
    """Returns the losses by step."""
    args = parse(argv)
    world = start()  # joins the other ranks, if torchrun started any
    master = world.rank == 0
    torch.manual_seed(args.seed)
    get_batch = batch_maker(args, world.device)
    model = NanoGPT(args.layers, args.heads, args.width, args.block_size, args.dropout).to(world.device)
    optimizer = make_optimizer(model, args)
    model, optimizer = sw.parallelize(
        model, optimizer, example=get_batch("train", 0), plan=args.plan, accumulate=args.accumulate,
        compile=sw.CompileOptions(directory=args.code),
    )  # fmt: skip
    checkpoints = CheckpointFolder(Path(args.out), keep_last=1, keep_best=1, metric="val")
    first = checkpoints.load(model, optimizer).step or 0 if args.resume else 0

    losses: dict[int, float] = {}
    for step in range(first, args.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        if step % args.eval_every == 0 and step > first:
            estimated = estimate_loss(model, get_batch, args.eval_batches)
            checkpoints.save(step, model, optimizer, metrics=estimated)
            if master:
                print(f"step {step}: train loss {estimated['train']:.4f}, val loss {estimated['val']:.4f}", flush=True)
        if step == args.steps:
            break
        loss = torch.zeros((), device=world.device)
        for micro_step in range(args.accumulate):
            part = model(*get_batch("train", step * args.accumulate + micro_step)) / args.accumulate
            part.backward()  # the last one of a step syncs the gradients
            loss += part.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses[step] = loss.item()
        if master and step % args.log_every == 0:
            print(f"iter {step}: loss {losses[step]:.4f}, lr {optimizer.param_groups[0]['lr']:.2e}", flush=True)
    return losses


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", default="auto", help="for example dp=2, tp=2, zero3=2, pp=2, auto")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16, help="sequences of one micro-step, over all ranks")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-steps of an update")
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--min-lr", type=float, default=1e-4)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--decay-steps", type=int, default=200)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--grad-clip", type=float, default=1.0)
    parser.add_argument("--eval-every", type=int, default=50)
    parser.add_argument("--eval-batches", type=int, default=8)
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--resume", action="store_true", help="from the newest checkpoint of --out")
    parser.add_argument("--out", default=str(Path(tempfile.gettempdir()) / "shardwright-nanogpt"))
    parser.add_argument("--code", default=".shardwright", help="where generated code goes")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()

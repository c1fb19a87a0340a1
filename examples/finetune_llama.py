"""Fine-tune a Llama from a folder of safetensors, without ever holding the whole model on one rank.

    torchrun --standalone --nproc-per-node=2 examples/finetune_llama.py --plan zero3=2
    torchrun --standalone --nproc-per-node=2 examples/finetune_llama.py --model path/to/llama --plan tp=2 --lora 8

Without --model a small one is made first. The result is an ordinary folder of Hugging Face, which the
first rank opens at the end and lets write something. With --lora the weights stay as they are and only
small products beside them are trained; they are merged into the exported weights.
"""

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import shardwright as sw
from shardwright.checkpoint import load_weights, save_weights
from shardwright.huggingface import empty_model
from shardwright.runtime.world import start
from text import DATA, Characters


class Lora(nn.Linear):
    """A linear layer that stays as it is, with a product of two small matrices beside it."""

    def __init__(self, like: nn.Linear, rank: int) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.scale = like.in_features, like.out_features, 16 / rank
        self.weight, self.bias = like.weight, like.bias  # under the same keys
        self.down = nn.Parameter(torch.randn(rank, like.in_features) / like.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(like.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(F.linear(x, self.down), self.up) * self.scale


def add_lora(model: nn.Module, rank: int) -> None:
    """Freeze a model and put small trainable products beside its attention layers."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in ("q_proj", "v_proj"):
                setattr(module, name, Lora(child, rank))


@torch.no_grad()
def merge_lora(model: nn.Module) -> None:
    """Add the products to the weights that they stand beside, one whole weight at a time."""
    state = model.state_dict()
    for path in [key.removesuffix(".up") for key in state if key.endswith(".up")]:
        weight, up, down = (whole(state[f"{path}.{name}"]) for name in ("weight", "up", "down"))
        model.load_state_dict({f"{path}.weight": weight + up @ down * (16 / up.shape[1])}, strict=False)


def whole(shard: Tensor) -> Tensor:
    """All of a tensor, of which this rank may hold a shard. The ranks that hold the others call it too."""
    return shard.full_tensor() if hasattr(shard, "full_tensor") else shard


def batches(text: Characters, args: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Tensor]]:
    """As a collator of transformers makes them: rows of different lengths, padded, with a mask, labels -100 there."""
    generator = torch.Generator().manual_seed(args.seed)
    for ids, _ in text.batches(batch=args.batch, seq=args.seq, seed=args.seed, device=device):
        lengths = torch.randint(args.seq // 2, args.seq + 1, (args.batch, 1), generator=generator).to(device)
        mask = torch.arange(args.seq, device=device) < lengths
        yield {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}


def main(argv: list[str] | None = None) -> tuple[list[float], str]:
    """Returns the losses, and on the first rank what the exported model writes."""
    args = parse(argv)
    world = start()  # joins the other ranks, if torchrun started any
    text = Characters(DATA)
    folder = Path(args.model or small_model(Path(args.out) / "start", len(text.alphabet), world.rank))

    model = empty_model(folder)
    if args.lora:
        torch.manual_seed(args.seed)
        add_lora(model, args.lora)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.lr)
    data = batches(text, args, world.device)
    model, optimizer = sw.parallelize(
        model, optimizer, example=next(data), plan=args.plan, compile=sw.CompileOptions(directory=args.code)
    )
    load_weights(folder, model, strict=not args.lora)

    losses = []
    for step in range(args.steps):
        loss = model(**next(data)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if world.rank == 0:
            print(f"step {step + 1:3d}  loss {losses[-1]:.4f}")

    if args.lora:
        merge_lora(model)
    result = Path(args.out) / "tuned"
    save_weights(result, model, without=("*.up", "*.down"))  # one tensor at a time: no rank has them all
    return losses, written_by(result, text) if world.rank == 0 else ""


def written_by(folder: Path, text: Characters) -> str:
    """Open what was exported as anybody would, and let it continue a few characters."""
    tuned = AutoModelForCausalLM.from_pretrained(folder)
    built = tuned.generate(text.tokens[None, :16], max_new_tokens=48, do_sample=False, pad_token_id=0)
    message = text.decode(built[0])
    print(f"{folder} writes: {message!r}")
    return message


def small_model(folder: Path, vocab: int, rank: int) -> Path:
    """A model to start from; the first rank makes it, and the others wait for it."""
    if rank == 0:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=vocab, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False, eos_token_id=None,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(folder)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    return folder


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder with config.json and safetensors")
    parser.add_argument("--plan", default="zero3=2", help="for example zero3=2, tp=2, pp=2")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters of this rank only")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", default=str(Path(tempfile.gettempdir()) / "shardwright-llama"))
    parser.add_argument("--code", default=".shardwright", help="where generated code goes")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()

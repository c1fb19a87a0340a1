"""Train the character GPT with Lightning: an ordinary LightningModule, and one word in the Trainer.

    python examples/lightning_gpt.py --devices 2 --plan tp=2
    torchrun --standalone --nproc-per-node=2 examples/lightning_gpt.py --devices 2 --plan dp=2

The checkpoint of the run is a folder that a run under another plan can resume from (--resume).
"""

import argparse
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from gpt import GPT, GPTConfig
from shardwright import CompileOptions
from shardwright.lightning import ShardwrightStrategy
from text import DATA, Characters


class LitGPT(LightningModule):
    """Nothing in here knows of processes."""

    def __init__(self, vocab: int, seq: int, lr: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = GPT(GPTConfig(vocab=vocab, seq=seq, n_layer=2, n_head=4, d=64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        idx, target = batch
        loss = self.model(idx, target)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        idx, target = batch
        self.log("val_loss", self.model(idx, target), prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warm_up, "interval": "step"}}


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Shards of the text, each with the same one character ahead."""

    def __init__(self, tokens: Tensor, seq: int) -> None:
        self.tokens, self.seq = tokens, seq

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq

    def __getitem__(self, at: int) -> tuple[Tensor, Tensor]:
        window = self.tokens[at * self.seq : (at + 1) * self.seq + 1]
        return window[:-1], window[1:]


def main(argv: list[str] | None = None) -> dict[str, float]:
    args = parse(argv)
    seed_everything(args.seed, verbose=False)
    text = Characters(DATA)
    split = len(text.tokens) * 9 // 10
    train = DataLoader(Windows(text.tokens[:split], args.seq), batch_size=args.batch, shuffle=True, drop_last=True)
    val = DataLoader(Windows(text.tokens[split:], args.seq), batch_size=args.batch, drop_last=True)

    trainer = Trainer(
        strategy=ShardwrightStrategy(plan=args.plan, compile=CompileOptions(directory=args.code)),
        accelerator="auto", devices=args.devices, max_steps=args.steps, val_check_interval=args.steps,
        limit_val_batches=2, gradient_clip_val=1.0, logger=False, enable_model_summary=False,
        callbacks=[ModelCheckpoint(args.out, save_last=True)], enable_progress_bar=args.bar,
    )  # fmt: skip
    trainer.fit(LitGPT(len(text.alphabet), args.seq), train, val, ckpt_path=args.resume)
    by_key = {name: float(value) for name, value in trainer.callback_metrics.items()}
    if trainer.is_global_zero:
        message = ", ".join(f"{name} {value:.4f}" for name, value in by_key.items())
        print(f"after {trainer.global_step} steps: {message}")
    return by_key


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", default="auto", help="for example dp=2, tp=2, zero3=2, pp=2, auto")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", default="runs/lightning_gpt")
    parser.add_argument("--resume", help="a checkpoint to resume from")
    parser.add_argument("--code", default=".shardwright", help="where generated code goes")
    parser.add_argument("--bar", action="store_true", help="show a progress bar")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()

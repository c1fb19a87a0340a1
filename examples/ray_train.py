"""Train a character GPT with Ray Train: Ray starts the ranks, on one machine or a cluster, and starts them again.

    python examples/ray_train.py --workers 2 --plan zero3=2 --storage /shared/runs

`train_loop` runs on every worker, where Ray has initialised torch.distributed. When a worker is lost, Ray starts all of
them again, and the loop resumes from the last checkpoint. All ranks write it together, to a folder that all machines
share, so that Ray has nothing to upload.
"""

import argparse
import os
from itertools import islice
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # before ray is imported: no report of its use is sent

import ray
import torch
from ray.train import FailureConfig, Result, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import shardwright as sw
from gpt import GPT, GPTConfig
from shardwright.checkpoint import CheckpointFolder, save_weights
from text import DATA, Characters


def train_loop(config: dict[str, Any]) -> dict[str, float]:
    text, folder = Characters(DATA), Path(config["folder"])
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab=len(text.alphabet), seq=32, n_layer=config["layers"], n_head=4, d=32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    device = ray.train.torch.get_device()
    batches = text.batches(batch=8, seq=32, seed=1, device=device)  # on every rank the same
    model, optimizer = sw.parallelize(
        model.to(device), optimizer, example=next(batches), plan=config["plan"],
        compile={"directory": folder / "generated"},
    )  # fmt: skip

    checkpoints = CheckpointFolder(folder / "checkpoints", keep_last=2)
    last = checkpoints.load(model, optimizer)
    first = 0 if last is None else last.step
    losses: list[float] = []
    for step, batch in islice(enumerate(batches, start=1), first, config["steps"]):
        loss = model(*batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % config["save_every"] == 0:
            checkpoints.save(step, model, optimizer)
            ray.train.report({"step": step, "loss": losses[-1]})
    save_weights(folder / "model.safetensors", model)
    return {"resumed after": first, "steps": len(losses), "loss": losses[-1] if losses else float("nan")}


def trainer(config: dict[str, Any], workers: int, loop: Any = train_loop) -> TorchTrainer:
    return TorchTrainer(
        loop, train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(storage_path=config["folder"], failure_config=FailureConfig(max_failures=3)),
    )  # fmt: skip


def main() -> Result:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--plan", default="zero3=2")
    parser.add_argument("--storage", default="ray-run", help="a folder that all machines share")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--layers", type=int, default=2)
    args = parser.parse_args()
    if not ray.is_initialized():  # by `ray job submit`, or an address in RAY_ADDRESS
        ray.init(include_dashboard=False)
    folder = str(Path(args.storage).resolve())  # workers have working directories of their own
    config = {"plan": args.plan, "steps": args.steps, "layers": args.layers, "save_every": 10, "folder": folder}
    return trainer(config, args.workers).fit()


if __name__ == "__main__":
    print(main().return_value)

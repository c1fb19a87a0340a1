"""Is the prediction right on this machine, with what `auto` measures by itself? Real models, predicted and run.

    python -m bench.predictions [--rounds 5] [--jobs ...] [--clock wall|processor] [-o results.json]

The machine is measured as the first `plan="auto"` does it (`calibrate.BRIEF`), alone and on 2 ranks. Every model is
then predicted and run on one rank and on two under plan strings, interleaved; the least of all rounds counts, since
what else runs on the machine only adds. What counts is the order (Spearman's correlation) and the median error.

On a busy machine no step of 100 ms runs uninterrupted. `--clock processor` compares with the processor time of the
slower rank instead: ranks of one thread that share memory compute, copy and spin on it, so that on a quiet machine both
clocks agree but for sleep. The load at the beginning and at the end is printed beside the result.
"""

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from examples.gpt import GPT, GPTConfig
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import shardwright as sw
from shardwright.calibrate import BRIEF, calibrate
from shardwright.cluster import save

from .peers import Contender, training_step
from .plans import Job, rows, spearman, text
from .race import order
from .workload import optimizer_of

PLANS = {1: ("auto",), 2: ("dp=2", "zero2=2", "zero3=2", "tp=2")}


class Labelled(nn.Module):
    """A model of transformers that is called with inputs and labels, and returns the loss."""

    def __init__(self, model: nn.Module, own_loss: bool = False) -> None:
        super().__init__()
        self.model, self.own_loss = model, own_loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.own_loss:
            return self.model(x, labels=y).loss
        logits = self.model(x).logits
        return F.cross_entropy(logits.flatten(0, -2), y.flatten())


def llama(seq: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return Labelled(LlamaForCausalLM(LlamaConfig(
        vocab_size=2048, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=seq, use_cache=False,
    )))  # fmt: skip


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return Labelled(GPT2LMHeadModel(GPT2Config(
        vocab_size=4096, n_embd=256, n_layer=4, n_head=8, n_positions=256, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )))  # fmt: skip


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return Labelled(BertForMaskedLM(BertConfig(
        vocab_size=4096, hidden_size=256, num_hidden_layers=4, num_attention_heads=8, intermediate_size=1024,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )))  # fmt: skip


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return Labelled(ViTForImageClassification(ViTConfig(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=8, intermediate_size=1024, image_size=96,
        patch_size=8, num_labels=16,
    )))  # fmt: skip


def resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return Labelled(ResNetForImageClassification(ResNetConfig(
        embedding_size=32, hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic", num_labels=16,
    )))  # fmt: skip


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return Labelled(T5ForConditionalGeneration(T5Config(
        vocab_size=2048, d_model=256, d_kv=32, d_ff=1024, num_layers=3, num_heads=8, dropout_rate=0.0,
        decoder_start_token_id=0, use_cache=False,
    )), own_loss=True)  # fmt: skip


def gpt(d: int) -> Callable[[], nn.Module]:
    return lambda: GPT(GPTConfig(vocab=512, seq=128, n_layer=4, n_head=8, d=d))


JOBS = {
    job.name: job
    for job in (
        Job(name="GPT d=256", make=gpt(256), batch=text(512, 8, 128)),
        Job(name="GPT d=384", make=gpt(384), batch=text(512, 8, 128)),
        Job(name="GPT d=512", make=gpt(512), batch=text(512, 8, 128)),
        Job(name="Llama, 256 tokens", make=lambda: llama(256), batch=text(2048, 8, 256)),
        Job(name="Llama, 1,024 tokens", make=lambda: llama(1024), batch=text(2048, 2, 1024)),
        Job(name="GPT-2", make=gpt2, batch=text(4096, 8, 128)),
        Job(name="BERT", make=bert, batch=text(4096, 8, 128)),
        Job(name="ViT", make=vit, batch=rows(8, 3, 96, 96, classes=16)),
        Job(name="ResNet", make=resnet, batch=rows(8, 3, 64, 64, classes=16)),
        Job(name="T5", make=t5, batch=text(2048, 8, 128)),
    )
}


def measure(name: str, ranks: int, rounds: int) -> dict[str, dict[str, float]]:
    """Seconds a step of every plan by each clock, the least of all rounds."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, args=(name, ranks, rounds, folder), nprocs=ranks)
        return dict(json.loads((Path(folder) / "times.json").read_text()))


def _rank(rank: int, name: str, ranks: int, rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = dist.FileStore(str(Path(folder) / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    os.environ["SHARDWRIGHT_CALIBRATE"] = "0"  # the plan of one rank needs no measurement
    job, contenders = JOBS[name], {}
    for plan in PLANS[ranks]:
        model = job.model()
        options: dict[str, Any] = {"directory": Path(folder) / "generated", "outputs": "scalars"}
        model, optimizer = sw.parallelize(
            model, optimizer_of(model), example=job.batches(1)[0], plan=plan, compile=options
        )
        contenders[plan] = Contender(name=plan, step=training_step(model, optimizer, rows=False))
    times = _race(contenders, job, rounds)
    if rank == 0:
        (Path(folder) / "times.json").write_text(json.dumps(times))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may still be at work for groups that nobody needs any more


def _race(contenders: dict[str, Contender], job: Job, rounds: int) -> dict[str, dict[str, float]]:
    (batch,) = job.batches(1)
    least = {plan: {"wall": float("inf"), "processor": float("inf")} for plan in contenders}
    for number in range(-2, rounds):  # two to warm up
        for plan in order(list(contenders), max(number, 0)):
            dist.barrier()
            wall, processor = time.perf_counter(), time.process_time()
            contenders[plan].step(*batch)
            spent = {"wall": time.perf_counter() - wall, "processor": time.process_time() - processor}
            for clock, seconds in spent.items():
                slowest = torch.tensor(seconds, dtype=torch.float64)
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
                if number >= 0:
                    least[plan][clock] = min(least[plan][clock], float(slowest))
    return least


def predictions(name: str, ranks: int, cluster: Path) -> dict[str, dict[str, Any]]:
    """What each plan of a model is predicted to take, with its parts."""
    job = JOBS[name]
    options: dict[str, Any] = {"cluster": cluster, "compile": {"outputs": "scalars"}}
    plans = {
        plan: sw.plan(job.model(), example=job.batches(1)[0], plan=plan, **options) for plan in PLANS[ranks]
    }  # fmt: skip
    return {name: dict(plan.predicted["train"]) for name, plan in plans.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--jobs", nargs="*", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("--clock", choices=["wall", "processor"], default="wall")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    console = Console(width=120)
    console.print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, clock {options.clock}")
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in options.ranks:
            path = Path(folder) / f"{ranks}.yaml"
            begin = time.perf_counter()
            save(calibrate(BRIEF, ranks)[0], path)
            console.print(f"measured {ranks} ranks in {time.perf_counter() - begin:.1f} s")
            for name in options.jobs:
                predicted, measured = predictions(name, ranks, path), measure(name, ranks, options.rounds)
                for plan, times in measured.items():
                    row = {"job": name, "ranks": ranks, "plan": plan, "predicted": predicted[plan]["seconds"], **times}
                    runs.append(row)
                    error = row["predicted"] / row[options.clock] - 1
                    shown = ", ".join(f"{kind} {1e3 * row[kind]:.1f} ms" for kind in ("predicted", "wall", "processor"))
                    console.print(f"{name}, {plan}: {shown}: {100 * error:+.0f} %")
    report(runs, options.clock, console)
    console.print(f"load {os.getloadavg()[0]:.1f}")
    if options.output is not None:
        options.output.write_text(json.dumps(runs, indent=1) + "\n")


def report(runs: list[dict[str, Any]], clock: str, console: Console) -> None:
    table = Table("model", "plan", "predicted ms", "wall ms", "processor ms", "error")
    for run in runs:
        times = [f"{1e3 * run[kind]:.1f}" for kind in ("predicted", "wall", "processor")]
        table.add_row(run["job"], run["plan"], *times, f"{100 * (run['predicted'] / run[clock] - 1):+.0f} %")
    console.print(table)
    correlation = spearman([run["predicted"] for run in runs], [run[clock] for run in runs])
    error = median(abs(run["predicted"] / run[clock] - 1) for run in runs)
    console.print(f"{len(runs)} runs: Spearman {correlation:.3f}, median error {100 * error:.0f} %")


if __name__ == "__main__":
    main()

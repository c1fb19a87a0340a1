"""What chunked logits save: `python -m bench.chunked_loss` prints one table.

python -m bench.chunked_loss                          all models under all plans
python -m bench.chunked_loss --models llama --plans tp=2

Models with 32,768 classes, trained with their logits whole and in chunks. Measured is the most memory that torch has
allocated on rank 0 in the second step, as in `bench/memory.py`; beside it what the memory simulation predicts, and
how many tensors of the size of the logits are saved: of them, their log_softmax and their gradient an eighth is left.
"""

import argparse
import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from tests.models.transformer import Transformer, TransformerConfig

from bench.memory import Case, Measured, measure_case, mib, ranks_of
from shardwright.capture import capture
from shardwright.compile import copy_to_meta
from shardwright.cost import TrainingSetup
from shardwright.memory import MemoryPeak, simulate_memory
from shardwright.plan.lowering import lower
from shardwright.plan.request import PlanRequest
from shardwright.planning import make_plan, only_scalars
from shardwright.rules import Analysis, analyse
from shardwright.runtime.launch import run_processes

CLASSES, BATCH, LENGTH, WIDTH, LAYERS = 32768, 4, 256, 256, 2
PLANS = ("single", "dp=2", "tp=2", "zero3=2")


def gpt() -> Case:
    torch.manual_seed(0)
    config = TransformerConfig(vocab=CLASSES, seq=LENGTH, d=WIDTH, n_layer=LAYERS, n_head=8)
    idx = torch.randint(CLASSES, (BATCH, LENGTH + 1))
    return Transformer(config).train(), (idx[:, :-1].contiguous(), idx[:, 1:].contiguous()), {}


def llama() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": CLASSES, "hidden_size": WIDTH, "intermediate_size": 688, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": LENGTH}
    idx = torch.randint(CLASSES, (BATCH, LENGTH))
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    return model.train(), (idx,), {"labels": idx.clone(), "use_cache": False}


MODELS: dict[str, Callable[[], Case]] = {"gpt": gpt, "llama": llama}


@dataclass(frozen=True, slots=True)
class Run:
    """A model under a plan: bytes measured and predicted."""

    measured: Measured
    predicted: MemoryPeak


def run(name: str, plan: str) -> Run:
    for _ in range(3):
        results = run_processes(ranks_of(plan), measure_here, name, plan, timeout=600.0)
        if results[0].complete:
            return Run(results[0], predict(name, plan))
    raise RuntimeError(f"{name} under {plan}: the profiler missed releases three times; is the machine busy?")


def measure_here(rank: int, name: str, plan: str) -> Measured:
    """The memory of a step on this rank."""
    return measure_case(MODELS[name], plan, outputs="scalars")


def predict(name: str, plan: str) -> MemoryPeak:
    analysis = analysed(name)
    planned = make_plan(analysis.graph, analysis, PlanRequest.read(plan), ranks_of(plan))
    return simulate_memory(lower(analysis.graph, planned, analysis), TrainingSetup(optimizer="adamw"))


@cache
def analysed(name: str) -> Analysis:
    module, args, kwargs = MODELS[name]()
    captured = capture(copy_to_meta(module), args, kwargs, entry="train", real=lambda: (module, args, kwargs))
    return analyse(replace(captured, graph=only_scalars(captured.graph)).graph)


def row(name: str, plan: str, chunks: int) -> tuple[str, ...]:
    whole, chunked = run(name, plan), run(name, f"{plan},chunked_loss={chunks}")
    logits = 4.0 * BATCH * LENGTH * CLASSES / (1 if plan == "single" else ranks_of(plan))
    saved = whole.measured.peak - chunked.measured.peak
    off = [f"{side.predicted.peak / side.measured.peak - 1:+.1%}" for side in (whole, chunked)]
    return (
        name, plan, mib(logits), mib(whole.measured.peak), off[0], mib(chunked.measured.peak), off[1],
        f"{saved / whole.measured.peak:.0%}", f"{saved / logits:.2f}",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--plans", nargs="+", default=list(PLANS))
    parser.add_argument("--chunks", type=int, default=8)
    args = parser.parse_args()
    console = Console(width=160)
    table = Table(
        "model", "plan", "logits", "whole", "predicted", "in chunks", "predicted", "saved", "in logits",
        title=f"The most memory a rank has in a step, MiB, with logits whole and in {args.chunks} chunks",
        caption=f"AdamW, gloo, {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}",
    )  # fmt: skip
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("measuring", total=len(args.models) * len(args.plans))
        for name in args.models:
            for plan in args.plans:
                bar.update(task, description=f"{name} {plan}")
                table.add_row(*row(name, plan, args.chunks))
                bar.advance(task)
    console.print(table)


if __name__ == "__main__":
    main()

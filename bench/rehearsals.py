"""Rehearsals of plans for large models: `python -m bench.rehearsals` plans each, rehearses the plan, prints one table.

python -m bench.rehearsals                        all
python -m bench.rehearsals --models vit t5        some of them
python -m bench.rehearsals --plans folder         plans are read from there if they are there, else written

Models are on the meta device, so nothing of their size is allocated. A rehearsal's seconds have everything in them,
the capture too; it may take `LIMIT`. The search for the plan is not in them.
"""

import argparse
import os
import platform
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import nn

import shardwright as sw
from bench.planning import gpt3, ids, llama

LIMIT = 120.0
"""Seconds that a rehearsal may take on two cores."""

Call = tuple[nn.Module, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Show:
    """A model, the cluster that it is planned for, and what is asked of the plan."""

    make: Callable[[], Call]
    cluster: str
    constraints: list[dict[str, Any]] | None = None
    seconds: float | None = None  # that the search may take


def mixtral() -> Call:
    """Mixtral 8x7B."""
    config = transformers.MixtralConfig(use_cache=False)
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(config)
    model.set_experts_implementation("eager")
    keywords = {"attention_mask": ids(128, 2048), "labels": ids(128, 2048), "use_cache": False}
    return model, ((ids(128, 2048),), keywords)


def vit() -> Call:
    """ViT-H/14."""
    config = transformers.ViTConfig(
        hidden_size=1280, num_hidden_layers=32, num_attention_heads=16, intermediate_size=5120, patch_size=14,
        image_size=224, num_labels=1000, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.ViTForImageClassification(config)
        images, labels = torch.zeros(1024, 3, 224, 224), torch.zeros(1024, dtype=torch.int64)
    return model, ((images,), {"labels": labels})


def t5() -> Call:
    """T5 v1.1 XXL, 11 billion parameters."""
    config = transformers.T5Config(
        d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64, feed_forward_proj="gated-gelu",
        vocab_size=32128, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, use_cache=False,
        tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.T5ForConditionalGeneration(config)
    keywords = {"attention_mask": ids(128, 512), "labels": ids(128, 512), "use_cache": False}
    return model, ((ids(128, 512),), keywords)


SHOWS = {
    "llama-70b": Show(make=lambda: llama(8192, 28672, 80, 64, 512), cluster="64x8xH100"),
    "gpt3": Show(make=gpt3, cluster="128x8xA100-80GB"),
    "mixtral": Show(make=mixtral, cluster="8x8xH100"),
    "mixtral-ep": Show(make=mixtral, cluster="8x8xH100", constraints=[{"axis": "ep", "size": 8}]),
    "vit": Show(make=vit, cluster="4x8xA100-80GB"),
    "t5": Show(make=t5, cluster="8x8xA100-80GB", seconds=40.0),
}


def row(name: str, folder: Path) -> tuple[str, ...]:
    show = SHOWS[name]
    model, example = show.make()
    model.train()
    path = folder / f"{name}.json"
    if not path.exists():
        plan = sw.plan(
            model, example=example, cluster=show.cluster, precision="bf16-mixed", compile={"outputs": "scalars"},
            constraints=show.constraints, seconds=show.seconds,
        )  # fmt: skip
        plan.save(path)
    began, busy = time.monotonic(), time.process_time()
    rehearsal = sw.rehearse(path, model, example=example, compile={"outputs": "scalars"})
    took, processor = time.monotonic() - began, time.process_time() - busy
    worst = rehearsal.report.worst
    meshes = ", ".join(f"{real} -> {small}" for real, small in rehearsal.meshes)
    kept = "; ".join(f"{len(layers.kept)} of {layers.total}" for layers in rehearsal.layers)
    microbatches = (
        f", {rehearsal.schedule}, {' -> '.join(map(str, rehearsal.microbatches))}" if rehearsal.schedule else ""
    )
    return (
        name, " -> ".join(map(str, rehearsal.devices)), meshes + microbatches, kept,
        "[green]the same" if rehearsal.passed else "[red]differs", f"{worst.deviation:.1e} of {worst.allowed:.1e}",
        f"[{'green' if took <= LIMIT else 'red'}]{took:.0f}", f"{processor:.0f}",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SHOWS, default=list(SHOWS))
    parser.add_argument("--plans", type=Path, help="a folder of plan files")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    table = Table(
        "model", "devices", "mesh", "layers", "result", "largest deviation", "s", "processor s",
        title="Rehearsals of plans for large models",
        caption=f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start, {platform.machine()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.plans or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for name in args.models:
            table.add_row(*row(name, folder))
    Console(width=200).print(table)


if __name__ == "__main__":
    main()

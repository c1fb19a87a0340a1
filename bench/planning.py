"""How long plans for large models take to find, after capture: `python -m bench.planning` prints one table.

python -m bench.planning                    all
python -m bench.planning --models gpt3      some of them

Models are on the meta device, so nothing is allocated. Seconds are those of the search alone, without pipelines (flat)
and with them, as users get it; capture is beside them, and so is the time of the processor: on a machine that does
other things it says how long a quiet one would take.
"""

import argparse
import os
import platform
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from shardwright.cluster import find
from shardwright.cost import TrainingSetup, flops
from shardwright.errors import PlanError
from shardwright.ir import Graph
from shardwright.parallelize import captured_graph
from shardwright.plan import Plan
from shardwright.plan.auto import SearchOptions
from shardwright.plan.request import PlanRequest
from shardwright.planning import make_plan, only_scalars
from shardwright.probe import probing
from shardwright.rules import Analysis, analyse


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, where it is planned for, and how long that may take."""

    make: Callable[[], tuple[nn.Module, Any]]
    cluster: str
    limit: float  # seconds
    precision: str | None = "bfloat16"
    options: SearchOptions = field(default_factory=SearchOptions)


class Bottleneck(nn.Module):
    """Three convolutions beside a short way."""

    def __init__(self, inputs: int, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)
        short = nn.Sequential(nn.Conv2d(inputs, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        self.short = short if stride != 1 or inputs != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn1(self.conv1(x)).relu()
        y = self.bn2(self.conv2(y)).relu()
        return (self.bn3(self.conv3(y)) + self.short(x)).relu()


class ResNet(nn.Module):
    """A residual net of bottlenecks, with all channels but those of pictures `wide` times as many."""

    def __init__(self, layers: tuple[int, ...] = (3, 8, 36, 3), wide: int = 8, classes: int = 1000) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 64 * wide, 7, 2, 3, bias=False), nn.BatchNorm2d(64 * wide)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.stages = nn.ModuleList()
        inputs = 64 * wide
        for number, count in enumerate(layers):
            width = 64 * wide * 2**number
            blocks = []
            for at in range(count):
                blocks.append(Bottleneck(inputs, width, 4 * width, 2 if at == 0 and number else 1))
                inputs = 4 * width
            self.stages.append(nn.Sequential(*blocks))
        self.head = nn.Linear(inputs, classes)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.pool(self.bn(self.conv(x)).relu())
        for stage in self.stages:
            x = stage(x)
        return nn.functional.cross_entropy(self.head(x.mean((2, 3))), y)


def ids(rows: int, length: int) -> Tensor:
    return torch.zeros(rows, length, dtype=torch.int64, device="meta")


def bert() -> tuple[nn.Module, Any]:
    """Hidden 2048, 96 layers: 4.9 billion parameters."""
    config = transformers.BertConfig(
        hidden_size=2048, num_hidden_layers=96, num_attention_heads=32, intermediate_size=8192, vocab_size=30528,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.BertForMaskedLM(config)
    return model, ((ids(256, 512),), {"labels": ids(256, 512)})


def resnet(rows: int = 512) -> tuple[nn.Module, Any]:
    """152 layers, 8 times as wide: 3.7 billion parameters."""
    with torch.device("meta"):
        model = ResNet()
    return model, (torch.zeros(rows, 3, 224, 224, device="meta"), torch.zeros(rows, dtype=torch.int64, device="meta"))


def gpt3() -> tuple[nn.Module, Any]:
    """175 billion parameters, a batch of 1536 sequences of 2048."""
    config = transformers.GPT2Config(
        vocab_size=51200, n_positions=2048, n_embd=12288, n_layer=96, n_head=96, attn_pdrop=0.0, resid_pdrop=0.0,
        embd_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
    return model, ((ids(1536, 2048),), {"labels": ids(1536, 2048), "use_cache": False})


def llama(hidden: int, inner: int, layers: int, heads: int, rows: int) -> tuple[nn.Module, Any]:
    """A Llama 3, and a batch of sequences of 8192."""
    config = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=8, max_position_embeddings=8192, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    # with a mask for padding; without one transformers looks for packed sequences, and makes a mask of the whole batch
    inputs = {"attention_mask": ids(rows, 8192), "labels": ids(rows, 8192), "use_cache": False}
    return model, ((ids(rows, 8192),), inputs)


class Deep(nn.Module):
    """Many layers, each a norm, two products and a sum."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.ups = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.downs = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = x + down(nn.functional.gelu(up(norm(x))))
        return x.square().mean()


def deep() -> tuple[nn.Module, Any]:
    """1,000 layers."""
    with torch.device("meta"):
        model = Deep(1000, 1024)
    return model, (torch.zeros(512, 1024, device="meta"),)


CASES = {
    "llama-8b": Case(make=lambda: llama(4096, 14336, 32, 32, 16), cluster="8xH100", limit=2.0),
    "llama-8b-short": Case(
        make=lambda: llama(4096, 14336, 32, 32, 16),
        cluster="8xH100",
        limit=2.0,
        options=SearchOptions(memory=24 * 2**30),
    ),
    "llama-70b": Case(make=lambda: llama(8192, 28672, 80, 64, 512), cluster="64x8xH100", limit=10.0),
    "deep": Case(make=deep, cluster="8xA100-80GB", limit=10.0),
    "bert": Case(make=bert, cluster="4x8xA100-80GB", limit=20.0),
    "resnet": Case(make=resnet, cluster="4x8xA100-80GB", limit=20.0),
    "resnet-local": Case(
        make=lambda: resnet(64),
        cluster="4x8xA100-80GB",
        limit=20.0,
        options=SearchOptions(microbatches=8, local=True),
    ),
    "gpt3": Case(make=gpt3, cluster="128x8xA100-80GB", limit=60.0),
    "llama-405b": Case(make=lambda: llama(16384, 53248, 126, 128, 2048), cluster="512x8xH100", limit=60.0),
}


def row(name: str, show: Callable[[str], None]) -> tuple[str, ...]:
    case = CASES[name]
    module, example = case.make()
    cluster = find(case.cluster)
    began = time.monotonic()
    captured = captured_graph(module, example)
    graph = only_scalars(captured.graph)
    analysis = analyse(graph, probing(captured.functions))
    middle, processor = time.monotonic(), time.process_time()
    show(f"{name} was captured in {middle - began:.1f} s")

    def progress(what: str, best: float) -> None:
        show(f"{time.monotonic() - middle:6.1f} s  {what}, best {best:.4g} s")

    request = PlanRequest(
        cluster=cluster,
        training=TrainingSetup(compute=case.precision),
        options=replace(case.options, progress=progress),
    )
    plan = make_plan(graph, analysis, request, cluster.size)
    took, busy = time.monotonic() - middle, time.process_time() - processor
    flat = seconds_flat(graph, analyse(graph, probing(captured.functions)), request, cluster.size)
    message = plan.predicted["train"]
    count = sum(parameter.numel() for parameter in module.parameters())
    work = 3 * sum(flops(analysis.signatures[op.name]) for op in graph.ops) * (plan.microbatches if plan.local else 1)
    rate = work / message["seconds"] / cluster.size / 1e12
    coloured = [f"[{'green' if seconds <= case.limit else 'red'}]{seconds:.1f}" for seconds in (flat, took)]
    return (
        name, f"{count / 1e9:.1f} B", case.cluster, f"{middle - began:.1f}", *coloured, f"{busy:.1f}",
        f"{case.limit:.0f}", in_words(plan), f"{message['seconds']:.3g}", f"{rate:.0f}",
    )  # fmt: skip


def seconds_flat(graph: Graph, analysis: Analysis, request: PlanRequest, size: int) -> float:
    """How long it takes without pipelines, to find a plan or that there is none."""
    request = replace(request, options=replace(request.options, pipelines=False))
    began = time.monotonic()
    with suppress(PlanError):
        make_plan(graph, analysis, request, size)
    return time.monotonic() - began


def in_words(plan: Plan) -> str:
    if not plan.is_pipeline:
        return str(plan.mesh)
    pp_ranks = len({stage.mesh.devices for stage in plan.stages})
    meshes = " | ".join(dict.fromkeys(str(stage.mesh) for stage in plan.stages))
    return f"pp={pp_ranks} x {meshes}, {plan.microbatches} microbatches, {plan.schedule}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--verbose", action="store_true", help="say what is being looked at")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    console = Console(width=200)
    table = Table(
        "model", "parameters", "cluster", "capture s", "flat s", "search s", "processor s", "at most", "plan",
        "a step, s", "TFLOP/s a device",
        title="Plans for large models",
        caption=f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start, {platform.machine()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}",
    )  # fmt: skip
    for name in args.models:
        table.add_row(*row(name, console.print if args.verbose else (lambda text: None)))
    console.print(table)


if __name__ == "__main__":
    main()

"""The memory of a rank, predicted and measured: `python -m bench.memory` prints one table.

python -m bench.memory                              all models under all plans
python -m bench.memory --models gpt --plans tp=2    some of them

Measured is what torch has allocated on rank 0 at the worst moment of the second training step,
with AdamW, one gloo process a rank: what lives before the first step is counted once by its
storages, and from there on the profiler lists every allocation and every release. What gloo
allocates for itself is not torch's, and is not counted.
"""

import argparse
import gc
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from tests.models import nets
from tests.models.transformer import Transformer, TransformerConfig
from tests.models.zoo import loss_of
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity

import shardwright as sw
from shardwright.capture import capture
from shardwright.compile import copy_to_meta
from shardwright.cost import TrainingSetup
from shardwright.memory import MemoryPeak, simulate_memory
from shardwright.options import Outputs
from shardwright.plan import parse_plan_string
from shardwright.plan.lowering import lower
from shardwright.plan.request import PlanRequest
from shardwright.planning import make_plan
from shardwright.probe import probing
from shardwright.rules import Analysis, analyse
from shardwright.runtime.launch import run_processes

Case = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
MODELS: dict[str, Callable[[], Case]] = {}
WITHOUT_STORAGE = (FakeTensor, DTensor)  # of their own
Result = TypeVar("Result")
PATIENCE = 0.02
GOAL = 0.10
PLANS = ("single", "dp=2", "tp=2", "sp=2", "zero1=2", "zero2=2", "zero3=2", "dp=2,tp=2", "zero3=2,tp=2")


def model(make: Callable[[], Case]) -> Callable[[], Case]:
    def build() -> Case:
        torch.manual_seed(0)
        module, args, kwargs = make()
        return module.train(), args, kwargs

    MODELS[make.__name__] = build
    return build


class Tower(nn.Module):
    """Residual blocks of two products each."""

    def __init__(self, d: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(d), nn.Linear(d, hidden), nn.GELU(), nn.Linear(hidden, d)) for _ in range(layers)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.mse_loss(x, y)


@model
def mlp() -> Case:
    return Tower(512, 2048, 4), (torch.randn(1024, 512), torch.randn(1024, 512)), {}


@model
def gpt() -> Case:
    config = TransformerConfig(vocab=4096, seq=128, d=256, n_layer=4, n_head=8, dropout=0.1)
    idx = torch.randint(4096, (8, 129))
    return Transformer(config), (idx[:, :-1].contiguous(), idx[:, 1:].contiguous()), {}


@model
def llama() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 128}
    idx = torch.randint(4096, (8, 128))
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads)), (idx,), {"labels": idx.clone(), "use_cache": False}


@model
def bert() -> Case:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"vocab_size": 4096, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8}
    config = BertConfig(**sizes, intermediate_size=1024, max_position_embeddings=128)
    idx = torch.randint(4096, (8, 128))
    return BertForMaskedLM(config), (idx,), {"labels": idx.clone()}


@model
def resnet() -> Case:
    return nets.ResNet(channels=64, classes=10), (torch.randn(16, 3, 32, 32), torch.randint(10, (16,))), {}


@model
def vit() -> Case:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 1024}
    config = ViTConfig(**sizes, image_size=64, patch_size=8, num_labels=10, hidden_dropout_prob=0.1)
    return ViTForImageClassification(config), (torch.randn(16, 3, 64, 64),), {"labels": torch.randint(10, (16,))}


@model
def mixtral() -> Case:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 128}
    config = MixtralConfig(**sizes, **heads, num_local_experts=4, num_experts_per_tok=2)
    idx = torch.randint(4096, (8, 128))
    built = MixtralForCausalLM(config)
    built.set_experts_implementation("eager")
    return built, (idx,), {"labels": idx.clone(), "use_cache": False}


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes that torch holds on a rank: before the measured step, and the most in each part of it."""

    before: int
    forward: int
    backward: int
    update: int
    after: int

    @property
    def complete(self) -> bool:
        """Whether all that the step allocated was seen to be released."""
        return abs(self.after - self.before) < 0.002 * self.before

    @property
    def peak(self) -> int:
        return max(self.forward, self.backward, self.update)


def ranks_of(plan: str) -> int:
    return parse_plan_string(plan).size


def measure(name: str, plan: str, timeout: float = 300.0) -> Measured:
    """What rank 0 of a run of a model under a plan has allocated."""
    for _ in range(3):
        results: list[Measured] = run_processes(ranks_of(plan), measure_here, name, plan, timeout=timeout)
        if results[0].complete:
            return results[0]
    raise RuntimeError(f"{name} under {plan}: the profiler missed releases three times; is the machine busy?")


def predict(name: str, plan: str) -> MemoryPeak:
    """What the model of memory says."""
    analysis = analysed(name)
    planned = make_plan(analysis.graph, analysis, PlanRequest.read(plan), ranks_of(plan))
    return simulate_memory(lower(analysis.graph, planned, analysis), TrainingSetup(optimizer="adamw"))


@cache
def analysed(name: str) -> Analysis:
    module, args, kwargs = MODELS[name]()
    captured = capture(copy_to_meta(module), args, kwargs, entry="train", real=lambda: (module, args, kwargs))
    return analyse(captured.graph, probing(captured.functions))


def measure_here(rank: int, name: str, plan: str) -> Measured:
    """Two steps of a model on this rank, of which the second is measured."""
    return measure_case(MODELS[name], plan)


def measure_case(make: Callable[[], Case], plan: str, outputs: Outputs | None = None, **options: Any) -> Measured:
    """The same for what `make` returns; `options` are those of parallelize, `outputs` that of CompileOptions."""

    def compile() -> tuple[Any, Any, tuple[Any, ...], dict[str, Any]]:
        module, args, kwargs = make()
        optimizer = torch.optim.AdamW(module.parameters())
        with tempfile.TemporaryDirectory() as folder:
            directory = sw.CompileOptions(directory=folder, outputs=outputs)
            compiled_pair = sw.parallelize(
                module, optimizer, example=(args, kwargs), plan=plan, compile=directory, **options
            )  # fmt: skip
        return *compiled_pair, args, kwargs

    (compiled, optimizer, args, kwargs), start = alive_after(compile)

    def step() -> None:
        with torch.profiler.record_function("forward"):
            loss = loss_of(compiled(*args, **kwargs))
        with torch.profiler.record_function("backward"):
            loss.backward()
        del loss
        with torch.profiler.record_function("update"):
            optimizer.step()
            optimizer.zero_grad()

    with patient(), recorded() as profile:
        step()
        step()
    events = profile.profiler.kineto_results.events()
    begins = {name: max(e.start_ns() for e in events if e.name() == name) for name in ("forward", "backward", "update")}
    most = dict.fromkeys(begins, 0)
    stored = before = start
    for when, change in changes(profile):
        stored += change
        now = [name for name, begin in begins.items() if when >= begin]
        if now:
            most[now[-1]] = max(most[now[-1]], stored)
        else:
            before = stored
    return Measured(before, **most, after=stored)


def recorded() -> torch.profiler.profile:
    return torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True)


def changes(profile: torch.profiler.profile) -> list[tuple[int, int]]:
    """When the memory that torch holds has changed, and by how many bytes."""
    events = profile.profiler.kineto_results.events()
    return sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")


def alive_after(make: Callable[[], Result]) -> tuple[Result, int]:
    """What `make` returns, and the bytes of the tensors that are there since then: for what Python holds."""
    others = alive()  # of what this process did before
    result = make()
    gc.collect()
    return result, sum(size for address, size in alive().items() if address not in others)


def allocated_by(make: Callable[[], Result]) -> tuple[Result, int]:
    """What `make` returns, and the bytes it allocated and has not released, which C++ may hold, as DDP's buckets."""
    with recorded() as profile:
        result = make()
        gc.collect()
    return result, sum(change for _, change in changes(profile))


def peak_of_step(start: int, step: Callable[[], object]) -> int:
    """The most that torch holds in the second step of something that holds `start` bytes before the first."""
    with patient(), recorded() as profile:
        step()
        with torch.profiler.record_function("measured"):
            step()
    begin = next(e.start_ns() for e in profile.profiler.kineto_results.events() if e.name() == "measured")
    stored = most = start
    for when, change in changes(profile):
        stored += change
        most = max(most, stored) if when >= begin else stored
    return most


class Patient:
    """A collective that is on its way, awaited a little longer than needed."""

    def __init__(self, work: dist.Work) -> None:
        self.work = work

    def wait(self) -> None:
        self.work.wait()
        time.sleep(PATIENCE)


@contextmanager
def patient() -> Iterator[None]:
    """Within this gloo's threads let go of tensors before ours does: the profiler sees no releases on other threads."""
    names = ("all_reduce", "all_gather_single", "reduce_scatter_single", "all_to_all_single")
    known = {name: getattr(dist, name) for name in names}

    def slowly(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            work = call(*args, **kwargs)
            if work is not None:
                return Patient(work)
            time.sleep(PATIENCE)
            return None

        return run

    for name in names:
        setattr(dist, name, slowly(known[name]))
    try:
        yield
    finally:
        for name in names:
            setattr(dist, name, known[name])


def alive() -> dict[int, int]:
    """The bytes of every storage that some tensor in this process has, but for memory that ranks share."""
    by_address: dict[int, int] = {}
    for value in gc.get_objects():
        if issubclass(type(value), Tensor) and not isinstance(value, WITHOUT_STORAGE) and value.device.type == "cpu":
            storage = Tensor.untyped_storage(value)
            if storage.resizable():  # else torch did not allocate it
                by_address[storage.data_ptr()] = storage.nbytes()
    return by_address


def row(name: str, plan: str) -> tuple[str, ...]:
    actual, truth = predict(name, plan), measure(name, plan)
    off = actual.peak / truth.peak - 1
    parts = (actual.parameters, actual.gradients, actual.optimizer, actual.activations, actual.buffers, actual.inputs)
    colour = "green" if abs(off) <= GOAL else "red"
    where = f"{actual.at[1]}, {actual.at[0]}"
    return name, plan, mib(actual.peak), mib(truth.peak), f"[{colour}]{off:+.1%}", *map(mib, parts), where


def mib(size: float) -> str:
    return f"{size / 2**20:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--plans", nargs="+", default=list(PLANS))
    args = parser.parse_args()
    console = Console(width=200)
    table = Table(
        "model", "plan", "predicted", "measured", "off", "parameters", "gradients", "optimizer", "activations",
        "buffers", "inputs", "predicted peak",
        title="The most memory a rank has in a step, MiB",
        caption=f"AdamW, gloo, {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}",
    )  # fmt: skip
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("measuring", total=len(args.models) * len(args.plans))
        for name in args.models:
            for plan in args.plans:
                bar.update(task, description=f"{name} {plan}")
                table.add_row(*row(name, plan))
                bar.advance(task)
    console.print(table)


if __name__ == "__main__":
    main()

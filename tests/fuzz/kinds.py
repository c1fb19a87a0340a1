"""The kinds of files that are read, each with how it is used after reading."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import yaml
from rich.console import Console
from safetensors.torch import save_file
from torch import nn

from shardwright.checkpoint import CheckpointFolder, load_weights, verify
from shardwright.checkpoint.convert import open_source
from shardwright.checkpoint.disk import digest_of
from shardwright.checkpoint.manifest import Manifest, read_manifest
from shardwright.checkpoint.tensorfile import MappedFiles
from shardwright.cli.models import load_model
from shardwright.cli.train import parse_settings
from shardwright.cluster.file import find, to_data
from shardwright.cluster.file import load as load_cluster
from shardwright.emit import emit
from shardwright.plan import parse_plan_string
from shardwright.plan.constraints import read_constraints
from shardwright.plan.file import load as load_plan
from shardwright.plan.lowering import lower, lower_pipeline
from shardwright.plan.pipeline import build_pipeline
from shardwright.plan.request import PlanRequest
from shardwright.planning import make_plan as searched_plan
from shardwright.report import explain
from shardwright.report.plans import read_plan
from tests.checkpoint.little import little, train
from tests.plan.graphs import analysis_of, graph_of

from .mutations import as_json, mutate, mutate_text


@dataclass(frozen=True, kw_only=True)
class FileKind:
    """A kind of file. `make` writes a good one into a folder, `change` mutates it there, `use` reads it."""

    make: Callable[[Path], None]
    change: Callable[[Path, Random], None]
    use: Callable[[Path], Any]


def change_json(name: str) -> Callable[[Path, Random], None]:
    def change(folder: Path, random: Random) -> None:
        path = folder / name
        if random.random() < 0.25:
            path.write_bytes(mutate_text(path.read_bytes(), random))
        else:
            path.write_bytes(as_json(mutate(json.loads(path.read_bytes()), random)))

    return change


def change_yaml(name: str) -> Callable[[Path, Random], None]:
    def change(folder: Path, random: Random) -> None:
        path = folder / name
        if random.random() < 0.4:
            path.write_bytes(mutate_text(path.read_bytes(), random))
        else:
            changed = mutate(yaml.safe_load(path.read_bytes()), random)
            with contextlib.suppress(RecursionError):  # what YAML can't write nobody can have written so
                path.write_bytes(yaml.safe_dump(changed).encode(errors="surrogatepass"))

    return change


# -- plans -----------------------------------------------------------------------------------------


def make_plan(plan: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        request = PlanRequest.read(plan, cluster=find("4xA100-80GB"))
        searched_plan(graph_of("gpt"), analysis_of("gpt"), request, 4).save(folder / "plan.json")

    return make


def use_plan(folder: Path) -> None:
    graph, analysis = graph_of("gpt"), analysis_of("gpt")
    shown = read_plan(folder / "plan.json")
    Console(file=io.StringIO()).print(explain(shown))
    plan = load_plan(folder / "plan.json", graph)
    if plan.is_pipeline:
        for program in lower_pipeline(graph, plan, analysis).programs:
            emit(program)
    else:
        emit(lower(graph, plan, analysis))


def make_pipeline(folder: Path) -> None:
    graph, analysis = graph_of("gpt"), analysis_of("gpt")
    build_pipeline(graph, parse_plan_string("pp=2"), analysis, "", 2).save(folder / "plan.json")


# -- checkpoints -----------------------------------------------------------------------------------


def make_checkpoint(folder: Path) -> None:
    net, optimizer = little()
    train(net, optimizer, 1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    extra = {"bag": Bag({"n": 1, "t": (1, 2.5, float("nan")), "w": torch.ones(3), 3: b"x"})}
    CheckpointFolder(folder / "run").save(7, net, optimizer, schedulers=schedule, extra=extra, data={"at": [1, 2]},
                                          metrics={"loss": 0.5})  # fmt: skip


class Bag:
    """Something with a state."""

    def __init__(self, state: dict[Any, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[Any, Any]:
        return self.state

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        self.state = {**state}


def seal(step: Path) -> None:
    """Digests as an attacker would write them."""
    with contextlib.suppress(Exception):
        known = read_manifest(step)
        files = {name: digest_of(step / name) for name in known.files if (step / name).is_file()}
        Manifest(files=files, world=known.world, when=known.when, step=known.step, metrics=known.metrics).write(step)


def change_checkpoint(folder: Path, random: Random) -> None:
    step = folder / "run" / "step-000007"
    name = random.choice(("index.json", "index.json", "state.json", "state.json", "manifest.json", "latest", "tensors"))
    if name == "latest":
        named = random.choice(("../..", "..", ".", "", "/", "step-000007\n", "x" * 9000, "a\0"))
        (folder / "run" / "latest").write_text(named)
    elif name == "tensors":
        path = step / "rank-00000.safetensors"
        path.write_bytes(mutate_text(path.read_bytes(), random))
        if random.random() < 0.5:
            seal(step)
    elif name == "manifest.json":
        manifest = mutate(json.loads((step / name).read_bytes()), random)
        if random.random() < 0.7 and isinstance(manifest, dict):
            manifest.pop("digest", None)
            from shardwright.checkpoint.manifest import _digest

            with contextlib.suppress(Exception):
                manifest["digest"] = _digest(manifest)
        (step / name).write_bytes(as_json(manifest))
    else:
        change_json(name)(step, random)
        seal(step)


def use_checkpoint(folder: Path) -> None:
    net, optimizer = little(1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    CheckpointFolder(folder / "run").load(net, optimizer, schedulers=schedule, extra={"bag": Bag({})})
    source = open_source(folder / "run")
    for key in source.keys.values():
        source.index.full_tensor(key, MappedFiles())
    verify(folder / "run" / "step-000007")


def make_weights(folder: Path) -> None:
    net = nn.Linear(4, 4)
    save_file({"weight": net.weight.detach()}, folder / "a.safetensors", {"format": "pt"})
    save_file({"bias": net.bias.detach()}, folder / "b.safetensors")
    index = {"metadata": {"total_size": 80}, "weight_map": {"weight": "a.safetensors", "bias": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def change_weights(folder: Path, random: Random) -> None:
    if random.random() < 0.5:
        return change_json("model.safetensors.index.json")(folder, random)
    path = folder / random.choice(("a.safetensors", "b.safetensors"))
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    if random.random() < 0.3:
        path.write_bytes(mutate_text(content, random))
    else:
        header = as_json(mutate(json.loads(content[8 : 8 + length]), random))
        path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    return None


def use_weights(folder: Path) -> None:
    load_weights(folder, nn.Linear(4, 4), strict=False)


# -- settings --------------------------------------------------------------------------------------

CLUSTER = """
version: 1
name: lab
devices:
  slow:
    like: A100-80GB
    flops: {bfloat16: 250 TFLOPS, float32: 15 TFLOPS}
    memory: 79.1 GiB
    bandwidth: 1.8 TB/s
    efficiency: {matmul: 0.7, copy: {65536: 0.1, 16777216: 0.8}}
links:
  wire: {bandwidth: 20 GB/s, latency: 8 us, efficiency: 0.9, pair: 10 GB/s}
groups:
  - {nodes: 2, devices: 8, device: slow, inside: wire, network: 4xinfiniband-100}
between: ethernet-100
overlap: 0.3
meeting: 2 us
measured:
  - {kind: all_reduce, ranks: [8], seconds: {1024: 20e-6, 1048576: 45e-6}}
"""
CONSTRAINTS = """
- {axis: tp, size: 8, inside: node}
- {axis: dp, splits: batch}
- {module: "model.layers.*.mlp.up", split: n, on: tp}
- {class: LlamaRMSNorm, replicated: true, on: tp}
- {module: "model.layers.*", together: true}
- {memory: 70GiB}
- {module: "model.layers.0", recompute: false}
- {module: lm_head, zero: 1}
- {stages: 4}
- {microbatches: 16}
- {schedule: 1f1b}
- {module: "model.layers.8", cut: before}
"""
TRAINER = """
model:
  class_path: torch.nn.Linear
  init_args: {in_features: 4, out_features: 4}
train_data:
  class_path: torch.utils.data.TensorDataset
batch_size: 4
max_steps: 3
plan: dp=2
pipeline: {microbatches: 2}
optimization: {clip_norm: 1.0}
checkpoints: {every: 5}
seed: 1
"""
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 16,
    "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 32, "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip


def written(name: str, text: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).write_text(text)

    return make


KINDS = {
    "plan": FileKind(make=make_plan("dp=2,tp=2"), change=change_json("plan.json"), use=use_plan),
    "searched plan": FileKind(make=make_plan("auto"), change=change_json("plan.json"), use=use_plan),
    "pipeline": FileKind(make=make_pipeline, change=change_json("plan.json"), use=use_plan),
    "checkpoint": FileKind(make=make_checkpoint, change=change_checkpoint, use=use_checkpoint),
    "weights": FileKind(make=make_weights, change=change_weights, use=use_weights),
    "cluster": FileKind(
        make=written("cluster.yaml", CLUSTER),
        change=change_yaml("cluster.yaml"),
        use=lambda folder: to_data(load_cluster(folder / "cluster.yaml")),
    ),
    "constraints": FileKind(
        make=written("constraints.yaml", CONSTRAINTS),
        change=change_yaml("constraints.yaml"),
        use=lambda folder: read_constraints(folder / "constraints.yaml"),
    ),
    "trainer": FileKind(
        make=written("run.yaml", TRAINER),
        change=change_yaml("run.yaml"),
        use=lambda folder: parse_settings([str(folder / "run.yaml")]),
    ),
    "hf": FileKind(
        make=written("config.json", json.dumps(CONFIG)),
        change=change_json("config.json"),
        use=lambda folder: load_model(f"hf:{folder / 'config.json'}", 2, 8),
    ),
}


def copied(good: Path, to: Path) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(good, to)
    return to

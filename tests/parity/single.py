"""A model of the zoo on one device and under a plan, trained alike, and how far they are apart.

The measure is the design's: |a - b| <= tol * (max |b| + the model's largest gradient). Both
sides run here. What belongs to a model and not to a plan (its capture, the run on one device)
is made once, by the test, and sent to the ranks.

Models that cast to float32 in their own code end float64 parity at 5e-8. For these the graph
is promoted, and the reference is the promoted graph run op by op, which is itself held
against the model at what float32 allows.
"""

from __future__ import annotations

import copy
import copyreg
import pickle
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.capture import CapturedGraph, capture, run
from shardwright.cluster import Cluster
from shardwright.compile import Compiler, CompilerSettings, copy_to_meta
from shardwright.plan.request import PlanRequest
from shardwright.plan.search_options import SearchOptions
from shardwright.runtime.model.access import state_of
from shardwright.runtime.model.parallel_model import ParallelModel
from shardwright.runtime.model.specialization import ModelCall
from shardwright.runtime.parameters.full_tensors import gather_tensor
from shardwright.runtime.parameters.sharded import keeps_share, raw_gradient
from shardwright.runtime.parameters.state_dicts import spread_out
from shardwright.runtime.world import start
from shardwright.storage import storage_layout
from tests.models.zoo import CASTS_TO_FLOAT32, ZOO, Case, loss_of

TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
STEPS = 3
RATE = {"sgd": 0.1, "adamw": 1e-2}


@dataclass(kw_only=True)
class Trace:
    """A training run: what was seen at each step, and what it ended with."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


def optimizer_of(kind: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    built = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[kind]
    return built(trained, lr=RATE[kind])


def build(name: str, dtype: str) -> Case:
    """A model of the zoo: "gpt", or "gpt:6" for a batch of six."""
    model, _, batch = name.partition(":")
    return ZOO[model](dtype=getattr(torch, dtype), batch=int(batch or 4))


def promoted(name: str, dtype: str) -> bool:
    return dtype == "float64" and name.partition(":")[0] in CASTS_TO_FLOAT32


@lru_cache(maxsize=2)
def captured(name: str, dtype: str) -> CapturedGraph:
    case = build(name, dtype)
    return capture(copy_to_meta(case.module), case.args, case.kwargs, entry="train", promote=promoted(name, dtype))


@lru_cache(maxsize=2)
def sendable(name: str, dtype: str) -> bytes:
    """A capture for other processes: no plan and no rank changes it, and it takes seconds."""
    return pickle.dumps(replace(captured(name, dtype), variables=()))  # those are of this process


def _mapping(content: dict[Any, Any]) -> MappingProxyType[Any, Any]:
    return MappingProxyType(content)


copyreg.pickle(MappingProxyType, lambda value: (_mapping, (dict(value),)))


@lru_cache(maxsize=4)
def reference(name: str, dtype: str, kind: str) -> Trace:
    """The run on one device."""
    case = build(name, dtype)
    module = case.module
    optimizer = optimizer_of(kind, module.parameters())
    trace = Trace()
    for _ in range(STEPS):
        optimizer.zero_grad()
        by_graph = promoted(name, dtype)
        loss = _by_graph(case, captured(name, dtype)) if by_graph else loss_of(module(*case.args, **case.kwargs))
        loss.backward()
        trace.losses.append(loss.detach())
        trace.gradients.append({key: copy.copy(p.grad) for key, p in module.named_parameters()})
        for parameter in module.parameters():
            parameter.grad = None if parameter.grad is None else parameter.grad.clone()
        optimizer.step()
    trace.parameters = {key: p.detach().clone() for key, p in module.named_parameters()}
    trace.buffers = {key: b.detach().clone() for key, b in module.named_buffers()}
    return trace


def _by_graph(case: Case, graph: CapturedGraph) -> Tensor:
    """The loss of the graph, run op by op on the model's parameters."""
    parameters = dict(case.module.named_parameters(remove_duplicate=False))
    buffers = dict(case.module.named_buffers(remove_duplicate=False))
    outputs, updates, _ = run(graph, graph.flatten(case.args, case.kwargs), parameters, buffers)
    assert not updates, "the models that cast have no buffers that change"
    return loss_of(graph.unflatten(outputs))


def graph_apart(name: str) -> float:
    """How far one step of the promoted graph is from one step of the model, relative to the largest gradient."""
    case, other = build(name, "float64"), build(name, "float64")
    _by_graph(case, captured(name, "float64")).backward()
    loss_of(other.module(*other.args, **other.kwargs)).backward()
    pairs = list(zip(case.module.parameters(), other.module.parameters(), strict=True))
    scale = max(float(b.grad.abs().max()) for _, b in pairs if b.grad is not None)
    return max(float((a.grad - b.grad).abs().max()) / scale for a, b in pairs if b.grad is not None)


class SharingCompiler(Compiler):
    """A compiler that is given the capture of the training entry, since no plan changes it."""

    captured_graph: CapturedGraph

    def _capture(self, call: ModelCall) -> CapturedGraph:
        assert call.training and not self.programs, "this harness trains, at one batch size"
        return self.captured_graph


def compiled(
    name: str, dtype: str, plan: str, kind: str, directory: str, captured_graph: CapturedGraph,
    microbatches: int | None = None,
    cluster: Cluster | None = None,
) -> Trace:  # fmt: skip
    """The run under a plan, with full tensors. On a cluster reshards go by its prices."""
    case = build(name, dtype)
    optimizer = optimizer_of(kind, case.module.parameters())
    keys = [key for key, _ in case.module.named_parameters()]
    request = PlanRequest.read(plan, options=SearchOptions(microbatches=microbatches), cluster=cluster)
    settings = CompilerSettings(request=request, directory=Path(directory), promote=promoted(name, dtype))
    compiler = SharingCompiler(case.module, optimizer, start(), settings)
    compiler.captured_graph = captured_graph
    return trained(ParallelModel(compiler), case, optimizer, keys)


def trained(model: ParallelModel, case: Case, optimizer: torch.optim.Optimizer, keys: list[str]) -> Trace:
    """A compiled model after a few steps, everything brought to whole."""
    trace = Trace()
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model(*case.args, **case.kwargs))
        loss.backward()
        trace.losses.append(loss.detach())
        trace.gradients.append(whole_gradients(model))
        optimizer.step()
    whole = model.full_state_dict()
    trace.parameters = {key: whole[key] for key in keys}
    trace.buffers = {key: buffer.clone() for key, buffer in state_of(model).buffers.items()}
    return trace


def whole_gradients(model: ParallelModel) -> dict[str, Tensor | None]:
    """Every gradient of a compiled model, put together from the shards. All ranks must call it."""
    holding = state_of(model)
    by_name: dict[str, Tensor | None] = {}
    for spec in holding.specs:
        parameter = holding.parameters[spec.name]
        local = raw_gradient(parameter)
        if local is None and keeps_share(parameter):
            local = raw_gradient(parameter.shard)
        layout = storage_layout(spec, holding.groups.mesh.sizes) if spec.storage.shards_gradient else None
        by_name[spec.name] = None if local is None else gather_tensor(local, spec, holding.groups, layout).clone()
    return spread_out(by_name, holding.pp_ranks)


def faults_of(mine: Trace, other: Trace, tolerance: float) -> list[str]:
    """Everything that is further apart than allowed, in words."""
    collected: list[str] = []
    scale = 0.0

    def compare(what: str, a: Tensor | None, b: Tensor | None) -> None:
        if a is None or b is None:
            stored = b if a is None else a
            if stored is not None and bool(stored.any()):
                collected.append(f"{what} is there on one side only")
            return
        allowed = tolerance * (float(b.abs().max()) + scale) if b.numel() else 0.0
        apart = float((a.double() - b.double()).abs().max()) if b.numel() and a.shape == b.shape else 0.0
        if a.shape != b.shape or a.dtype != b.dtype or not apart <= allowed:
            collected.append(f"{what}: {apart:.2e} apart, {allowed:.2e} allowed, {a.dtype} {tuple(a.shape)}")

    for step in range(STEPS):
        scale = max(float(g.abs().max()) for g in other.gradients[step].values() if g is not None)
        compare(f"loss {step}", mine.losses[step], other.losses[step])
        _compare_all(f"gradient {step}", mine.gradients[step], other.gradients[step], compare)
    _compare_all("parameter", mine.parameters, other.parameters, compare)
    _compare_all("buffer", mine.buffers, other.buffers, compare)
    return collected


def _compare_all(what: str, mine: dict[str, Any], other: dict[str, Any], compare: Any) -> None:
    for key in dict.fromkeys((*other, *mine)):
        compare(f"{what} {key}", mine.get(key), other.get(key))


def parity(
    rank: int, name: str, plan: str, dtype: str, wanted: dict[str, Trace], pickled: bytes, directory: str,
    microbatches: int | None = None,
) -> list[str]:  # fmt: skip
    """The faults of a model under a plan, seen by one rank, for each optimizer."""
    collected = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated", FutureWarning)  # torch unpickles its own so
        document = pickle.loads(pickled)
    for kind, trace in wanted.items():
        mine = compiled(name, dtype, plan, kind, directory, document, microbatches)
        collected += [f"{kind}: {fault}" for fault in faults_of(mine, trace, TOLERANCE[dtype])]
    return collected

"""What a predicted step time means: samples and tokens a second, and how much of the devices' peak is used."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ..cluster import Cluster
from ..cost import TrainingSetup, flops, is_matmul, local_call, training_flops
from ..cost.time import multiplied_in, units
from ..layout import Mesh
from ..ops import Kernel, spec_of
from ..rules import Analysis

ONE_DEVICE = Mesh(axes=())


def throughput(
    analysis: Analysis, cluster: Cluster, training: TrainingSetup, seconds: float, *, devices: int, batches: int = 1
) -> dict[str, Any]:
    """For a plan file.

    batches    how often the graph's batch is gone through in a step
    samples, tokens    of all devices in a second; tokens are None where no embedding says what a token is
    flops      floating point operations a second of a device: the model's, without what is recomputed
    mfu        the part of the device's peak that they are, in the dtype that most of them are in
    """
    graph, passes = analysis.graph, batches * training.accumulate
    work = training_flops(analysis) if graph.entry.startswith("train") else _forward_flops(analysis)
    per_device = passes * work / seconds / devices if seconds else 0.0
    peak = min(device.peak(units(device, _dtype(analysis, training))) for device in cluster.devices)
    tokens = tokens_of(analysis)
    return {
        "samples": _rate(graph.batch, passes, seconds),
        "tokens": _rate(tokens, passes, seconds),
        "flops": float(f"{per_device:.4g}"),
        "mfu": float(f"{per_device / peak:.4g}"),
    }


def tokens_of(analysis: Analysis) -> int | None:
    """The tokens of a batch: the ids of samples that an embedding is looked up with; None if there are none."""
    graph, counts = analysis.graph, [0]
    for op in graph.ops:
        if spec_of(op.target).kernel is Kernel.LOOKUP:
            ids = [graph.values[name] for name in op.inputs if not graph.values[name].floating]
            counts += [value.elements for value in ids if len(value.shape) == 2 and value.shape[0] == graph.batch]
    return max(counts) or None


def _rate(count: int | None, passes: int, seconds: float) -> float | None:
    return float(f"{count * passes / seconds:.4g}") if count is not None and seconds else None


def _forward_flops(analysis: Analysis) -> float:
    return sum(flops(signature) for signature in analysis.signatures.values() if is_matmul(signature))


def _dtype(analysis: Analysis, training: TrainingSetup) -> str:
    """The dtype of most of the matmuls' arithmetic."""
    work: Counter[str] = Counter()
    for signature in analysis.signatures.values():
        if is_matmul(signature):
            work[multiplied_in(local_call(signature, {}, ONE_DEVICE, training))] += int(flops(signature))
    return work.most_common(1)[0][0] if work else "float32"

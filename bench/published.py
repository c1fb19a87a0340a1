"""python -m bench.published: tokens a second as predicted, beside those that were published for real clusters.

--rows       every row, not only the summary
--halves N   fit the constants of a device to a random half of its rows, and look at the other half, N times

The tables are not part of the project. They are looked for in ../shared (--tables says another place).
"""

from __future__ import annotations

import argparse
import csv
import math
import random
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from shardwright.capture import capture
from shardwright.cluster import Cluster, Device, NodeGroup, parse
from shardwright.cluster.catalogue import DEVICES, AssumedEfficiency, curves
from shardwright.cost import LocalCall, TrainingSetup, join_time, local_call, op_time, update_time
from shardwright.layout import Axis, Mesh
from shardwright.plan import POLICIES, PlanBuilder
from shardwright.schedule import StageEdge, StageTimes, interleaved, simulate

from .language import Language

FILES = ("published_fsdp.csv", "published_scaling.csv")
OVERLAP_LOSS = 0.7
"""The part of overlapped communication that shows all the same. It takes processors and memory from what is computed
meanwhile, which takes them from it. That it is so much is what the published rows say; it is not a measurement."""

SMALL_BATCH = 4
"""Megatron's microbatch, which was not published."""


@dataclass(frozen=True)
class Row:
    """A run that was published."""

    source: str
    gpu: str  # a device of the catalogue
    model: str
    kind: str
    d: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq: int
    gpus: int
    tp: int
    pp: int
    microbatch: int
    accumulate: int
    recompute: str
    compiled: bool
    tokens: float  # a second and GPU

    @property
    def counted(self) -> bool:
        """Whether it is in the summary: plans and programs that the model of time is about."""
        return not self.compiled


def main() -> None:
    options = _options()
    missing = [name for name in FILES if not (options.tables / name).exists()]
    if missing:
        print(f"{' and '.join(missing)}: not in {options.tables}. They are no part of the project; nothing to compare.")
        sys.exit(0)
    rows = read(options.tables)
    found = [(row, predict(row, cluster_of(row))) for row in rows]
    if options.rows:
        for row, tokens in found:
            print(_line(row, tokens))
    report(found)
    if options.halves:
        halves([row for row in rows if row.counted and row.source == "llm-foundry"], options.halves)


def _options() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, default=Path("../shared"))
    parser.add_argument("--rows", action="store_true")
    parser.add_argument("--halves", type=int, default=0)
    return parser.parse_args()


# -- the tables


def read(tables: Path) -> list[Row]:
    with open(tables / FILES[0], newline="") as first, open(tables / FILES[1], newline="") as second:
        return [*map(_fsdp, csv.DictReader(first)), *map(_scaling, csv.DictReader(second))]


def _sizes(line: dict[str, str]) -> dict[str, Any]:
    names = {"d_model": "d", "layers": "layers", "heads": "heads", "vocab": "vocab", "seq": "seq", "gpus": "gpus"}
    held = {name: int(line[key]) for key, name in names.items()}
    return held | {"model": line["model"], "recompute": line["recompute"]}


def _fsdp(line: dict[str, str]) -> Row:
    held = _sizes(line)
    return Row(
        **held, source=line["source"], gpu="A100-80GB" if line["gpu"].startswith("a100") else "H100", kind="mpt",
        kv_heads=held["heads"], ffn=4 * held["d"], tp=1, pp=1, microbatch=int(line["microbatch"]),
        accumulate=int(line["grad_accum"]), compiled=False, tokens=float(line["tokens_per_s_per_gpu"]),
    )  # fmt: skip


def _scaling(line: dict[str, str]) -> Row:
    held = _sizes(line)
    titan = line["source"].startswith("torchtitan")
    batch, dp = int(line["global_batch"]), int(line["dp"]) * max(1, int(line["zero3"]))
    microbatch = int(line["microbatch"] or min(SMALL_BATCH, batch // dp))
    row = Row(
        **held, source="torchtitan" if titan else "Megatron-LM", gpu="H100" if titan else "A100-80GB",
        kind="llama" if titan else "megatron", kv_heads=int(line["kv_heads"]), ffn=int(line["ffn"]),
        tp=int(line["tp"]), pp=int(line["pp"]), microbatch=microbatch, accumulate=max(1, batch // dp // microbatch),
        compiled=line["compiled"] == "yes", tokens=float(line["tokens_per_s_per_gpu"] or 0),
    )  # fmt: skip
    if row.tokens:
        return row
    # Megatron counts flops as 96 B s l h^2 (1 + s/(6h) + V/(16lh)), with the recomputed forward
    each = 96 * row.layers * row.d**2 * (1 + row.seq / (6 * row.d) + row.vocab / (16 * row.layers * row.d))
    return replace(row, tokens=float(line["tflops_per_gpu"]) * 1e12 / each)


# -- what a model costs: that of a layer is the difference of three layers and two


@dataclass(frozen=True)
class Counted:
    """The calls of a microbatch on one device, the values whose gradients join, and the elements of its parameters."""

    calls: tuple[LocalCall, ...]
    joins: tuple[tuple[float, int], ...]
    parameters: float


@dataclass(frozen=True)
class Part:
    """Seconds of a layer, or of all that is not in layers, and its parameters."""

    forward: float
    backward: float
    parameters: float

    def minus(self, other: Part, times: float = 1.0) -> Part:
        return Part(*(mine - times * its for mine, its in zip(astuple(self), astuple(other), strict=True)))


TRAINING = TrainingSetup(compute="bfloat16")


@cache
def counted(
    kind: str, d: int, layers: int, heads: int, kv_heads: int, ffn: int, vocab: int, seq: int, batch: int, tp: int
) -> Counted:
    with torch.device("meta"):
        model = Language(kind, d, layers, heads, kv_heads, ffn, vocab, seq)
        ids = torch.zeros(batch, seq, dtype=torch.long)
    graph = capture(model, (ids, ids)).graph
    axis = Axis(name="tp", size=tp)
    builder = PlanBuilder(graph, Mesh(axes=(axis,)))
    if tp > 1:
        POLICIES["tp"](builder, axis)
    choices = builder.finish("tp").entries[graph.entry][0].choices
    signatures = builder.analysis.signatures
    calls = {op.name: local_call(signatures[op.name], choices[op.name], builder.mesh, TRAINING) for op in graph.ops}
    held: dict[str, list[float]] = {}
    for op in graph.ops:
        if op.name in calls and calls[op.name].gradient:
            for name, tensor in zip(op.inputs, calls[op.name].inputs, strict=True):
                if tensor.gradient:
                    held.setdefault(name, []).append(tensor.bytes)
    parameters = 0.0
    for parameter in graph.parameters:
        user, index = graph.users[parameter.value][0]
        parameters += calls[user.name].inputs[index].elements
    joins = tuple((max(sizes), len(sizes)) for sizes in held.values() if len(sizes) > 1)
    fixed = builder.analysis.constants
    return Counted(
        calls=tuple(calls[op.name] for op in graph.ops if not all(name in fixed for name in op.outputs)),
        joins=joins,
        parameters=parameters,
    )


def priced(row: Row, layers: int, device: Device) -> Part:
    held = counted(
        row.kind, row.d, layers, row.heads, row.kv_heads, row.ffn, row.vocab, row.seq, row.microbatch, row.tp
    )
    times = [op_time(call, device) for call in held.calls]
    return Part(
        forward=sum(time.forward for time in times),
        backward=sum(time.backward for time in times) + sum(join_time(*join, device) for join in held.joins),
        parameters=held.parameters,
    )


# -- a step


def predict(row: Row, cluster: Cluster, loss: float = OVERLAP_LOSS) -> float:
    """Tokens a second and GPU."""
    device = cluster.device(0)
    two, three = priced(row, 2, device), priced(row, 3, device)
    layer = three.minus(two)
    rest = two.minus(layer, 2.0)
    if row.kind == "megatron":
        seconds = megatron_step(row, layer, rest, cluster)
    else:
        seconds = zero3_step(row, layer, rest, cluster, loss)
    return row.microbatch * row.accumulate * row.seq / seconds / row.tp / row.pp


def again(row: Row, layer: Part) -> float:
    """What backward computes again of a layer."""
    if row.recompute == "selective":  # every second product, and what is cheap; about half, since attention is kept
        return layer.forward * 0.5
    return layer.forward if row.recompute == "full" else 0.0


def zero3_step(row: Row, layer: Part, rest: Part, cluster: Cluster, loss: float) -> float:
    """Every parameter is split over all devices: gathered layer by layer forward and backward, one layer ahead."""
    mesh = Mesh(axes=(Axis(name="dp", size=row.gpus),))
    wide = 4 if row.kind == "llama" else 2  # torchtitan sums gradients in float32, llm-foundry in bfloat16

    def sent(kind: Any, part: Part, item: int) -> float:
        return cluster.collective_time(kind, part.parameters * item, mesh, ["dp"])

    gather, scatter = sent("all_gather", layer, 2), sent("reduce_scatter", layer, wide)
    forward = sent("all_gather", rest, 2) + gather + rest.forward + row.layers * together(layer.forward, gather, loss)
    backward = rest.backward + row.layers * together(layer.backward + again(row, layer), gather + scatter, loss)
    backward += scatter + sent("reduce_scatter", rest, wide)
    own = (row.layers * layer.parameters + rest.parameters) * 4 / row.gpus
    return row.accumulate * (forward + backward) + update_time(own, own, 2 * own, cluster.device(0))


def together(compute: float, sent: float, loss: float) -> float:
    """Of two that overlap the longer one, and some of the shorter."""
    return max(compute, sent) + loss * min(compute, sent)


def megatron_step(row: Row, layer: Part, rest: Part, cluster: Cluster) -> float:
    """Tensor parallel inside, replicas outside, and stages of layers whose schedule is simulated."""
    dp = row.gpus // row.tp // row.pp
    mesh = Mesh(axes=tuple(Axis(name=name, size=size) for name, size in (("pp", row.pp), ("dp", dp), ("tp", row.tp))))
    activations = row.microbatch * row.seq * row.d * 2
    one = cluster.collective_time("all_reduce", activations, mesh, ["tp"])
    forward = layer.forward + 2 * one  # after attention and after the layer
    backward = layer.backward + again(row, layer) + (4 if row.recompute == "full" else 2) * one
    held = row.layers / row.pp * layer.parameters + rest.parameters
    step = staged(row, (forward, backward), (rest.forward + one, rest.backward + one), activations, mesh, cluster)
    gradients = cluster.collective_time("all_reduce", held * 4, mesh, ["dp"])
    own = held * 4
    return step + gradients + update_time(own, own, 2 * own, cluster.device(0), fused=True)


def staged(
    row: Row, layer: tuple[float, float], rest: tuple[float, float], activations: float, mesh: Mesh, cluster: Cluster
) -> float:
    """All microbatches through the stages. What is no layer is half in the first one and half in the last one.

    How many segments a device had was not published: as few as interleaving needs.
    """
    chunks = next((n for n in range(2, row.layers) if row.layers // row.pp % n == 0), 1) if row.pp > 1 else 1
    count = row.pp * chunks
    layers = row.layers / count
    times = [
        StageTimes(layers * layer[0] + share * rest[0], layers * layer[1] + share * rest[1])
        for at in range(count)
        for share in [(at == 0) / 2 + (at == count - 1) / 2]
    ]
    sent = cluster.collective_time("send", activations / row.tp, mesh, ["pp"])
    edges = [StageEdge(at, at + 1, sent, sent) for at in range(count - 1)]
    return simulate(interleaved(row.pp, row.accumulate, chunks), times, edges).total


def cluster_of(row: Row, assumed: AssumedEfficiency | None = None) -> Cluster:
    cluster = parse(f"{row.gpus}x{row.gpu}")
    if assumed is None:
        return cluster
    (group,) = cluster.groups
    known = DEVICES[row.gpu]
    device = replace(known, efficiency=curves(assumed, known.flops, known.bandwidth), edge=assumed.edge)
    node = replace(group.node, device=device)
    return replace(cluster, groups=(NodeGroup(node=node, nodes=group.nodes),))


# -- what comes out


def error(row: Row, tokens: float) -> float:
    return tokens / row.tokens - 1


def _line(row: Row, tokens: float) -> str:
    how = " ".join([row.recompute, *(["compiled"] if row.compiled else []), *([f"tp={row.tp}"] if row.tp > 1 else []),
                    *([f"pp={row.pp}"] if row.pp > 1 else [])])  # fmt: skip
    return (
        f"{row.source:12} {row.gpus:5} x {row.gpu:10} {row.model:14} seq {row.seq:6} x {row.microbatch:3} {how:16} "
        f"{tokens:9.0f} {row.tokens:9.0f} {error(row, tokens):+7.1%}{'' if row.counted else '  not counted'}"
    )


def summary(found: Iterable[tuple[Row, float]]) -> str:
    errors = sorted(abs(error(row, tokens)) for row, tokens in found)
    signed = statistics.median(error(row, tokens) for row, tokens in found)
    return (
        f"{len(errors):3} rows, median error {statistics.median(errors):5.1%} ({signed:+.1%}), "
        f"90th percentile {percentile(errors, 0.9):5.1%}, worst {errors[-1]:5.1%}"
    )


def percentile(ordered: Sequence[float], part: float) -> float:
    return ordered[min(len(ordered) - 1, math.ceil(part * len(ordered)) - 1)]


def report(found: Sequence[tuple[Row, float]]) -> None:
    kept = [(row, tokens) for row, tokens in found if row.counted]
    for gpu in dict.fromkeys(row.gpu for row, _ in kept):
        mine = [(row, tokens) for row, tokens in kept if row.gpu == gpu]
        print(f"{gpu:24} {summary(mine)}")
        for model in dict.fromkeys(row.model for row, _ in mine):
            print(f"    {model:20} {summary([(row, tokens) for row, tokens in mine if row.model == model])}")
    print(f"{'all':24} {summary(kept)}")


# -- do the constants hold for rows that they were not chosen by?


@dataclass(frozen=True)
class Constants:
    """All that was fitted: what a device reaches, and the loss of overlap. Pass counts were not."""

    assumed: AssumedEfficiency
    loss: float = OVERLAP_LOSS

    def predict(self, row: Row) -> float:
        return predict(row, cluster_of(row, self.assumed), self.loss)

    def misses(self, rows: Sequence[Row]) -> float:
        return sum(abs(math.log1p(error(row, self.predict(row)))) for row in rows)


TRIED: dict[str, tuple[float, ...]] = {
    "matmul": tuple(held / 100 for held in range(52, 96, 3)),
    "attention": tuple(held / 100 for held in range(12, 60, 2)),
    "edge": (0, 64, 128, 192, 256, 320),
    "memory": (0.65, 0.75, 0.85),
    "loss": (0.1, 0.4, 0.7, 1.0),
}
"""The order is that in which they are fitted, one after the other, twice."""


def fitted(rows: Sequence[Row]) -> Constants:
    """The constants that fit these rows best, begun at ones that were there before anything was fitted."""
    best = Constants(AssumedEfficiency(0.75, 0.45, 0.85, 5e-6, 128), 0.1)
    for _ in range(2):
        for name, values in TRIED.items():
            tried = [
                replace(best, loss=value)
                if name == "loss"
                else replace(best, assumed=replace(best.assumed, **{name: value}))
                for value in values
            ]
            best = min(tried, key=lambda held: held.misses(rows))
    return best


def halves(rows: Sequence[Row], times: int) -> None:
    """Fit everything to a random half, and print what comes out for the other."""
    generator = random.Random(0)
    for gpu in dict.fromkeys(row.gpu for row in rows):
        mine = [row for row in rows if row.gpu == gpu]
        seen: list[tuple[Row, float]] = []
        for _ in range(times):
            generator.shuffle(mine)
            half = len(mine) // 2
            best = fitted(mine[:half])
            found = [(row, best.predict(row)) for row in mine[half:]]
            seen += found
            held = best.assumed
            print(
                f"{gpu}: from {half} rows matmul {held.matmul:.2f}, attention {held.attention:.2f}, "
                f"edge {held.edge:.0f}, memory {held.memory:.2f}, loss {best.loss:.1f}; unseen {summary(found)}",
                flush=True,
            )
        print(f"{gpu}: all unseen {summary(seen)}")


if __name__ == "__main__":
    main()

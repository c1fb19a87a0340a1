"""A little model in four parts, written by hand as the compiler would write it, and its single-device twin.

    h, mask, side = first(x)       mask is an integer that crosses, side has nothing to do with the loss
    y       = second(h)
    z       = third(y, h, mask)    h skips a part, and goes to two receivers
    loss .. = last(z, h, side, target)   the mean over the labels that count

Any neighbouring parts make a stage. Samples are split into microbatches, and those over dp.
Tied, the last part has the weight of the first. One parameter is never used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from shardwright.layout import REPLICATE, Axis, Layout, Mesh, contiguous_shard, make_layout
from shardwright.runtime.algorithms.random import Randomness
from shardwright.runtime.collectives import comm
from shardwright.runtime.model.program import Program, PrologueCount, recompute
from shardwright.runtime.parameters.full_tensors import coordinates, shard_tensor
from shardwright.runtime.parameters.gradient_sync import GradientSync
from shardwright.runtime.parameters.pipeline_norms import PipelineNorms
from shardwright.runtime.parameters.sharded import join_pipeline, make_parameter
from shardwright.runtime.pipeline import (
    PipelineLoop,
    PipelineOutput,
    PipelineSpec,
    PlacedStage,
    RunningPipeline,
    StageCrossing,
    TiedGradients,
)
from shardwright.runtime.world import Groups, Moment
from shardwright.storage import ParameterSpec

ROWS, WIDTH = 24, 6
SHAPES = {"w0": (WIDTH, WIDTH), "b0": (WIDTH,), "ws": (WIDTH,), "w1": (WIDTH, WIDTH), "w2": (WIDTH, WIDTH),
          "w3": (WIDTH, WIDTH), "idle": (3,)}  # fmt: skip


def values(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return {
        key: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for key, shape in SHAPES.items()
    }


def batch(step=0, rows=ROWS, dtype=torch.float64):
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    target = torch.randint(WIDTH, (rows,), generator=generator)
    target[: rows // 3] = -100  # microbatches have different numbers of labels that count
    return x, target


# -- the parts: functions of a thing that has parameters and values ------------------------


def first(p, x):
    return F.gelu(p.linear(x, p.w0, p.b0)), (x.sum(1) > 0).long(), x * p.ws


def second(p, h):
    return (torch.tanh(p.linear(h, p.w1)),)


def third(p, y, h, mask):
    return (p.again(lambda y, h: (y + h) * mask[:, None] + p.linear(y, p.w2), y, h),)


def last(p, z, h, side, target):
    logits = p.linear(z, p.w3) + h
    loss = p.share(F.cross_entropy(logits, target, reduction="sum", ignore_index=-100), target)
    hits = (logits.argmax(1) == target).sum()
    decay = p.once(p.w1_or(p.w3).square().sum())
    return p.whole(logits), p.added(loss), p.added(hits), decay, p.whole(torch.sin(side))


OUT = ("logits", "loss", "hits", "decay", "aside")
PARTS = (
    (first, ("x",), ("h", "mask", "side"), ("w0", "b0", "ws")),
    (second, ("h",), ("y",), ("w1",)),
    (third, ("y", "h", "mask"), ("z",), ("w2",)),
    (last, ("z", "h", "side", "target"), OUT, ("w3", "idle")),
)
INPUTS = ("x", "target")


class Single(torch.nn.Module):
    """The original."""

    def __init__(self, dtype=torch.float64, tied=False):
        super().__init__()
        for key, value in values(dtype).items():
            setattr(self, key, torch.nn.Parameter(value))
        if tied:
            self.w3 = self.w0
        self.linear, self.again = F.linear, lambda f, *args: f(*args)
        self.added = self.whole = self.once = self.w1_or = lambda x: x

    def share(self, total, target):
        return total / (target != -100).sum()

    def forward(self, x, target):
        known = {"x": x, "target": target}
        for function, takes, gives, _ in PARTS:
            known.update(zip(gives, function(self, *(known[name] for name in takes)), strict=True))
        return known["loss"], known["logits"], known["hits"], known["decay"], known["aside"]


class Stage(Program):
    """Some parts, on the rows of a microbatch and a rank."""

    counts = ()

    def __init__(self, parts, takes, gives, rows, moment, recomputed, *rest):
        super().__init__(*rest, moment)
        self.parts_run, self.takes, self.gives, self.rows = parts, takes, gives, rows
        self.recomputed = recomputed
        self.counts = (PrologueCount(name="count", over="dp"),) if parts[-1][0] is last else ()
        self.mine = rows // self.mb.size
        self.calls = 0

    @property
    def sharding(self):
        return contiguous_shard(Axis(name="dp", size=self.dp.size), self.mine)

    def local(self, x):
        return comm.shard(comm.shard(x, 0, self.mb, src=comm.R), 0, self.dp, self.sharding)

    def prologue(self, target):
        return ((self.local(target) != -100).sum(),)

    def forward(self, *args):
        self.calls += 1
        known = dict(zip(self.takes, args, strict=True))
        known.update({name: self.local(known[name]) for name in INPUTS if name in known})
        for function, takes, gives, _ in self.parts_run:
            known.update(zip(gives, function(self, *(known[name] for name in takes)), strict=True))
        return tuple(known[name] for name in self.gives)

    def linear(self, x, w, b=None):
        return self.weights.linear(x, w, b)

    def again(self, function, *args):
        if not self.recomputed:
            return function(*args)
        self.function = function
        return recompute(self.run_function, function, *args)

    def run_function(self, function, *args):
        return function(*args)

    def share(self, total, target):
        return total / self.known.count

    def whole(self, x):
        return comm.all_gather(x, 0, self.dp, self.sharding)

    def added(self, x):
        return comm.all_reduce(x, self.dp)

    def once(self, x):
        return x

    def w1_or(self, w):
        """The parameter's gradient is summed over dp, and this one is whole there."""
        return comm.invariant(w, self.dp)


# -- stages on meshes --------------------------------------------------------------------


@dataclass
class Built:
    """What a rank has."""

    pipeline: PipelineSpec
    running: RunningPipeline | None
    parameters: dict[str, Any]
    sync: GradientSync


def mesh_of(devices):
    return Mesh(axes=(Axis(name="dp", size=len(devices)),), devices=tuple(devices))


def layout_of(mesh, rows):
    return make_layout([[contiguous_shard(mesh.axes[0], rows)] if mesh.size > 1 else [], []])


def parts_of(stages):
    """(parts, takes, gives) for each stage, when stage k has `stages[k]` parts."""
    collected, at = [], 0
    for many in stages:
        parts = PARTS[at : at + many]
        inner = [name for part in parts for name in part[2]]
        takes = dict.fromkeys(name for part in parts for name in part[1] if name not in inner)
        later = {name for part in PARTS[at + many :] for name in part[1]} | set(OUT)
        collected.append((parts, tuple(takes), tuple(name for name in inner if name in later)))
        at += many
    return collected


def crossings_of(sharding, meshes, rows, dtype):
    home = {name: number for number, (_, _, gives) in enumerate(sharding) for name in gives}
    collected = []
    for receiver, (_, takes, _) in enumerate(sharding):
        for name in takes:
            if name not in INPUTS:
                shape = (rows,) if name == "mask" else (rows, WIDTH)
                sides = [meshes[home[name]], meshes[receiver]]
                source_layout, target_layout = (
                    Layout(shards=layout_of(mesh, rows).shards[: len(shape)]) for mesh in sides
                )
                collected.append(
                    StageCrossing(
                        value=name,
                        sender=home[name],
                        receiver=receiver,
                        shape=shape,
                        dtype=torch.int64 if name == "mask" else dtype,
                        gradient=name != "mask",
                        outputs=frozenset([4]) if name == "side" else None,
                        source_layout=source_layout,
                        target_layout=target_layout,
                    )
                )
    return tuple(collected)


def leaving_of(last_stage, rows, dtype):
    def out(value, how, shape, gradient=True, kind=dtype):
        return PipelineOutput(
            value=value, stage=last_stage, how=how, shape=shape, dtype=kind, gradient=gradient, path=value
        )

    return (
        out("loss", "sum", ()),
        out("logits", "cat", (rows, WIDTH)),
        out("hits", "sum", (), False, torch.int64),
        out("decay", "same", ()),
        out("aside", "cat", (rows, WIDTH)),
    )


def held_of(key, mesh, dtype, tied):
    sums = {"dp": REPLICATE} if mesh.size > 1 else {}
    keys = ("w0", "w3") if tied and key in ("w0", "w3") else (key,)
    layout = make_layout([[]] * len(SHAPES[key]), sums)
    return ParameterSpec(keys=keys, shape=SHAPES[key], dtype=str(dtype)[6:], layout=layout)


def build(
    rank,
    schedule,
    forward,
    stages,
    *,
    rows=ROWS,
    backward="inside",
    dtype=torch.float64,
    recomputed=False,
    tied=False,
):
    """The pipeline on one rank. All ranks must call it."""
    meshes = [mesh_of(devices) for devices in schedule.holders]
    sharding = parts_of(stages)
    moment, random, full = Moment(schedule.microbatches), Randomness(), values(dtype)
    pp_ranks = {mesh: {} for mesh in meshes}  # what the ranks of each mesh hold, by name
    placed, parameters = [], {}
    for number, (mesh, (parts, takes, gives)) in enumerate(zip(meshes, sharding, strict=True)):
        groups = Groups(mesh)
        keys = {key: held_of(key, mesh, dtype, tied) for part in parts for key in part[3]}
        pp_ranks[mesh].update({key.name: key for key in keys.values()})
        stage, own = None, {}
        if rank in mesh.devices:
            rest = (groups, ("dp",), torch.device("cpu"), random)
            stage = Stage(parts, takes, gives, rows, moment, recomputed, *rest)
            for key, value in keys.items():
                if value.name not in parameters:
                    local = shard_tensor(full[value.name], value, mesh.sizes, coordinates(groups))
                    parameters[value.name] = make_parameter(local, value, groups)
                own[key] = parameters[value.name]
        placed.append(
            PlacedStage(
                number=number,
                mesh=mesh,
                takes=tuple(INPUTS.index(name) if name in INPUTS else name for name in takes),
                gives=gives,
                asks=(1,) if parts[-1][0] is last else (),
                stage=stage,
                parameters=own,
            )
        )
    pipeline = PipelineSpec(
        placed=tuple(placed),
        crossings=crossings_of(sharding, meshes, rows // schedule.microbatches, dtype),
        leaving=leaving_of(len(stages) - 1, rows, dtype),
        schedule=schedule,
        forward=forward,
        moment=moment,
    )
    value = [(mesh, tuple(rank.values())) for mesh, rank in pp_ranks.items()]
    join_pipeline(PipelineNorms(value), parameters.values())
    sync = GradientSync([(p.spec, p) for p in parameters.values()], ties=TiedGradients(value))
    running = RunningPipeline(pipeline, PipelineLoop(sync, backward))
    return Built(pipeline, running, parameters, sync)

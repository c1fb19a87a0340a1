"""A plan explained: its predicted cost on one screen (`screen`), its decisions in long tables.

From the plan alone the tables show the decisions; with the model's graph also what follows: shapes of shards, memory,
collectives.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, overload

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..cluster import Cluster
from ..cost import TrainingSetup
from ..errors import InputError
from ..ir import Graph
from ..layout import MB, Layout, make_layout
from ..lower import LoweredProgram
from ..plan import Plan
from ..plan.folding import fold, star
from ..plan.joint import price_plan
from ..plan.lowering import lower, lower_pipeline
from ..probe import probing
from ..rules import analyse
from ..storage import Storage
from ..verify.measure import render
from .communication import format_bytes, stored_bytes, totals
from .conditions import made_for, spelled_out
from .screen import MOST_NOTES, in_ranges, notes_of, priced_for, screen
from .text import format_time, percent
from .why import Why, why

ROLES = {"fan": "replicated, gradient a pending sum", "whole": "replicated"}


class MeasuredSteps(Protocol):
    """The steps of a model that trains: their median, if there were any, and how many it is of."""

    @property
    def seconds(self) -> float | None: ...

    @property
    def count(self) -> int: ...


class TrainedModel(Protocol):
    """What `sw.parallelize` returns."""

    plan: Any

    @property
    def step_times(self) -> MeasuredSteps: ...


@dataclass(frozen=True, kw_only=True, repr=False)
class Explanation:
    """A plan, and its programs, one for each stage, if a graph was passed. Prints as one screen, or with all tables."""

    plan: Plan
    programs: tuple[LoweredProgram, ...] = ()
    entry: str = "train"
    full: bool = False
    measured: MeasuredSteps | None = None

    def __rich__(self) -> Group:
        parts: list[Any] = [*self._head()]
        priced = self.entry in self.plan.predicted
        if priced:
            parts += screen(self.plan, self.entry)
        if self.measured is not None:
            parts.append(Text(measured_line(self.plan, self.measured), style="bold"))
        if self.full or not priced:
            parts += self._tables()
        return Group(*parts, *notes_of(self.plan, None if self.full else MOST_NOTES))

    def _tables(self) -> Iterator[Any]:
        if not self.programs:
            yield self._splits(None)
            yield from (self._storage(),) if self.plan.storage else ()
        for number, program in enumerate(self.programs):
            if len(self.programs) > 1:
                stage = self.plan.entries[self.entry][number]
                numbers = "; numbers of a microbatch" if self.plan.microbatches > 1 else ""
                yield Text(f"stage {number} of {len(self.programs)}, mesh {stage.mesh}{numbers}", style="bold")
            yield from (self._splits(program), _parameter_table(program), *_memory(program), _sent(program))

    def __str__(self) -> str:
        return render(self)

    __repr__ = __str__  # what a prompt shows

    def _head(self) -> Iterator[Text]:
        plan = self.plan
        yield Text(f"{plan.model} under {plan.policy or 'a custom plan'}, plan {plan.name}", style="bold")
        predicted = plan.predicted.get(self.entry)
        devices = f"{plan.size} devices" + (f" of {plan.cluster}" if plan.cluster else "")
        yield Text(f"{_laid_out(plan)}: {devices}" + (f"; {priced_for(predicted)}" if predicted else ""))
        shown = ", ".join(f"{entry} {digits}" for entry, digits in plan.fingerprints.items())
        kind = "microbatches" if len(plan.stages) > 1 else "microbatches (gradient accumulation)"
        parts = f"; {plan.microbatches} {kind}" if plan.microbatches > 1 else ""
        yield Text(f"made for the graphs: {shown}{parts}")
        for entry, stages in plan.entries.items():
            paths = ", ".join(path for stage in stages for path in in_ranges(stage.folded_recompute()))
            if paths:
                yield Text(f"recomputed in backward ({entry}): {paths}")
            losses = [f"{name} {count}" for stage in stages for name, count in stage.chunked_loss.items()]
            if losses:
                yield Text(f"chunks of logits ({entry}): {', '.join(losses)}")

    def _splits(self, program: LoweredProgram | None) -> Table:
        """Without a program the labels of the ops' rules; with one, the layouts of their outputs."""
        axes = tuple(dict.fromkeys(name for stage in self.plan.entries[self.entry] for name in stage.mesh.names))
        heads = axes if program is None else ("output layout",)
        table = Table("op", "in", "count", *heads, title=f"how ops are split ({self.entry})", title_justify="left")
        rows: dict[tuple[str, ...], list[str]] = {}
        for name, cells in self._roles(axes) if program is None else _layouts(program):
            kind = name.rsplit("/ ", 1)[-1].split(".")[0]
            rows.setdefault((kind, *cells), []).append(name)
        for (kind, *shown), names in rows.items():
            count = f"{len(names)} *" if any("*" in name for name in names) else str(len(names))
            table.add_row(*(Text(cell) for cell in (kind, _modules(names), count, *shown)))
        return table

    def _roles(self, axes: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
        for name, choice in self.plan.choices(self.entry).items():
            yield name, tuple(_role(choice.get(axis)) for axis in axes)

    def _storage(self) -> Table:
        table = Table("parameter", "sharded by ZeRO", title="how parameters are stored", title_justify="left")
        for key, storage in fold(self.plan.storage).items():
            table.add_row(Text(key), _sharded(storage))
        return table


def measured_line(plan: Plan, measured: MeasuredSteps) -> str:
    """The steps that a model has made, beside what was predicted of its first training call."""
    seconds = measured.seconds
    if seconds is None:
        return "measured step time: none yet, the first steps do not count"
    line = f"measured step time {format_time(seconds)} (median of {measured.count} steps on this rank)"
    predicted = next((plan.predicted[entry] for entry in plan.entries if entry in plan.predicted), None)
    if predicted is None:
        return f"{line}; nothing was predicted"
    error = predicted["seconds"] / seconds - 1
    speed = "too slow" if error > 0 else "too fast"
    return f"{line}; predicted {format_time(predicted['seconds'])}, {percent(abs(error))} {speed}"


@overload
def explain(
    plan: Plan | TrainedModel, graph: Graph | None = None, *, op: None = None,
    cluster: Cluster | str | Path | None = None, training: TrainingSetup | None = None, full: bool = False,
) -> Explanation: ...  # fmt: skip


@overload
def explain(
    plan: Plan | TrainedModel, graph: Graph, *, op: str, cluster: Cluster | str | Path | None = None,
    training: TrainingSetup | None = None, full: bool = False,
) -> Why: ...  # fmt: skip


def explain(
    plan: Plan | TrainedModel,
    graph: Graph | None = None,
    *,
    op: str | None = None,
    cluster: Cluster | str | Path | None = None,
    training: TrainingSetup | None = None,
    full: bool = False,
) -> Explanation | Why:
    """The decisions and the predicted cost of a plan. Print it.

    A compiled model is its plan, with the step time that was measured beside the predicted one.
    The plan alone is one screen. `full` adds tables of every op and parameter, and with the graph of the
    model what a rank holds and communicates.

    op          with the graph: why this op ("model.layers.0.mlp.up_proj / linear", or with a star for all layers) is
                split as it is, and what each alternative would cost
    cluster     with the graph: what to price on; default: the cluster of the plan, with the prices of its file
    training    with the graph: optimizer and precision; default: those of the plan
    """
    if not isinstance(plan, Plan):
        measured: MeasuredSteps | None = plan.step_times
        plan = compiled_plan(plan)
    else:
        measured = None
    entry = graph.entry if graph is not None else next(iter(plan.entries))
    if graph is None:
        if op is not None:
            raise InputError("explaining an op needs the graph of the model: explain(plan, graph, op=...)")
        if cluster is not None or training is not None:
            raise InputError("pricing a plan anew needs the graph of the model: explain(plan, graph, cluster=...)")
        return Explanation(plan=plan, entry=entry, full=full, measured=measured)
    plan, graph = spelled_out(plan, graph)
    analysis = analyse(graph, probing())
    if op is not None:
        return why(plan, analysis, op, made_for(plan, entry, cluster, training))
    if cluster is not None or training is not None:
        conditions = made_for(plan, entry, cluster, training)
        priced = price_plan(
            analysis, conditions.cluster, conditions.training, plan, replica_axes=conditions.replica_axes,
            limit=conditions.limit,
        )  # fmt: skip
        plan = replace(plan, cluster=str(conditions.cluster), predicted={**plan.predicted, entry: priced.as_json()})
    staged = plan.is_pipeline
    programs = lower_pipeline(graph, plan, analysis).programs if staged else (lower(graph, plan, analysis),)
    return Explanation(plan=plan, programs=programs, entry=entry, full=True, measured=measured)


def compiled_plan(model: TrainedModel) -> Plan:
    if not isinstance(model.plan, Plan):
        raise InputError("the model is not compiled yet; call it once, or pass example=(...) to parallelize")
    return model.plan


def _laid_out(plan: Plan) -> str:
    """The mesh, or the stages of a pipeline and their meshes."""
    if len(plan.stages) == 1:
        return f"mesh {plan.mesh}"
    pp_ranks = len({stage.mesh.devices for stage in plan.stages})
    meshes = ", ".join(dict.fromkeys(str(stage.mesh) for stage in plan.stages))
    return f"{pp_ranks} pipeline rank{'s' if pp_ranks > 1 else ''}, schedule {plan.schedule}, mesh {meshes}"


def _layouts(program: LoweredProgram) -> Iterator[tuple[str, tuple[str, ...]]]:
    for op in program.graph.ops:
        if not program.analysis.is_constant(op):
            layout = program.layouts.get(op.outputs[0])
            yield op.name, ("-" if layout is None else str(_on_devices(layout)),)


def _on_devices(layout: Layout) -> Layout:
    """A layout without what it says of microbatches."""
    shards = [tuple(shard for shard in shards if shard.axis != MB) for shards in layout.shards]
    return make_layout(shards, {axis: placement for axis, placement in layout.rest if axis != MB})


def _role(choice: str | None) -> str:
    if choice is None:
        return "replicated"
    return "pending sum passes through" if choice.startswith("partial:") else ROLES.get(choice, choice)


def _sharded(storage: Storage) -> str:
    return ", ".join(f"{storage.describe()} over {axis}" for axis in storage.axes)


def _modules(names: Sequence[str], most: int = 3) -> str:
    modules = list(dict.fromkeys(star(name.rsplit("/ ", 1)[0].rstrip()) or "the model itself" for name in names))
    more = f", {len(modules) - most} more" if len(modules) > most else ""
    return ", ".join(modules[:most]) + more


def _parameter_table(program: LoweredProgram) -> Table:
    table = Table("parameter", "count", "shape", "local shape", "layout", "gradient summed over", "sharded by ZeRO",
                  title="how parameters are stored", title_justify="left")  # fmt: skip
    rows: dict[tuple[str, ...], list[str]] = {}
    first = dict.fromkeys(program.mesh.names, 0)
    for spec in program.parameters:
        local = spec.layout.local_shape(spec.shape, program.mesh.sizes, first)
        sums = ", ".join(axis for axis in spec.sums if axis != MB) if spec.trainable else "frozen"
        cuts = str(spec.layout).split(" (")[0]
        key = (_shape(spec.shape), _shape(local), cuts, sums or "-", _sharded(spec.storage) or "-")
        rows.setdefault((star(spec.name), *key), []).append(spec.name)
    for (name, *cells), keys in rows.items():
        table.add_row(*(Text(cell) for cell in (name, str(len(keys)), *cells)))
    return table


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _memory(program: LoweredProgram) -> Iterator[Text]:
    every = [stored_bytes(program, spec) for spec in program.parameters]
    trained = [stored_bytes(program, spec) for spec in program.parameters if spec.trainable]
    parameters = format_bytes(sum(math.ceil(stored.parameter) for stored in every))
    gradients = format_bytes(sum(math.ceil(stored.gradient) for stored in trained))
    states = format_bytes(2 * sum(math.ceil(stored.state) for stored in trained))
    yield Text(f"a rank stores {parameters} of parameters, {gradients} of gradients, {states} for Adam's two moments")


def _sent(program: LoweredProgram) -> Table:
    heads = ("when", "collective", "over", "count", "bytes per rank")
    table = Table(*heads, title="collectives of a training step", title_justify="left")
    sums = totals(program)
    for total in sums:
        over = ", ".join(total.axes)
        table.add_row(total.when, total.collective, over, str(total.count), format_bytes(total.bytes))
    if not sums:
        table.add_row("-", "none", "-", "0", "0 B")
    return table

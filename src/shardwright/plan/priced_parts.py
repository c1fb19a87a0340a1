"""The parts of a step that was priced: each op, reshard and collective with its seconds, and what a device sends.

They are read off the tables that priced the step, so that they add up to its totals. A step of one stage counts the
entries of that stage only (`PricedTables.counts`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from ..cluster import Collective
from ..cluster.collective import wire_bytes
from ..cost.algorithm_collectives import algorithm_collectives
from ..cost.reshard_search import find_reshards, step_bytes
from ..cost.resources import COUNT, Resource
from ..ir import Parameter
from ..layout import MB, Layout
from ..reshard import COLLECTIVES, Reshard
from .problem_structure import EdgeEnd, EdgeTable, FactorEntry, OpTable, StorageTable, Table, UseTable
from .tables import Tables

PricedEntry = tuple[Table, FactorEntry, tuple[int, ...], np.ndarray]
"""A factor of a step: its table, what it is the price of, the states of its variables, what it uses."""

PHASES = {Resource.BESIDE_FORWARD: "forward", Resource.BESIDE_BACKWARD: "backward", Resource.UPDATE: "update"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedCollective:
    """Collectives of one kind over the same axes. `overlapped`: they run while kernels do, which hide them in part."""

    when: str  # "forward", "backward", "update"
    collective: str
    axes: tuple[str, ...]
    count: int
    seconds: float
    bytes: float  # that a device sends
    hidden: float  # seconds of it that kernels hide
    overlapped: bool

    def as_json(self) -> dict[str, Any]:
        """For a plan file."""
        return {
            "when": self.when,
            "collective": self.collective,
            "axes": list(self.axes),
            "count": self.count,
            "seconds": float(f"{self.seconds:.4g}"),
            "hidden": float(f"{self.hidden:.4g}"),
            "bytes": int(self.bytes),
            "overlapped": self.overlapped,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedPart:
    """An op, or the reshard of a value between two ops, and the seconds of a step that it takes."""

    name: str
    seconds: float
    saved: float  # bytes saved for backward
    sends: str = ""  # of a reshard: "all_gather over tp forward, ..."


class SentMessage(NamedTuple):
    """One collective of a step, for all times that it runs."""

    when: str
    collective: Collective
    axes: tuple[str, ...]
    seconds: float
    bytes: float
    overlapped: bool = False
    hidden: float = 0.0


class StepPart(NamedTuple):
    """One entry of the tables in a step: an op, the reshard of a value, or the sync of a parameter.

    name      of the op, of what makes the value, or the key of the parameter
    reader    of a reshard: the op that reads the value, "" if several do
    used      by `Resource`, in one run of forward and backward
    layouts   of a reshard: from which to which
    messages  what it sends, for all times that it runs
    """

    kind: Literal["op", "reshard", "parameter"]
    name: str
    reader: str
    used: np.ndarray
    layouts: tuple[Layout, Layout] | None
    messages: tuple[SentMessage, ...]


class PricedReshard(NamedTuple):
    """The reshard between a value's producer and a reader: what each direction sends, in how many seconds."""

    name: str
    messages: tuple[SentMessage, ...]

    @property
    def seconds(self) -> float:
        return sum(message.seconds for message in self.messages)

    def describe(self) -> str:
        """The collectives forward / backward, such as "all_gather tp / reduce_scatter tp"."""
        axes_of: dict[str, dict[str, dict[str, None]]] = {"forward": {}, "backward": {}}
        for sent in self.messages:
            axes_of[sent.when].setdefault(sent.collective, {}).update(dict.fromkeys(sent.axes))
        both = (
            "; ".join(f"{kind} {', '.join(axes)}" for kind, axes in collectives.items())
            for collectives in axes_of.values()
        )
        return " / ".join(text or "-" for text in both)


def _every(table: Table, entry: FactorEntry) -> bool:
    return True


@dataclass(frozen=True, eq=False, kw_only=True)
class PricedTables:
    """Tables with the states of a solution.

    times     how often forward and backward run in a step
    counts    which entries are part of the step
    """

    tables: Tables
    states: tuple[int, ...]
    times: int
    counts: Callable[[Table, FactorEntry], bool] = _every

    def entries(self) -> Iterator[PricedEntry]:
        """Every factor of the step: its table, what it is the price of, the states of its variables, what it uses."""
        kinds, states = list(self.tables.skeleton.tables), self.states
        for factor, entry in zip(self.tables.factors, self.tables.skeleton.entries, strict=True):
            if self.counts(kinds[entry.table], entry):
                chosen = tuple(states[at] for at in factor.variables)
                yield kinds[entry.table], entry, chosen, factor.table[chosen]

    def used(self) -> np.ndarray:
        """What one run of forward and backward uses, and the update."""
        return sum((used for _, _, _, used in self.entries()), np.zeros(COUNT))

    def ops(self) -> tuple[PricedPart, ...]:
        """All ops, the most expensive first."""
        return most_expensive_first(
            PricedPart(
                name=entry.name,
                seconds=self.times * float(used[: Resource.UPDATE].sum()),
                saved=float(used[Resource.KEPT]),
            )
            for table, entry, _, used in self.entries()
            if isinstance(table, OpTable)
        )

    def reshards(self) -> tuple[PricedReshard, ...]:
        """All reshards of a step that send something."""
        return tuple(self._reshards())

    def edges(self) -> tuple[PricedPart, ...]:
        """The same as parts, the most expensive first."""
        return most_expensive_first(
            PricedPart(name=reshard.name, seconds=reshard.seconds, saved=0.0, sends=reshard.describe())
            for reshard in self.reshards()
        )

    def messages(self) -> Iterator[SentMessage]:
        """Every collective of a step."""
        parts = {when: self.hidden(when) for when in ("forward", "backward")}
        for reshard in self.reshards():
            yield from reshard.messages
        for sent in (*self._of_ops(), *self._of_parameters()):
            if not sent.axes and not sent.seconds:  # from microbatch to microbatch, which is no communication
                continue
            yield sent._replace(hidden=sent.seconds * parts[sent.when]) if sent.overlapped else sent

    def parts(self) -> Iterator[StepPart]:
        """Every entry of a step. What they use adds up to `used`."""
        for entry_of in self.entries():
            table, entry, chosen, used = entry_of
            if isinstance(table, OpTable):
                yield StepPart("op", entry.name, "", used, None, tuple(self._messages_of_op(table, entry, chosen)))
            elif isinstance(table, StorageTable):
                yield StepPart("parameter", entry.name, "", used, None, tuple(self._messages_of_parameter(entry)))
            else:
                reshard, layouts = self._reshard(entry_of), self._layouts(table, chosen)
                sent = () if reshard is None else reshard.messages
                yield StepPart("reshard", self._maker(entry.name), entry.reader, used, layouts, sent)

    def hidden(self, when: str) -> float:
        """The part of the overlapped communication that kernels hide, in forward or backward."""
        used = self.used()
        kernels, overlapped = (float(used[Resource[f"{kind}_{when.upper()}"]]) for kind in ("COMPUTE", "BESIDE"))
        return self.tables.moves.cluster.overlap * min(kernels, overlapped) / overlapped if overlapped else 0.0

    def _reshards(self) -> Iterator[PricedReshard]:
        yield from (reshard for entry in self.entries() if (reshard := self._reshard(entry)) is not None)

    def _reshard(self, entry_of: PricedEntry) -> PricedReshard | None:
        """The reshard of an entry, if it is one that sends something."""
        table, entry, chosen, used = entry_of
        tables = self.tables
        forward, backward = float(used[Resource.SEND_FORWARD]), float(used[Resource.SEND_BACKWARD])
        if not isinstance(table, EdgeTable | UseTable) or (not forward and not backward):
            return None
        value, (start, goal) = tables.graph.values[entry.name], self._layouts(table, chosen)
        item = tables.training.item(value)
        path = find_reshards(start, goal, value.shape, item, tables.moves, value.gradient)
        again = forward if isinstance(table, EdgeTable) and _runs_again(table, chosen[-1]) else 0.0
        directions = (("forward", 0, forward), ("backward", 1, backward - again), ("backward", 0, again))
        bytes = float(math.prod(value.shape) * item)
        return PricedReshard(
            name=f"{self._maker(entry.name)} -> {entry.reader or 'its readers'}",
            messages=tuple(
                message
                for when, back, seconds in directions
                for message in self._steps(_with_sizes(path.steps, start, bytes, tables), (when, back, seconds))
            ),
        )

    def _layouts(self, table: EdgeTable | UseTable, chosen: tuple[int, ...]) -> tuple[Layout, Layout]:
        """From which layout to which a value is resharded."""
        tables = self.tables
        if isinstance(table, UseTable):
            starts = tables.storage_options[table.parameter].layouts
            goals = tables.layouts(EdgeEnd("in", table.kind, table.index))
        else:
            starts, goals = tables.layouts(table.start), tables.layouts(table.goal, table.value)
        return starts[chosen[0]], goals[chosen[1] if len(goals) > 1 else 0]

    def _steps(self, steps: list[tuple[Reshard, float]], direction: tuple[str, int, float]) -> Iterator[SentMessage]:
        """What the steps of a path send in one direction, whose price they share."""
        when, back, seconds = direction
        sending = [(kind, step, size) for step, size in steps if (kind := COLLECTIVES[step.kind][back]) is not None]
        for kind, step, size in sending if seconds else ():
            parts = math.prod(self.tables.moves.sizes[axis] for axis in step.axes) if kind == "all_to_all" else 1
            yield self._message(when, kind, step.axes, seconds / len(sending), size / parts)

    def _message(
        self, when: str, kind: Collective, axes: tuple[str, ...], seconds: float, bytes: float, *,
        overlapped: bool = False, times: int | None = None,
    ) -> SentMessage:  # fmt: skip
        """A collective of so many seconds and bytes each time, over devices."""
        times, sizes = self.times if times is None else times, self.tables.moves.placed.sizes
        ranks = math.prod(sizes.get(axis, 1) for axis in axes)
        over = tuple(axis for axis in axes if axis != MB)
        return SentMessage(when, kind, over, times * seconds, times * wire_bytes(kind, bytes, ranks), overlapped)

    def _maker(self, value: str) -> str:
        """The op that makes a value, or the key of a parameter."""
        graph = self.tables.graph
        producer, parameter = graph.producer.get(value), graph.parameter_of(value)
        return producer.name if producer is not None else parameter.key if parameter is not None else value

    def _of_ops(self) -> Iterator[SentMessage]:
        """What ops send themselves; ops that are recomputed send it again in backward."""
        for table, entry, chosen, _ in self.entries():
            if isinstance(table, OpTable):
                yield from self._messages_of_op(table, entry, chosen)

    def _messages_of_op(self, table: OpTable, entry: FactorEntry, chosen: tuple[int, ...]) -> Iterator[SentMessage]:
        tables = self.tables
        again = table.region[chosen[-1]] >= 0 if table.region else table.again
        signature, choice = tables.skeleton.analysis.signatures[entry.name], self._choices.get(entry.name, {})
        for sent in algorithm_collectives(signature, choice, tables.mesh, tables.training):
            seconds = tables.moves.waited(sent.collective, sent.bytes, sent.axes)
            message = self._message(
                sent.when, sent.collective, sent.axes, seconds, sent.bytes, overlapped=sent.overlapped
            )
            if sent.when == "forward" or tables.spaces.backward:
                yield message
            if sent.when == "forward" and again:
                yield message._replace(when="backward")

    @cached_property
    def _choices(self) -> Mapping[str, Mapping[str, str]]:
        return self.tables.choices(self.states)

    @cached_property
    def _parameters(self) -> Mapping[str, Parameter]:
        return {parameter.key: parameter for parameter in self.tables.graph.parameters}

    def _of_parameters(self) -> Iterator[SentMessage]:
        for table, entry, _, _ in self.entries():
            if isinstance(table, StorageTable):
                yield from self._messages_of_parameter(entry)

    def _messages_of_parameter(self, entry: FactorEntry) -> Iterator[SentMessage]:
        tables = self.tables
        layout, storage = tables.home(entry.name, self.states)
        unit = tables.skeleton.units[entry.name]
        for sent in tables.storing.sends(self._parameters[entry.name], layout, storage, unit):
            overlapped = sent.resource != Resource.UPDATE
            yield self._message(
                PHASES[sent.resource], sent.collective, sent.axes, sent.seconds, sent.bytes,
                overlapped=overlapped, times=self.times if overlapped else 1,
            )  # fmt: skip


def most_expensive_first(parts: Iterable[PricedPart]) -> tuple[PricedPart, ...]:
    return tuple(sorted(parts, key=lambda part: -part.seconds))


def totals(messages: Iterable[SentMessage]) -> tuple[PricedCollective, ...]:
    """All collectives of a step, added up by kind and axes."""
    sums: dict[tuple[str, str, tuple[str, ...], bool], list[SentMessage]] = {}
    for sent in messages:
        sums.setdefault((sent.when, sent.collective, sent.axes, sent.overlapped), []).append(sent)
    order = ("forward", "backward", "update")
    return tuple(
        PricedCollective(
            when=when, collective=collective, axes=axes, count=len(sent), overlapped=overlapped,
            seconds=sum(message.seconds for message in sent), bytes=sum(message.bytes for message in sent),
            hidden=sum(message.hidden for message in sent),
        )
        for (when, collective, axes, overlapped), sent in sorted(
            sums.items(), key=lambda item: (order.index(item[0][0]), item[0])
        )
    )  # fmt: skip


def _with_sizes(steps: Iterable[Reshard], start: Layout, bytes: float, tables: Tables) -> list[tuple[Reshard, float]]:
    """Each step with the bytes that a device has of the value without shards on its axes."""
    sizes = []
    for step in steps:
        sizes.append((step, step_bytes(step, start, bytes, tables.moves)))
        start = step.after
    return sizes


def _runs_again(table: EdgeTable, option: int) -> bool:
    """Whether an edge is recomputed in backward."""
    return table.again or (bool(table.ways) and table.ways[option] == "again")

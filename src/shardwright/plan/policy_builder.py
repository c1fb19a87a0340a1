"""The policy API: a plan is written with a few verbs, and what they leave open is filled in.

    plan = PolicyBuilder(graph, cluster, dp=2, tp=2)      a mesh, the outermost axis first
    plan.split(dim="batch", over="dp")                    everything that has the batch
    plan.split("blocks.*.mlp.up", "n", over="tp")         ops of modules, on a label of theirs
    plan.split(dim="batch", over="time", parts=8)         microbatches
    plan.replicate("head", over="tp")                     not split there
    plan.tie("blocks.*")                                  the same in all of them
    plan.store("blocks.*.weight", "zero3", over="dp")     how parameters are stored
    plan.recompute("blocks.*")                            activation checkpointing
    plan.chunk("loss", 8)                                 logits in chunks of rows
    plan.place("blocks.0", devices=[0, 1])                a stage
    plan.schedule("1f1b", microbatches=4)                 how stages take turns
    plan.order("B0.0", "F0.2")                            a step of it before another

A policy returns `plan.build()`: what it has not decided follows what it has, or is replicated. Or it returns the
builder: the planner searches for the rest. Nothing says what depends on what, or what is sent: that is derived.

Each verb is checked at once, and refused with the line that says it. The last word about an op on an axis counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn, TypeVar

from ..cluster import Cluster
from ..errors import LayoutError, PlanError, ScheduleError
from ..ir import Graph, Op
from ..layout import Axis, Mesh
from ..ops.chunked_losses import LOSSES
from ..rules import analyse
from ..schedule import Step, schedule_kind
from ..storage import SHARDED_TENSORS
from .binder import Binder
from .constraint_kinds import (
    ChoiceDemand,
    ChunkedLossConstraint,
    Constraints,
    ConstraintSource,
    Range,
    RecomputeConstraint,
    SameSplitConstraint,
    Target,
    ZeroConstraint,
)
from .hand_plan import StagePlacement, build_flat, build_stages
from .limits import RUN_WHOLE, Limits
from .plan import Plan
from .policy_call import analysis_of_call, calling_line
from .policy_constraints import AxisSize, PolicyDecisions, constraints_of, read_axes
from .selection import Selection, read_selection

Fitting = TypeVar("Fitting", RecomputeConstraint, ChunkedLossConstraint, SameSplitConstraint)

TIME = "time"
"""The axis of microbatches, as a verb names it."""


class PolicyBuilder:
    """A plan as it is written. `graph` and `cluster` are what the policy is called with.

    `axes` are the mesh. A size that is left to the search is None, or (least, most).
    """

    def __init__(self, graph: Graph, cluster: Cluster | None = None, /, **axes: AxisSize) -> None:
        source = calling_line("PolicyBuilder", (), axes)
        self.graph, self.cluster = graph, cluster
        self.analysis = analysis_of_call(graph) or analyse(graph)
        self._decisions = PolicyDecisions(axes=read_axes(axes, source), source=source)
        self._binder = Binder(Constraints(classes=graph.classes), self.analysis)

    # -- verbs -----------------------------------------------------------------------------

    def split(
        self, target: Selection = "", dim: str | int | None = None, *, over: str | None = None, parts: int | None = None
    ) -> None:  # fmt: skip
        """Split ops along an axis, or in time.

        dim      a label of their rule ("n", "k", "heads"), "batch" or "sequence"; or a number: of a dim of the
                 parameters if some are selected, else of what the ops return; None: whatever they can be split on.
                 Ops that don't have it are left alone.
        over     an axis of the mesh; "time": in `parts` that run one after the other, the batch of all ops
        """
        source = calling_line("split", (target, dim), {"over": over, "parts": parts})
        selected = self._target(target, source)
        if over == TIME:
            if not selected.is_everything or dim != "batch" or parts is None or parts < 1:
                _refuse(source, 'in time the whole model is split, on its batch: split(dim="batch", over="time", '
                                "parts=8); for losses there is chunk")  # fmt: skip
            self._decisions.schedule = self._decisions.schedule.with_kind(None, parts, source)
            return
        if parts is not None:
            _refuse(source, f"an axis has as many parts as devices; parts are for over={TIME!r}")
        axis, ops = self._axis(over, source), self._ops(selected, source)
        picks = {op.name: tuple(r.name for r in self._binder.roles_of(op, selected, dim)) for op in ops}
        if not any(picks.values()):
            _refuse(source, self._binder.no_label(ops, dim))
        for name, roles in picks.items():
            if roles and axis not in self._decisions.single:
                self._decisions.choices[name, axis] = ChoiceDemand(roles, axis), source

    def replicate(self, target: Selection = "", *, over: str | None = None) -> None:
        """Don't split ops along an axis, or along any."""
        source = calling_line("replicate", (target,), {"over": over})
        ops = self._ops(self._target(target, source), source)
        for axis in self._decisions.names if over is None else (self._axis(over, source),):
            for op in ops if axis not in self._decisions.single else ():
                self._decisions.choices[op.name, axis] = ChoiceDemand(RUN_WHOLE, axis), source

    def tie(self, target: Selection) -> None:
        """Split the ops of one name in all of these modules in the same way."""
        source = calling_line("tie", (target,), {})
        item = SameSplitConstraint(target=self._target(target, source), source=source)
        self._decisions.ties.append(self._fitting(item))

    def store(self, target: Selection, kind: str, *, over: str | None = None) -> None:
        """How the parameters of modules, or those of some keys, are stored.

        kind     "zero1", "zero2" or "zero3" over an axis, or "replicated"
        """
        source = calling_line("store", (target, kind), {"over": over})
        if kind not in SHARDED_TENSORS:
            _refuse(source, f"{kind!r} is no kind of parameter storage; there are {', '.join(SHARDED_TENSORS)}")
        number = SHARDED_TENSORS[kind]
        axis = self._axis(over, source) if number else None
        if axis in self._decisions.single:
            return
        zero = Range(number, number)
        item = ZeroConstraint(target=self._target(target, source), zero=zero, on=axis, kind=kind, source=source)
        for key in self._binder.keys_of(item) or _refuse(source, "no parameter of the model is meant"):
            self._decisions.storing[key] = replace(item, target=Target(parameters=(key,)))

    def recompute(self, target: Selection, wanted: bool = True) -> None:
        """Activation checkpointing: save only the inputs of modules for backward; or, if it is not wanted, never."""
        source = calling_line("recompute", (target, wanted), {})
        selected = self._target(target, source)
        paths = dict.fromkeys(selected.place(op.module_path, self.graph.classes) for op in self._ops(selected, source))
        for path in paths:
            named = Target(modules=(path,)) if path else Target()
            item = RecomputeConstraint(target=named, wanted=wanted, source=source)
            self._decisions.recompute[path or ""] = self._fitting(item)

    def chunk(self, target: Selection = "", chunks: int | None = None) -> None:
        """Make the logits of losses in chunks of rows; without a number in as many as are usual."""
        source = calling_line("chunk", (target, chunks), {})
        if chunks is not None and chunks < 2:
            _refuse(source, f"{chunks} is no number of chunks; use 2 or more")
        selected = self._target(target, source)
        losses = [op for op in self._ops(selected, source) if op.target in LOSSES]
        for op in losses or _refuse(source, "no cross_entropy of the model is meant"):
            item = ChunkedLossConstraint(target=Target(ops=(op.name,)), chunks=chunks, source=source)
            self._decisions.chunks[op.name] = self._fitting(item)

    def place(self, target: Selection, devices: Sequence[int] | int, **axes: int) -> int:
        """Put modules on devices as the next stage of a pipeline; returns its number.

        Stages are in the order of the calls. What nobody places is in the stage of what it reads. `axes` are the mesh
        of the stage, by default that of the plan. Stages share all of their devices and their mesh, or none.
        """
        source = calling_line("place", (target, devices), axes)
        own = (devices,) if isinstance(devices, int) else tuple(devices)
        sizes = read_axes(axes, source) if axes else self._decisions.axes
        try:
            mesh = Mesh(axes=_fixed(sizes, source), devices=own)
        except LayoutError as error:
            _refuse(source, f"{error}; say what mesh the stage has: place(.., {len(own)} devices, tp={len(own)})")
        names = tuple(op.name for op in self._ops(self._target(target, source), source))
        self._decisions.stages.append(StagePlacement(names=names, mesh=mesh, source=source))
        return len(self._decisions.stages) - 1

    def schedule(self, steps: str | Sequence[str] | None = None, *, microbatches: int | None = None) -> None:
        """How stages take turns, and in how many microbatches the batch is split.

        steps    the name of a schedule ("1f1b"), or for each pipeline rank its steps in order ("F0.0 F0.1 B0.0 B0.1")
        """
        source = calling_line("schedule", (steps,), {"microbatches": microbatches})
        try:
            for row in () if steps is None or isinstance(steps, str) else steps:
                tuple(map(Step.parse, row.split()))
            if isinstance(steps, str):
                schedule_kind(steps)
        except ScheduleError as error:
            _refuse(source, str(error))
        if microbatches is not None and microbatches < 1:
            _refuse(source, f"{microbatches} is no number of microbatches; it is 1 or more")
        self._decisions.schedule = self._decisions.schedule.with_kind(steps, microbatches, source)

    def order(self, first: str, second: str) -> None:
        """Let a step of the schedule run before another one of the same devices: "B0.0" before "F0.2"."""
        source = calling_line("order", (first, second), {})
        if any(name in self.graph.by_name for name in (first, second)):
            self._check_order(first, second, source)
            return
        try:
            pair = Step.parse(first), Step.parse(second)
        except ScheduleError as error:
            _refuse(source, f"{error}; or name two ops of the model, as ways() lists them")
        self._decisions.schedule = self._decisions.schedule.with_pair(pair, source)

    def _check_order(self, first: str, second: str, source: ConstraintSource) -> None:
        """Two ops: programs keep the order of the model, so there is nothing to decide."""
        numbers = {op.name: number for number, op in enumerate(self.graph.ops)}
        for name in (first, second):
            if name not in numbers:
                _refuse(source, f"the model has no op {name!r}; ways() lists those that it has")
        if numbers[first] > numbers[second]:
            a, b = self.graph.by_name[first], self.graph.by_name[second]
            _refuse(source, f"{a} comes after {b} in the model, and programs keep its order; move the line there")

    # -- looking ---------------------------------------------------------------------------

    def ways(self, target: Selection = "") -> str:
        """How ops can be split: a line for each, with the labels and their sizes."""
        source, lines = calling_line("ways", (target,), {}), list[str]()
        for op in self._ops(self._target(target, source), source):
            roles = self.analysis.signatures[op.name].roles
            lines.append(f"{op}: {', '.join(f'{role.name} ({role.size})' for role in roles) or 'nothing to split'}")
        return "\n".join(lines)

    # -- the plan --------------------------------------------------------------------------

    def build(self) -> Plan:
        """The plan, without a search: what is open follows what it reads, or is replicated."""
        decisions, limits = self._decisions, self.limits()
        mesh = Mesh(axes=_fixed(decisions.axes, decisions.source)) if not decisions.stages else Mesh(axes=())
        if decisions.stages or decisions.schedule.is_pipeline:
            plan = build_stages(self.analysis, decisions.stages, mesh, decisions.schedule, limits)
        else:
            plan = build_flat(self.analysis, mesh, limits)
        return replace(plan, policy=POLICY, cluster=str(self.cluster or ""))

    def constraints(self) -> Constraints:
        """What is decided, as constraints on a search for the rest."""
        return constraints_of(self._decisions, self.analysis)

    def limits(self) -> Limits:
        """What is decided, resolved for the graph."""
        binder = Binder(Constraints(classes=self.graph.classes), self.analysis)
        for item in self._decisions.items():
            binder.add(item)
        binder.check()
        return binder.finish()

    # -- reading ---------------------------------------------------------------------------

    def _fitting(self, item: Fitting) -> Fitting:
        """A constraint, if it fits the model."""
        binder = Binder(Constraints(classes=self.graph.classes), self.analysis)
        binder.add(item)
        if binder.faults:
            raise PlanError("\n".join(binder.faults))
        return item

    def _target(self, selection: Selection, source: ConstraintSource) -> Target:
        try:
            target = read_selection(self.graph, selection)
        except PlanError as error:
            _refuse(source, str(error))
        for fault in self._binder.unknown(target):
            _refuse(source, fault)
        return target

    def _ops(self, target: Target, source: ConstraintSource) -> list[Op]:
        return self._binder.ops_of(target) or _refuse(source, "no op of the model is meant")

    def _axis(self, over: str | None, source: ConstraintSource) -> str:
        """The name of the axis that a verb is about."""
        names = self._decisions.names
        if over is None and len(names) == 1:
            return names[0]
        if over not in names:
            mesh = f"the mesh has {', '.join(names)}" if names else "the mesh has no axes: PolicyBuilder(.., tp=2)"
            what = "say over which axis" if over is None else f"there is no axis {over!r}"
            _refuse(source, f"{what}; {mesh}")
        return over


POLICY = "a policy"
"""What plans of a policy are called until it is known which."""


def _fixed(axes: dict[str, Range], source: ConstraintSource) -> tuple[Axis, ...]:
    """Axes whose sizes are all known, without those of one device."""
    fixed = []
    for name, size in axes.items():
        if size.exact is None:
            _refuse(source, f"the size of {name} is left to the search; say it, or return the builder")
        if size.exact > 1:
            fixed.append(Axis(name=name, size=size.exact))
    return tuple(fixed)


def _refuse(source: ConstraintSource, why: str) -> NoReturn:
    raise PlanError(f"{source}: {why}")

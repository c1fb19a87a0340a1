"""Resolves constraints for one graph: which ops, parameters and modules each of them is about."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import get_close_matches
from functools import cached_property

from ..errors import PlanError, raise_all
from ..ir import Op, Parameter
from ..ir.paths import is_inside
from ..ir.recompute import faults_of
from ..lower.chunked_loss import faults_of_losses, rows_of
from ..ops.chunked_losses import LOSSES
from ..rules import Analysis, Role
from .constraint_kinds import (
    AxisConstraint,
    ChoiceConstraint,
    ChoiceDemand,
    ChunkedLossConstraint,
    Constraint,
    Constraints,
    ConstraintSource,
    DevicesConstraint,
    MemoryConstraint,
    PipelineConstraint,
    Range,
    RecomputeConstraint,
    ReplicateConstraint,
    SameSplitConstraint,
    SplitConstraint,
    StageCutConstraint,
    Target,
    ZeroConstraint,
)
from .limits import RUN_WHOLE, Limits, StorageLimit


def bind(constraints: Constraints, analysis: Analysis, chunked: Iterable[str] = ()) -> Limits:
    """The limits of a graph. Refuses, all at once, what names nothing that the model has.

    `chunked`: losses whose logits a search tries to make in chunks.
    """
    binder = Binder(constraints, analysis)
    binder.chunked |= dict.fromkeys(chunked)
    for item in constraints.items:
        binder.add(item)
    binder.check()
    return binder.finish()


def sizes_of(item: SplitConstraint, constraints: Constraints, analysis: Analysis) -> str:
    """What a label that ops are to be split on has: "n has 128 in blocks.0.up / linear"."""
    binder, sizes = Binder(constraints, analysis), dict[tuple[str, int], str]()
    for op in binder.ops_of(item.target):
        for role in binder.roles_of(op, item.target, item.label):
            sizes.setdefault((role.name, role.size), f"{role.name} has {role.size} in {op.name}")
    return ", ".join(list(sizes.values())[:3])


class Binder:
    """Takes one constraint after the other, and collects what is wrong with them."""

    def __init__(self, constraints: Constraints, analysis: Analysis) -> None:
        self.analysis, self.graph = analysis, analysis.graph
        self.classes = constraints.classes or analysis.graph.classes
        self.live = analysis.live
        self.faults: list[str] = []
        self.axes: dict[str, tuple[AxisConstraint, ...]] = {}
        self.demands: dict[str, tuple[ChoiceDemand, ...]] = {}
        self.groups: dict[str, str] = {}
        self.storing: dict[str, StorageLimit] = {}
        self.must: list[str] = []
        self.never: dict[str, Op] = {}
        self.chunked: dict[str, int | None] = {}
        self.memory = float("inf")
        self.pipeline: dict[str, Range | str] = {}
        self.pivots: dict[str, Op] = {}
        self.uncut: dict[str, tuple[Op, ...]] = {}
        self.devices: tuple[tuple[int, ...], ...] = ()
        self.why: dict[str, tuple[str, ...]] = {}

    def check(self) -> None:
        """Refuse what does not fit the model."""
        raise_all(PlanError, f"the constraints do not fit {self.graph.name}:", self.faults)

    def finish(self) -> Limits:
        must = dict.fromkeys(self.must)
        outer = [path for path in must if not any(path != other and is_inside(path, other) for other in must)]
        return Limits(
            axes=self.axes,
            demands=self.demands,
            together=self.groups,
            storing=self.storing,
            must=tuple(outer),
            never=tuple(self.never.values()),
            chunked={name: chunks for name, chunks in self.chunked.items() if chunks != 0},
            unchunked=frozenset(name for name, chunks in self.chunked.items() if chunks == 0),
            memory=self.memory,
            pipeline=self.pipeline,
            pivots=tuple(self.pivots.values()),
            uncut=self.uncut,
            devices=self.devices,
            why=self.why,
        )

    def add(self, item: Constraint) -> None:
        if isinstance(item, AxisConstraint):
            self.axes[item.name] = (*self.axes.get(item.name, ()), item)
            return
        if isinstance(item, MemoryConstraint):
            self.memory = min(self.memory, item.bytes)
            return
        if isinstance(item, PipelineConstraint):
            self._pipeline(item)
            return
        if isinstance(item, DevicesConstraint):
            self.devices = item.devices
            return
        if isinstance(item, ChoiceConstraint):
            for name, demands in item.demands.items():
                for demand in demands:
                    self._demand(self.graph.by_name[name], demand, item.source)
            return
        if unknown := list(self.unknown(item.target)):
            self.faults += [f"{item.source}: {fault}" for fault in unknown]
            return
        ops = self.ops_of(item.target)
        if not ops and not isinstance(item, ZeroConstraint):
            self.faults.append(f"{item.source}: no op of the model is meant")
            return
        if isinstance(item, SplitConstraint | ReplicateConstraint | ZeroConstraint) and item.on is not None:
            self.axes.setdefault(item.on, ())
        adders: dict[type, Callable[..., None]] = {
            SplitConstraint: self._split,
            ReplicateConstraint: self._replicated,
            SameSplitConstraint: self._together,
            RecomputeConstraint: self._recompute,
            ChunkedLossConstraint: self._chunked_loss,
            ZeroConstraint: self._zero,
            StageCutConstraint: self._cut,
        }
        adders[type(item)](item, ops)

    def ops_of(self, target: Target) -> list[Op]:
        """The ops that are meant, in order."""
        return [op for op in self.live if target.takes(op, self.classes) and self._reads(op, target)]

    def _reads(self, op: Op, target: Target) -> bool:
        if not target.parameters:
            return True
        read = [self.graph.parameter_of(name) for name in op.inputs]
        return any(target.has_parameter(parameter.keys) for parameter in read if parameter is not None)

    def _pipeline(self, item: PipelineConstraint) -> None:
        old, new = self.pipeline.get(item.what, item.value), item.value
        if isinstance(old, Range) and isinstance(new, Range):
            new = new.within(old)
            if new.least <= new.most:
                old = new
        if old != new:
            self.faults.append(f"{item.source}: another entry asks for {item.what}: {old}; leave one of them out")
        self.pipeline[item.what] = old

    def unknown(self, target: Target) -> Iterator[str]:
        """The names of a target that the model does not have."""
        paths = list(self.classes) or list(self.graph.under)
        for pattern in target.modules:
            if not any(Target(modules=(pattern,)).place(path, {}) for path in paths):
                yield f"the model has no module {pattern!r}; it has {_some(pattern, paths)}"
        names = list(dict.fromkeys(self.classes.values()))
        for name in target.classes:
            if name not in names:
                yield f"the model has no module of class {name!r}; it has {_some(name, names)}"
        for name in target.ops:
            if not any(Target(ops=(name,)).takes(op, {}) for op in self.live):
                kinds = list(dict.fromkeys(op.target.rpartition(".")[0] for op in self.live))
                yield f"the model has no op {name!r}; it has {_some(name, kinds)}"
        for name in target.lines:
            if not any(Target(lines=(name,)).takes(op, {}) for op in self.live):
                sources = list(dict.fromkeys(str(op.source) for op in self.live if op.source is not None))
                yield f"no op of the model is at {name!r}; there are ops at {_some(name, sources)}"
        keys = [key for parameter in self.graph.parameters for key in parameter.keys]
        for name in target.parameters:
            if not Target(parameters=(name,)).has_parameter(keys):
                yield f"the model has no parameter {name!r}; it has {_some(name, keys)}"

    def _demand(self, op: Op, demand: ChoiceDemand, source: ConstraintSource) -> None:
        self.demands[op.name] = (*self.demands.get(op.name, ()), demand)
        self.why[op.name] = tuple(dict.fromkeys((*self.why.get(op.name, ()), str(source))))

    def _split(self, item: SplitConstraint, ops: Sequence[Op]) -> None:
        matched = False
        for op in ops:
            picks = tuple(role.name for role in self.roles_of(op, item.target, item.label))
            if picks:
                matched = True
                self._demand(op, ChoiceDemand(picks, item.on, every=item.on is not None), item.source)
        if not matched:
            self.faults.append(f"{item.source}: {self.no_label(ops, item.label)}")

    def no_label(self, ops: Sequence[Op], label: str | int | None) -> str:
        """Why none of some ops can be split so, with what they can be split on."""
        known: dict[str, str] = {}
        for op in ops:
            labels = dict.fromkeys(role.label for role in self.analysis.signatures[op.name].roles)
            known.setdefault(op.target.split(".")[1], ", ".join(labels) or "none")
        there = "; ".join(f"{kind} has {labels}" for kind, labels in list(known.items())[:6])
        what = f"has the label {label!r}" if isinstance(label, str) else "can be split"
        return f"no op there {what if not isinstance(label, int) else f'can be split on dim {label}'}; {there}"

    def roles_of(self, op: Op, target: Target, label: str | int | None) -> tuple[Role, ...]:
        """The splits of an op that a label means."""
        roles = self.analysis.signatures[op.name].roles
        if label is None:
            return roles
        if isinstance(label, int):
            atoms = self._atoms_of_dim(op, target, label)
            return tuple(role for role in roles if role.atom in atoms)
        return tuple(role for role in roles if self.is_meant(role, label))

    def _atoms_of_dim(self, op: Op, target: Target, dim: int) -> set[int]:
        """The atoms of a dim of the parameters that are meant, or if there are none, of the op's first output."""
        values = list(op.outputs[:1])
        if target.parameters:
            read = [self.graph.parameter_of(name) for name in op.inputs]
            values = [p.value for p in read if p is not None and target.has_parameter(p.keys)]
        dims = [self.analysis.dims[name] for name in values]
        fit = [every[dim] for every in dims if -len(every) <= dim < len(every)]
        return {atom for dims in fit for atom in self.analysis.atoms.splittable(dims)}

    def is_meant(self, role: Role, label: str) -> bool:
        """Whether a role is one that a label names."""
        if label == "batch":
            return role.atom in self.analysis.batch
        if label == "sequence":
            return role.atom in self.sequence
        return label in (role.name, role.label)

    @cached_property
    def sequence(self) -> set[int]:
        """Atoms of the middle dim of [batch, sequence, features] activations."""
        analysis, atoms = self.analysis, set[int]()
        for value in self.graph.values.values():
            if len(value.shape) == 3 and value.gradient and value.shape[0] == self.graph.batch:
                atoms.update(analysis.atoms.splittable(analysis.dims[value.name][1]))
        return atoms - analysis.batch

    def _replicated(self, item: ReplicateConstraint, ops: Sequence[Op]) -> None:
        for op in ops:
            self._demand(op, ChoiceDemand(RUN_WHOLE, item.on), item.source)

    def _together(self, item: SameSplitConstraint, ops: Sequence[Op]) -> None:
        """Ops of one name in their modules are a group, together with all groups that they are in already."""
        heads: dict[tuple[str, str], str] = {}
        for op in ops:
            place = item.target.place(op.module_path, self.classes) or ""
            head = heads.setdefault((op.name.removeprefix(place), op.target), op.name)
            old, new = self.groups.get(op.name), self.groups.get(head, head)
            if old is not None and old != new:
                self.groups |= {name: new for name, group in self.groups.items() if group == old}
            self.groups[op.name] = self.groups[head] = new

    def _recompute(self, item: RecomputeConstraint, ops: Sequence[Op]) -> None:
        if not item.wanted:
            self.never |= {op.name: op for op in ops}
            return
        for path in dict.fromkeys(item.target.place(op.module_path, self.classes) or "" for op in ops):
            self.faults += [f"{item.source}: it asks for {path!r}, {why}" for why in faults_of(self.graph, path)]
            self.must.append(path)

    def _chunked_loss(self, item: ChunkedLossConstraint, ops: Sequence[Op]) -> None:
        losses = {op.name: op for op in ops if op.target in LOSSES}
        if not losses:
            self.faults.append(f"{item.source}: no cross_entropy of the model is meant")
        faults = faults_of_losses(self.graph) if item.chunks != 0 else {}
        for name, op in losses.items():
            rows = rows_of(op, self.graph)
            if (fault := faults.get(name)) is not None:
                self.faults.append(f"{item.source}: {op} can't be, {fault}")
            elif item.chunks is not None and item.chunks > rows:
                self.faults.append(f"{item.source}: {op} has {rows} rows; ask for {rows} chunks at most")
            elif self.chunked.setdefault(name, item.chunks) != item.chunks:
                self.faults.append(f"{item.source}: another entry asks for other chunks of {op}; leave one of them out")

    def _cut(self, item: StageCutConstraint, ops: Sequence[Op]) -> None:
        modules: dict[str, list[Op]] = {}
        for op in ops:
            modules.setdefault(item.target.place(op.module_path, self.classes) or "", []).append(op)
        for path, module_ops in modules.items():
            if item.before:
                self.pivots[module_ops[0].name] = module_ops[0]
            else:
                self.uncut[path] = tuple(module_ops)

    def _zero(self, item: ZeroConstraint, ops: Sequence[Op]) -> None:
        parameters = self._parameters_of(item.target, ops)
        if not parameters:
            self.faults.append(f"{item.source}: no parameter of the model is meant")
        for parameter in parameters:
            old = self.storing.get(parameter.key, StorageLimit())
            zero, on = item.zero.within(old.zero), item.on or old.on
            if zero.least > zero.most or (old.on is not None and on != old.on):
                self.faults.append(f"{item.source}: another entry asks for ZeRO {old.zero} of {parameter.key}"
                                   f"{f' on {old.on}' if old.on else ''}; leave one of them out")  # fmt: skip
            self.storing[parameter.key] = StorageLimit(zero, on, item.kind or old.kind)

    def keys_of(self, item: ZeroConstraint) -> list[str]:
        """The parameters that are meant."""
        return [parameter.key for parameter in self._parameters_of(item.target, self.ops_of(item.target))]

    def _parameters_of(self, target: Target, ops: Sequence[Op]) -> list[Parameter]:
        names = {op.name for op in ops}
        return [parameter for parameter in self.graph.parameters if self._is_about(target, parameter, names)]

    def _is_about(self, target: Target, parameter: Parameter, ops: set[str]) -> bool:
        """By its key, by the module that it is in, or where ops are named, by an op that uses it."""
        if target.parameters and not target.has_parameter(parameter.keys):
            return False
        if target.ops or target.lines:
            return any(user.name in ops for user, _ in self.graph.users[parameter.value])
        return any(target.place(key.rpartition(".")[0], self.classes) is not None for key in parameter.keys)


def _some(name: str, known: Sequence[str]) -> str:
    """A few names out of many: those like the one that was written, else the first."""
    close = get_close_matches(name, known, n=4, cutoff=0.5)
    shown = close or [candidate for candidate in known if candidate][:8]
    return ", ".join(shown) + (", .." if len(shown) < len(known) else "")

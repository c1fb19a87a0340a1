"""The ways in which each kind of op can be split on a mesh, and what each of them uses.

A space lists, for every axis, the op's roles, running replicated, and where it can pay

    FAN        an op of parameters only, or of keys of grouped heads, returns its gradients as pending sums
    PASS_PARTIAL       a linear op lets a pending sum through

Lossy pruning, listed in the plan's notes: on a mesh with several free axes an op is split on the batch, on the sequence
(any label without a parameter) or on one of the `MOST` labels of parameters that have the most arithmetic in its layer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from ..cost import local_call
from ..cost.algorithm_collectives import algorithm_collectives
from ..cost.reshard_tables import ReshardTables
from ..cost.resources import COUNT, Resource
from ..cost.saved_for_backward import saved_bytes
from ..cost.time import op_time
from ..errors import PlanError
from ..ir import Op
from ..ir.paths import layer_of
from ..layout import Axis, Layout
from ..memory.flow import op_bytes
from ..ops.contexts import AlgorithmCollective
from ..rules import FAN, PASS_PARTIAL, Role, Signature, without_stripes
from .constraint_kinds import ChoiceDemand
from .op_kinds import OpKinds

MOST = 2
"""On a mesh of several axes: labels of parameters that an op may be split on."""


@dataclass(frozen=True, eq=False)
class ChoiceSpace:
    """The states of one kind of op: choices, the layouts that they ask for, what they use."""

    choices: tuple[Mapping[str, str], ...]
    inputs: tuple[tuple[Layout, ...], ...]  # of each input, in each state
    outputs: tuple[tuple[Layout, ...], ...]
    used: np.ndarray  # [state, resource]

    @property
    def size(self) -> int:
        return len(self.choices)

    def only(self, choices: Sequence[Mapping[str, str]]) -> ChoiceSpace:
        """With these of its choices, in this order."""
        if list(self.choices) == list(choices):
            return self
        at = [self.choices.index(choice) for choice in choices]
        inputs, outputs = (
            tuple(tuple(layouts[state] for state in at) for layouts in tensors)
            for tensors in (self.inputs, self.outputs)
        )
        return ChoiceSpace(choices=tuple(choices), inputs=inputs, outputs=outputs, used=self.used[at])


Measured = tuple[ChoiceSpace, tuple[tuple[AlgorithmCollective, ...], ...]]
"""A space without what ops send by themselves, and that, in each state."""


@dataclass(frozen=True, slots=True)
class FixedChoices:
    """The choice of every op, if it is known. Those in `free` may do all they can beside it, without pruning."""

    choices: Mapping[str, Mapping[str, str]] | None = None
    free: Collection[str] = ()


class ChoiceSpaces:
    """The spaces of all kinds of ops of a graph on one mesh."""

    def __init__(
        self,
        kinds: OpKinds,
        moves: ReshardTables,
        *,
        data: Iterable[str] = (),
        fixed: FixedChoices = FixedChoices(),
        allowed: Mapping[str, Mapping[str, frozenset[str]]] | None = None,
        demands: Mapping[str, Sequence[ChoiceDemand]] | None = None,
        twins: Iterable[Iterable[int]] = (),
        like: ChoiceSpaces | None = None,
    ) -> None:
        """`data`: axes that split the batch and nothing else. `fixed`: what is known of the choices.

        `allowed`: for some ops on some axes the choices that are tried, if there are such ("" is not split).
        `demands`: what users ask of some ops; a space may come out empty. What is known of ops in these three has
        to be known to `kinds` too. `twins`: kinds that have the choices that all of them have, in the same order.
        `like`: spaces that differ in nothing but where in the cluster the mesh lies.
        """
        self.kinds, self.analysis, self.moves, self.mesh = kinds, kinds.analysis, moves, moves.mesh
        self.training, self.backward = kinds.training, kinds.backward
        self.data, self.allowed = frozenset(data), allowed or {}
        self.fixed, self.free = fixed.choices, frozenset(fixed.free)
        self.demands = demands or {}
        self.twins = {kind: group for group in map(tuple, twins) for kind in group}
        self._known: dict[int, ChoiceSpace] = {}
        self._sizes: dict[int, np.ndarray] = {}
        self._measured: dict[str, Measured] = like._measured if like is not None else {}

    def of(self, kind: int) -> ChoiceSpace:
        if kind not in self._known:
            spaces = {twin: self._make(self.kinds.first[twin]) for twin in self.twins.get(kind, (kind,))}
            shared = [
                choice
                for choice in next(iter(spaces.values())).choices
                if all(choice in space.choices for space in spaces.values())
            ]
            self._known |= {twin: space.only(shared) for twin, space in spaces.items()}
        return self._known[kind]

    def sizes_of(self, kind: int) -> np.ndarray:
        """The bytes that a kind of op takes by itself in each state, forward or backward, without its parameters."""
        if kind not in self._sizes:
            signature = self.analysis.signatures[self.kinds.first[kind].name]
            calls = [local_call(signature, choice, self.mesh, self.training) for choice in self.of(kind).choices]
            self._sizes[kind] = np.array([op_bytes(call, signature, self.backward) for call in calls])
        return self._sizes[kind]

    def _roles(self, signature: Signature) -> tuple[Role, ...]:
        """The roles worth looking at (see the top of the file)."""
        roles = signature.roles
        if self.fixed is not None or sum(axis.name not in self.data for axis in self.mesh.axes) < 2:
            return roles
        owned, work = self.analysis.owned, self.kinds.work.get(layer_of(signature.op.module_path), {})
        ranked = sorted((role for role in roles if role.atom in owned), key=lambda role: -work.get(role.atom, 0.0))
        demanded = {pick for demand in self.demands.get(signature.op.name, ()) for pick in demand.picks}
        allowed = [*ranked[:MOST], *(role for role in ranked if role.name in demanded)]
        return tuple(role for role in roles if role.atom not in owned or role in allowed)

    def _roles_of(self, op: Op, signature: Signature) -> tuple[Role, ...]:
        return signature.roles if op.name in self.free else self._roles(signature)

    def left_out(self) -> Iterator[str]:
        """The splits that are not tried, in words: the pruning that may lose something."""
        count: dict[str, int] = {}
        many = Counter(self.kinds.of.values())
        for kind, op in enumerate(self.kinds.first):
            signature = self.analysis.signatures[op.name]
            if len(self._roles(signature)) < len(signature.roles):
                target = op.target.split(".")[1] if "." in op.target else op.target
                count[target] = count.get(target, 0) + many[kind]
        if count:
            kinds = ", ".join([*sorted(count, key=lambda target: -count[target])[:4], *["..."][: len(count) > 4]])
            yield (
                f"on meshes of several axes {sum(count.values())} ops ({kinds}) were looked at with the {MOST} labels "
                "of parameters that have the most arithmetic, and not with all"
            )

    def _make(self, op: Op) -> ChoiceSpace:
        if op.name not in self._measured:
            self._measured[op.name] = self._measure(op)
        space, sends = self._measured[op.name]
        if not any(sends):
            return space
        used = space.used.copy()
        for state, sent in enumerate(sends):
            for message in sent:
                how = "BESIDE" if message.overlapped else "SEND"
                at = Resource[f"{how}_{message.when.upper()}"]
                used[state, at] += self.moves.waited(*message[:3])
        return replace(space, used=used)

    def _measure(self, op: Op) -> Measured:
        """The space of an op without what it sends, and that."""
        signature = self.analysis.signatures[op.name]
        choices: list[Mapping[str, str]] = []
        layouts_of: list[tuple[tuple[Layout, ...], tuple[Layout, ...]]] = []
        seen: set[tuple[tuple[Layout, ...], tuple[Layout, ...]]] = set()
        for choice in self._choices(op, signature):
            try:
                layouts = signature.layouts(choice, self.mesh)
            except PlanError:
                if self.fixed is not None and op.name not in self.free:
                    raise
                continue  # two axes on one label whose sizes do not divide
            if layouts not in seen:
                seen.add(layouts)
                choices.append(choice)
                layouts_of.append(layouts)
        used, sends = np.zeros((len(choices), COUNT)), []
        for state, choice in enumerate(choices):
            call = local_call(signature, choice, self.mesh, self.training)
            time = op_time(call, self.moves.device)
            used[state, Resource.COMPUTE_FORWARD] = time.forward
            used[state, Resource.COMPUTE_BACKWARD] = time.backward if self.backward else 0.0
            every = algorithm_collectives(signature, choice, self.mesh, self.training)
            sends.append(tuple(sent for sent in every if sent.when == "forward" or self.backward))
            if self.backward:
                _, outputs, extra = saved_bytes(call, signature)
                own = sum(output.bytes for output, saved in zip(call.outputs, outputs, strict=True) if saved)
                used[state, Resource.KEPT] = 0.0 if self.kinds.saves_nothing(op) else extra + own
                again = self.kinds.runs_again(op)
                used[state, Resource.COMPUTE_BACKWARD] += time.forward if again else 0.0
        space = ChoiceSpace(
            choices=tuple(choices),
            inputs=tuple(tuple(inputs[at] for inputs, _ in layouts_of) for at in range(len(op.inputs))),
            outputs=tuple(tuple(outputs[at] for _, outputs in layouts_of) for at in range(len(op.outputs))),
            used=used,
        )
        return space, tuple(sends)

    def _choices(self, op: Op, signature: Signature) -> Iterable[Mapping[str, str]]:
        if self.fixed is not None:
            yield self.fixed.get(op.name, {})
            if op.name not in self.free:
                return
        lists = [self._on(op, signature, axis) for axis in self.mesh.axes]
        demands = self.demands.get(op.name, ())
        for picked in product(*lists):
            choice = {axis.name: pick for axis, pick in zip(self.mesh.axes, picked, strict=True) if pick}
            met = all(demand.is_met(choice, self.mesh.names) for demand in demands)
            roles = [signature.picked(pick) for pick in picked]
            routed = sum(role is not None and signature.is_split_by("experts", role) for role in roles)
            if met and routed < 2 and self._shared_evenly(roles):  # tokens are sent to experts along one axis only
                yield choice

    def _shared_evenly(self, roles: list[Role | None]) -> bool:
        """Whether axes that take the same atom divide it between them: a rest would leave devices with nothing."""
        parts: dict[int, list[int]] = {}
        for axis, role in zip(self.mesh.axes, roles, strict=True):
            if role is not None:
                parts.setdefault(role.atom, []).append(axis.size)
        sizes = self.analysis.atoms.size
        return all(
            len(axis_sizes) == 1 or sizes[atom] % math.prod(axis_sizes) == 0 for atom, axis_sizes in parts.items()
        )

    def _on(self, op: Op, signature: Signature, axis: Axis) -> list[str]:
        """What an op may do on one axis; "" is not split."""
        batch, even = self.analysis.batch, [role for role in self._roles_of(op, signature) if role.fills(axis.size)]
        split = [role for role in even if role.atom not in batch or role.size % axis.size == 0]
        roles = [signature.striped(role, axis.size).name for role in split]
        data = axis.name in self.data and op.name not in self.free
        if data:
            roles = [role.name for role in even if role.atom in batch and role.size % axis.size == 0][:1]
        unsplit_demanded = any(
            "" in demand.picks and demand.axis in (None, axis.name) for demand in self.demands.get(op.name, ())
        )
        picks = [*([] if data and roles and not unsplit_demanded else [""]), *roles]
        if op.name in self.kinds.lean or (not data and self._is_shared_within_node(op)):
            picks.append(FAN)
        picks += [f"{PASS_PARTIAL}{group}" for group in self._rows(op, signature)]
        known = self.allowed.get(op.name, {}).get(axis.name)
        allowed = picks if known is None else [*map(without_stripes, known)]
        return [pick for pick in picks if pick in allowed or without_stripes(pick) in allowed] or picks

    def _is_shared_within_node(self, op: Op) -> bool:
        """Whether an op makes keys or values of fewer heads than a node has devices, some of which compute the same."""
        devices = max(group.node.devices for group in self.moves.cluster.groups)
        return self.kinds.grouped.get(op.name, devices) < min(devices, self.mesh.size)

    def _rows(self, op: Op, signature: Signature) -> Iterable[int]:
        """Groups of linear inputs through which a pending sum may pass and gets smaller, or is a number anyway."""
        values = self.analysis.graph.values
        elements = sum(values[name].elements for name in op.outputs)
        if not any(values[name].gradient for name in op.outputs):
            return
        for group in signature.linear_groups():
            members = [values[bound.value] for bound in signature.inputs if bound.linear == group]
            others = [values[bound.value] for bound in signature.inputs if bound.linear != group]
            if elements > 1 and any(value.gradient for value in others):
                continue
            if elements == 1 or elements < sum(value.elements for value in members) / 2:
                yield group

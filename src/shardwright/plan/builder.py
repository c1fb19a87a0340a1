"""A plan under construction: what a policy writes to.

    builder.ops                        the ops that can be split, in order
    builder.roles(op)                  how an op can be split
    builder.split(op, axis, role)      split it so
    builder.replicate(op, axis)        don't
    builder.store(key, axis, kind)     how a parameter is stored
    builder.recompute(path)            activation checkpointing of a module
    builder.chunk_loss(op, chunks)     make the logits of a loss in so many chunks of rows
    builder.note(text)                 something the user should know

A policy decides about the ops it cares about. `finish` then settles the rest: pending
sums pass through linear ops where that saves a reduction, and ops that are not split return
their gradients as pending sums where all their readers do and it costs no all_reduce.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from ..errors import LayoutError, PlanError
from ..ir import Graph, Op
from ..ir.recompute import faults_of, layers_of, regions_of
from ..layout import INVARIANT, MB, REPLICATE, Axis, Layout, Mesh, Partial, Placement, fills_every_chunk
from ..lower.chunked_loss import check_chunked, faults_of_losses
from ..rules import FAN, PASS_PARTIAL, STRIPED, Analysis, Role, Rule, Signature, analyse, is_random, without_stripes
from ..storage import Storage, parse_storage
from .chunking import resolved_chunks
from .plan import Plan, PlanStage
from .strings import outer_of


class PlanBuilder:
    """Choices for the ops of one graph on one mesh. With `lenient`, what an axis can't split stays replicated on it."""

    def __init__(self, graph: Graph, mesh: Mesh, analysis: Analysis | None = None, *, lenient: bool = False) -> None:
        self.graph = graph
        self.mesh, self.lenient = mesh, lenient
        self.analysis = analysis or analyse(graph)
        self.choices: dict[str, dict[str, str]] = {}
        self.storage: dict[str, dict[str, int | str]] = {}
        self.recomputed: list[str] = []
        self.chunked: dict[str, int | None] = {}
        self.unsplit: set[tuple[str, str]] = set()  # (op, axis): decided, and `finish` leaves it so
        self.foreseen: dict[str, frozenset[str]] = {}  # by axis: values whose sums over it are known beforehand
        self.striped = True  # stripes balance causal attention
        self.notes: list[str] = list(graph.notes)

    @property
    def ops(self) -> tuple[Op, ...]:
        """The ops that are worth splitting: constants are computed once, replicated."""
        return self.analysis.live

    def signature(self, op: Op) -> Signature:
        return self.analysis.signatures[op.name]

    def roles(self, op: Op) -> tuple[Role, ...]:
        return self.signature(op).roles

    def chosen(self, op: Op, axis: Axis) -> str | None:
        return self.choices.get(op.name, {}).get(axis.name)

    def is_open(self, op: Op, axis: Axis) -> bool:
        """Whether nobody has decided what an op does on an axis."""
        return self.chosen(op, axis) is None and (op.name, axis.name) not in self.unsplit

    def role_on(self, op: Op, axis: Axis) -> Role | None:
        """The role that an op is split on along an axis."""
        return self.signature(op).picked(self.chosen(op, axis))

    def left_of(self, op: Op, axis: Axis, atom: int) -> int:
        """How much of an atom the other axes leave of an op."""
        size = self.analysis.atoms.size[atom]
        for other in self.mesh.axes:
            role = self.role_on(op, other) if other != axis else None
            size = size // other.size if role is not None and role.atom == atom else size
        return size

    def divides(self, op: Op, axis: Axis, role: Role) -> bool:
        """Whether the sizes of an op allow a split beside what other axes do, so that every device gets something."""
        if not fills_every_chunk(self.left_of(op, axis, role.atom), axis.size):
            return False
        try:
            self.signature(op).layouts({**self.choices.get(op.name, {}), axis.name: role.name}, self.mesh)
        except PlanError:
            return False
        return True

    def split(self, op: Op, axis: Axis, role: Role) -> None:
        """Split an op on a role along an axis."""
        if self.lenient and not role.fills(axis.size):
            return
        if role.size < axis.size:
            raise PlanError(
                f"{op}: {axis.name}={axis.size} is larger than {role.name}, which has {role.size}; use a smaller axis"
            )
        if not role.fills(axis.size):
            raise PlanError(
                f"{op}: {role.name} has {role.size}, which {axis.name}={axis.size} shares so that the last device gets "
                "nothing; use another axis size"
            )
        self.choices.setdefault(op.name, {})[axis.name] = role.name
        self.unsplit.discard((op.name, axis.name))

    def replicate(self, op: Op, axis: Axis) -> None:
        """Don't split an op along an axis, whatever is around it."""
        self.choices.get(op.name, {}).pop(axis.name, None)
        self.unsplit.add((op.name, axis.name))

    def store(self, key: str, axis: Axis, kind: int | str) -> None:
        """Shard a parameter's optimizer state (1), gradient too (2), or all of it (3) along an axis (see `storage`)."""
        self.storage.setdefault(key, {})[axis.name] = kind

    def recompute(self, path: str) -> None:
        """Activation checkpointing: save only the inputs of a module ("blocks.3", "blocks.3.mlp") for backward."""
        if path not in self.recomputed:
            self.recomputed.append(path)

    def recompute_layers(self) -> None:
        """Recompute every repeated layer that can be."""
        layers = layers_of(self.graph)
        if not layers:
            raise PlanError("'recompute' is for repeated layers, and the model has none; name modules in the plan file")
        for path in layers:
            faults = faults_of(self.graph, path)
            for why in faults:
                self.note(f"{path} is not recomputed by the plan, {why}")
            if not faults:
                self.recompute(path)

    def chunk_loss(self, op: Op | str, chunks: int | None = None) -> None:
        """Make the logits of a cross entropy in so many chunks of rows; None: as many as is usual for its rows."""
        self.chunked[op if isinstance(op, str) else op.name] = chunks

    def chunk_losses(self, chunks: int | None = None) -> None:
        """Make the logits of every loss in chunks whose logits nothing else reads."""
        faults = faults_of_losses(self.graph)
        if not faults or all(faults.values()):
            why = "; ".join(f"{self.graph.by_name[name]} can't be, {fault}" for name, fault in faults.items())
            raise PlanError(f"'chunked_loss' is for cross entropies: {why or 'the model has none'}")
        for name, fault in faults.items():
            if fault is None:
                self.chunk_loss(name, chunks)
            else:
                self.note(f"{self.graph.by_name[name]} is not chunked: {fault}")

    def note(self, text: str) -> None:
        self.notes.append(text)

    def role_among(self, op: Op, axis: Axis, atoms: Iterable[int]) -> Role | None:
        """The role of an op that takes one of some atoms; of several, the one its inputs already have."""
        wanted = set(atoms)
        roles = [role for role in self.roles(op) if role.atom in wanted]
        if len(roles) < 2:
            return roles[0] if roles else None
        return max(roles, key=lambda role: self._agreement(op, axis, role))

    def _agreement(self, op: Op, axis: Axis, role: Role) -> int:
        score = 0
        for bound in self.signature(op).inputs:
            producer = self.graph.producer.get(bound.value)
            if producer is None or axis.name not in self.choices.get(producer.name, {}):
                continue
            shard = self.output_layout(producer, bound.value).shard_of(axis.name)
            score += shard is not None and shard[0] == bound.dim_of(role.label)
        return score

    def output_layout(self, op: Op, value: str) -> Layout:
        _, outputs = self.signature(op).layouts(self.choices.get(op.name, {}), self.mesh)
        return outputs[op.outputs.index(value)]

    def finish(self, policy: str, cluster: str = "", *, settle: bool = True) -> Plan:
        """Settle what no policy decided (unless everything is), and make the plan."""
        for axis in self.mesh.axes:
            self._stripe(axis)
        for axis in self.mesh.axes if settle else ():
            self._pass_partial(axis)
            self._fan(axis)
        for op in self.ops:
            if is_random(op):
                self.note(f"{op} draws random numbers, which all devices draw alike and whole")
            elif self.signature(op).rule is None:
                why = self.signature(op).why
                self.note(f"{op} has no rule and runs replicated on every device{f': {why}' if why else ''}")
        self._note_probed()
        if self.storage:  # given for every parameter, so that a star in the file takes in none that is left alone
            for parameter in self.graph.parameters:
                self.storage.setdefault(parameter.key, {})
        regions_of(self.graph, self.recomputed)  # refuses what can't be
        check_chunked(self.graph, {name: 1 if chunks is None else chunks for name, chunks in self.chunked.items()})
        stage = PlanStage(
            mesh=self.mesh,
            choices={op.name: self.choices.get(op.name, {}) for op in self.graph.ops},
            recompute=tuple(self.recomputed),
            chunked_loss=resolved_chunks(self.analysis, self.chunked, self.choices, self.mesh),
        )
        return Plan(
            model=self.graph.name,
            policy=policy,
            cluster=cluster,
            fingerprints={self.graph.entry: self.graph.fingerprint},
            entries={self.graph.entry: (stage,)},
            storage=self._stored(),
            notes=tuple(dict.fromkeys(self.notes)),
        )

    def _stripe(self, axis: Axis) -> None:
        """Shard the sequence of causal attention in stripes where an axis splits it, so that ranks see equally much.

        All ops take part, so that no reshard is between them; if the sizes of one don't allow it, none does. Where
        attention is not split on the sequence, contiguous shards do.
        """
        roles = {op.name: self.role_on(op, axis) for op in self.ops}
        triangular = {
            name: role
            for name, role in roles.items()
            if role is not None and self.analysis.signatures[name].is_triangular(role)
        }
        signatures = self.analysis.signatures
        attended = [name for name, role in triangular.items() if role.label in _rule(signatures[name]).triangular]
        plain = {name: without_stripes(role.name) for name, role in triangular.items()}
        striped = {name: f"{STRIPED}{role}" for name, role in plain.items()} if attended and self.striped else plain
        try:
            for name, choice in striped.items():
                signatures[name].layouts({**self.choices[name], axis.name: choice}, self.mesh)
        except PlanError:
            striped = plain
            self.note(
                f"the sequence of causal attention ({triangular[attended[0]].size}) does not divide by "
                f"{axis.name}={axis.size}, so its shards are contiguous, and the last device has the most to do"
            )
        for name, choice in striped.items():
            self.choices[name][axis.name] = choice

    def _stored(self) -> dict[str, Storage]:
        try:
            return {key: parse_storage(kinds) for key, kinds in self.storage.items()}
        except LayoutError as error:
            raise PlanError(f"a parameter can't be stored as the plan asks: {error}") from error

    def _note_probed(self) -> None:
        """Say which rules nobody wrote, once for each kind of op and rule."""
        count: dict[tuple[str, str], int] = {}
        for op in self.ops:
            rule = self.signature(op).rule
            if rule is not None and rule.probed and not self.roles(op):
                self.note(f"{op} runs replicated on every device: it was probed, and no split of it recombines")
            elif rule is not None and rule.probed:
                count[op.target, rule.text] = count.get((op.target, rule.text), 0) + 1
        for (target, text), number in count.items():
            have = "1 op has" if number == 1 else f"{number} ops have"
            self.note(f"{have} a rule found by probing: {target}: {text}")

    def _pass_partial(self, axis: Axis) -> None:
        """Let pending sums through linear ops where all summands are pending, and nothing else needs the sum."""
        partial: set[str] = set()
        sinks, foreseen = set(self.graph.sinks()), self.foreseen.get(axis.name, frozenset())
        for op in self.graph.ops:
            if self.is_open(op, axis):
                group = self._open_group(op, partial, sinks, axis)
                if group is not None:
                    self.choices.setdefault(op.name, {})[axis.name] = f"{PASS_PARTIAL}{group}"
            choice = self.chosen(op, axis)
            if choice is not None:
                _, outputs = self.signature(op).layouts({axis.name: choice}, self.mesh)
                partial.update(
                    name
                    for name, out in zip(op.outputs, outputs, strict=True)
                    if isinstance(out.placement(axis.name), Partial) and name not in foreseen
                )

    def _open_group(self, op: Op, partial: set[str], sinks: set[str], axis: Axis) -> int | None:
        values = self.graph.values
        signature = self.signature(op)
        if not any(name in partial for name in op.inputs):
            return None
        if axis.name != MB and not any(values[name].gradient for name in op.outputs):  # in time there is no other way
            return None
        for group in signature.linear_groups():
            members = [bound.value for bound in signature.inputs if bound.linear == group]
            others = [bound.value for bound in signature.inputs if bound.linear != group]
            small = all(values[name].elements == 1 for name in (*members, *op.outputs))
            if not any(name in partial for name in members) or any(name in partial for name in others):
                continue
            if not all(name in partial for name in members) and not small:
                continue
            if any(values[name].gradient for name in others) and not small:
                continue
            if (
                any(name in sinks or len(self.graph.users[name]) > 1 for name in members if name in partial)
                and not small
            ):
                continue
            if sum(values[name].elements for name in op.outputs) <= sum(values[name].elements for name in members):
                return group
        return None

    def _fan(self, axis: Axis) -> None:
        """Ops that are not split may return gradients as pending sums, where all readers of their results do.

        For those that depend on parameters only, the parameter's own sync sums them. Others must not cost a sum: what
        they read is summed over the axis anyway, for another op that reads it, or over the axis around this one.
        """
        lean, sinks = {op.name for op in self.analysis.lean}, set(self.graph.sinks())
        unsplit = [op for op in self.graph.ops if self.is_open(op, axis) and self._has_gradient(op)]
        candidates = {op.name: op for op in unsplit if op.name not in lean and axis.name != MB}
        for _ in tuple(candidates):
            handed: dict[str, Op] = {}
            for op in reversed(candidates.values()):
                if all(self._handed_back(name, axis, sinks, handed, allow_shard=True) for name in op.outputs):
                    handed[op.name] = op
            remaining = self._summed_anyway(tuple(reversed(handed.values())), axis, lean)
            if len(remaining) == len(candidates):
                break
            candidates = remaining  # an op that drops out may take others with it that relied on it
        for op in candidates.values():
            self.choices.setdefault(op.name, {})[axis.name] = FAN
        for op in reversed(unsplit):
            if op.name in lean and all(
                self._handed_back(name, axis, sinks, {}, allow_shard=False) for name in op.outputs
            ):
                self.choices.setdefault(op.name, {})[axis.name] = FAN

    def _has_gradient(self, op: Op) -> bool:
        return any(self.graph.values[name].gradient for name in op.outputs)

    def _handed_back(
        self, value: str, axis: Axis, sinks: set[str], handed: Mapping[str, Op], *, allow_shard: bool
    ) -> bool:
        """Whether every use of a value returns a pending sum as its gradient; with `allow_shard`, or a shard of it."""
        if not self.graph.values[value].gradient:
            return True
        if value in sinks or not self.graph.users[value]:
            return False
        for op, index in self.graph.users[value]:
            if op.name in handed or not self._has_gradient(op):
                continue
            placement = self._read(op, index, axis)
            if placement != REPLICATE and not (placement is None and allow_shard):
                return False
        return True

    def _read(self, op: Op, index: int, axis: Axis) -> Placement | None:
        """How an op reads an input along an axis; None if the axis shards it."""
        choice = self.chosen(op, axis)
        if choice is None:
            return INVARIANT
        inputs, _ = self.signature(op).layouts({axis.name: choice}, self.mesh)
        return inputs[index].placement(axis.name)

    def _summed_anyway(self, ops: Sequence[Op], axis: Axis, lean: Collection[str]) -> dict[str, Op]:
        """The ops of some, in order, for which no sum is made if they hand gradients back in parts."""
        graph, outer = self.graph, outer_of(axis.name, self.mesh)
        axes = (axis,) if outer is None else (axis, outer)
        free_ops: dict[str, Op] = {}

        def summed(value: str) -> bool:
            producer = graph.producer.get(value)
            if producer is not None and (producer.name in free_ops or producer.name in lean):
                return True
            return any(self._read(user, at, along) == REPLICATE for user, at in graph.users[value] for along in axes)

        for op in ops:
            differentiated = [
                name for name in op.inputs if graph.values[name].gradient and graph.parameter_of(name) is None
            ]
            if differentiated and all(summed(name) for name in differentiated):
                free_ops[op.name] = op
        return free_ops


def _rule(signature: Signature) -> Rule:
    assert signature.rule is not None  # it has roles
    return signature.rule

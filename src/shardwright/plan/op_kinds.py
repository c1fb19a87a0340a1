"""Ops that differ in nothing but their names, as those of equal layers do, are of one kind.

Everything the search computes about an op it computes once for its kind, whatever the mesh.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import cached_property

from ..cost import TrainingSetup, flops, is_matmul, local_call
from ..cost.saved_for_backward import saved_bytes
from ..ir import Op
from ..ir.paths import layer_of
from ..layout import Mesh
from ..ops import spec_of
from ..ops.user_calls import OPAQUE
from ..rules import Analysis
from .chunking import ChunkCounts, heads_of

ALONE = Mesh(axes=())


class OpKinds:
    """The kinds of a graph's ops, by number; the first op of a kind stands for all."""

    def __init__(
        self, analysis: Analysis, training: TrainingSetup, decisions: Mapping[str, object] | None = None,
        chunked: ChunkCounts | None = None,
    ) -> None:  # fmt: skip
        """`decisions` is what somebody has decided about some ops: ops that differ in it are of different kinds.

        `chunked`: losses whose logits are made in chunks. What makes them runs again in backward, and saves nothing.
        """
        self.analysis, self.training, self.graph = analysis, training, analysis.graph
        self.decisions = decisions or {}
        self.chunked = chunked or {}
        heads = heads_of(self.graph, self.chunked).values()
        self.in_chunks = {op.name for head in heads for op in head.ops}
        self.backward = analysis.graph.entry.startswith("train")
        self.live, self.lean = analysis.live, frozenset(op.name for op in analysis.lean)
        self.of: dict[str, int] = {}
        self.first: list[Op] = []
        self._keeps: dict[int, tuple[tuple[bool, ...], tuple[bool, ...]]] = {}
        numbers: dict[Hashable, int] = {}
        for op in self.live:
            kind = numbers.setdefault(self._key(op), len(numbers))
            self.of[op.name] = kind
            if kind == len(self.first):
                self.first.append(op)
            analysis.signatures[op.name].is_like(analysis.signatures[self.first[kind].name])

    def _key(self, op: Op) -> Hashable:
        signature = self.analysis.signatures[op.name]
        blocks, dims, graph = self.analysis.atoms.blocks, self.analysis.dims, self.graph
        shapes = []
        for name in (*op.inputs, *op.outputs):
            value, parameter = graph.values[name], graph.parameter_of(name)
            shapes.append((value.shape, value.dtype, value.gradient, parameter and parameter.trainable))
        every = [dim for name in op.inputs for dim in dims[name]]
        roles = [
            (role.name, role.size, signature.is_triangular(role), *(blocks(dim, role.atom) for dim in every))
            for role in signature.roles
        ]
        arguments = [
            item for item in op.arguments if op.target != OPAQUE or item[0] not in ("op_key", "names", "state")
        ]
        rule = signature.rule.text if signature.rule else ""
        decision = repr(self.decisions.get(op.name)) if self.decisions else ""
        flags = (
            op.no_grad,
            op.region is None,
            op.name in self.lean,
            op.name in self.in_chunks,
            op.name in self.grouped,
        )
        return op.target, repr(arguments), rule, tuple(shapes), tuple(roles), decision, flags

    @cached_property
    def grouped(self) -> dict[str, int]:
        """The ops that make keys and values of grouped heads, from their matmuls on, with the number of those heads."""
        heads: dict[str, int] = {}
        values, signatures = self.graph.values, self.analysis.signatures
        for op in self.live:
            signature = signatures[op.name]
            if not any(signature.is_split_by("ring", role) for role in signature.roles):
                continue
            queries, *rest = [values[name].shape for name in op.inputs[:3]]
            waiting = [name for name, shape in zip(op.inputs[1:3], rest, strict=True) if shape[-3] < queries[-3]]
            while waiting:
                maker = self.graph.producer.get(name := waiting.pop())
                if maker is not None and values[name].gradient and maker.name not in heads:
                    heads[maker.name] = min(shape[-3] for shape in rest)
                    waiting += () if is_matmul(signatures[maker.name]) else maker.inputs
        return heads

    @cached_property
    def layer_share(self) -> float:
        """The part of all layers that one of them is."""
        return 1.0 / max(1, len({layer_of(op.module_path) for op in self.live} - {""}))

    @cached_property
    def work(self) -> dict[str, dict[int, float]]:
        """In each layer, for each atom of a parameter, the FLOPs of the matmuls that can be split on it."""
        work: dict[str, dict[int, float]] = {}
        for op in self.live:
            signature = self.analysis.signatures[op.name]
            if is_matmul(signature):
                sums = work.setdefault(layer_of(op.module_path), {})
                for atom in {role.atom for role in signature.roles} & self.analysis.owned:
                    sums[atom] = sums.get(atom, 0.0) + flops(signature)
        return work

    def keeps(self, kind: int) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        """Which inputs and which outputs of an op are saved for backward."""
        if kind not in self._keeps:
            op = self.first[kind]
            signature = self.analysis.signatures[op.name]
            if self.backward and not self.saves_nothing(op):
                inputs, outputs, _ = saved_bytes(local_call(signature, {}, ALONE, self.training), signature)
            else:
                inputs, outputs = (False,) * len(op.inputs), (False,) * len(op.outputs)
            self._keeps[kind] = inputs, outputs
        return self._keeps[kind]

    def saves_nothing(self, op: Op) -> bool:
        """Whether an op is of logits in chunks: of these, the matmul alone saves what it reads."""
        return op.name in self.in_chunks and not is_matmul(self.analysis.signatures[op.name])

    def runs_again(self, op: Op) -> bool:
        """Whether an op makes logits in chunks, and so makes them in backward too."""
        return op.name in self.in_chunks and op.name not in self.chunked

    @cached_property
    def wanted(self) -> dict[str, bool]:
        """Whether backward needs a value, itself or through a view of it."""
        needed: dict[str, bool] = dict.fromkeys(self.graph.values, False)
        for op in reversed(self.live):
            through = aliases_input(op) and any(needed[name] for name in op.outputs)
            saved_inputs, _ = self.keeps(self.of[op.name])
            for index, name in enumerate(op.inputs):
                needed[name] = needed[name] or saved_inputs[index] or (index == 0 and through)
        return needed

    def reads_kept(self, op: Op, index: int) -> bool:
        """Whether backward needs what an op reads."""
        if self.keeps(self.of[op.name])[0][index]:
            return True
        return index == 0 and aliases_input(op) and any(self.wanted[name] for name in op.outputs)


def aliases_input(op: Op) -> bool:
    """Whether what an op makes lies in the storage of its input."""
    return spec_of(op.target).view is not None

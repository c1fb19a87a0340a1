"""Which ops share a line of generated code.

q = q.view(b, S, h, E).transpose(1, 2)             a view that only the next view reads has no name
bn = self.batch_norm(conv, self.bn, momentum=0.1)  a batch norm in training updates the buffers of its module
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ..ir import Op
from ..lower import LoweredProgram
from ..ops.norms import module_of_batch_norm
from ..ops.views import follows_view
from .calls import call_text
from .layers import Invoke, Item, LayerLoop
from .sizes import SizeNames

Updates = Mapping[str, tuple[str, ...]]
"""Values, and the keys of the buffers and parameters that they are to be written to where they are made."""


@dataclass(frozen=True, eq=False)
class OpLine:
    """One line: an op, a chain of views, or a batch norm with the count of batches before it."""

    ops: tuple[Op, ...]
    module: str | None = None  # of a batch norm whose buffers the line updates

    @property
    def inputs(self) -> tuple[str, ...]:
        inside = {name for op in self.ops for name in op.outputs}
        return tuple(name for op in self.ops for name in op.inputs if name not in inside)

    @property
    def outputs(self) -> tuple[str, ...]:
        """What has a name after it."""
        return self.ops[-1].outputs if self.module is None else self.ops[-1].outputs[:1]


Line = OpLine | Invoke | LayerLoop


class Grouping:
    """Puts the ops of a program on lines."""

    def __init__(self, program: LoweredProgram, updates: Updates, sizes: SizeNames) -> None:
        self.updates, self.sizes = updates, sizes
        self.keys = {key: spec.value for spec in program.parameters for key in spec.keys}
        self.keys |= {buffer.key: buffer.value for buffer in program.graph.buffers}
        self.reads = Counter(name for op in program.ops for name in op.inputs)
        self.reads.update(program.needed())
        self.reads.update(early.source for early in program.early)

    def lines(self, items: Sequence[Item], outputs: Collection[str]) -> list[Line]:
        """The items as lines; `outputs` are read by whoever called for them."""
        lines: list[Line] = []
        for item in items:
            before = lines[-1] if lines else None
            if not isinstance(item, Op):
                lines.append(item)
            elif isinstance(before, OpLine) and before.module is None:
                lines[-1:] = self._joined(before, item, outputs) or [before, OpLine((item,))]
            else:
                lines.append(OpLine((item,)))
        return lines

    def _joined(self, line: OpLine, op: Op, outputs: Collection[str]) -> list[Line]:
        last = line.ops[-1]
        value = last.outputs[0]
        if not _runs_alike(last, op):
            return []
        alone = self.reads[value] == 1 and value not in outputs
        if alone and follows_view(last, op) and self.is_method(op):
            return [OpLine((*line.ops, op))]
        module = self._batch_norm(last, op, outputs) if len(line.ops) == 1 else None
        return [] if module is None else [OpLine((last, op), module)]

    def is_method(self, op: Op) -> bool:
        """Whether it prints behind what it reads; some overloads of views don't."""
        return call_text(op, {0: "x"}, self.sizes, {}).startswith("x")

    def _batch_norm(self, count: Op, norm: Op, outputs: Collection[str]) -> str | None:
        """The module of a batch norm that has its buffers to itself."""
        module = module_of_batch_norm(count, norm, self.keys, self.updates)
        if module is None:
            return None
        written = {"num_batches_tracked": count.outputs[0], "running_mean": norm.outputs[1]}
        written["running_var"] = norm.outputs[2]
        for name, value in written.items():
            alone = self.reads[value] == 1 and value not in outputs  # the one is the update
            if self.updates.get(value) != (f"{module}.{name}",) or not alone:
                return None
        return module


def _runs_alike(a: Op, b: Op) -> bool:
    return (a.region, a.no_grad, a.autocast, a.draws) == (b.region, b.no_grad, b.autocast, b.draws)

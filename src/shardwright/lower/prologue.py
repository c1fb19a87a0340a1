"""Microbatches: what all of them need is computed before the first, and what they can't have is refused.

No rank can communicate over the axis in time. But what depends on the model's inputs alone (how many labels count, the
sum of a mask) can be computed for every microbatch before the first forward, and reduced. Such ops become
the program's prologue, and forward reads what it found.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

from ..errors import LoweringError, raise_all
from ..ir import Op, Value
from ..layout import MB, Reduction, replicated
from ..ops.contexts import GROUP_ARGUMENTS
from ..ops.losses import COUNTED
from ..reshard import COLLECTIVES
from .label_counts import count_op, from_inputs, with_label_count
from .program import LoweredProgram, PrologueValue
from .tidy import prune

REDUCTIONS = ("all_reduce", "all_reduce_to_r", "reduce")


def prologue(program: LoweredProgram) -> LoweredProgram:
    """Counts of labels and reductions over time, of inputs alone, are taken before the first forward."""
    if MB not in program.mesh.sizes:
        return program
    work = _Prologue(program)
    for op in program.body:
        samples = op.argument("samples")
        if op.target in COUNTED and samples and MB in samples and op.argument("reduction", 1) == 1:
            work.count(op)
        elif op.target.removeprefix("comm.") in REDUCTIONS and MB in op.argument("axes"):
            work.reduce(op)
    return work.done()


class _Prologue:
    """Gathers the ops that go before."""

    def __init__(self, program: LoweredProgram) -> None:
        self.program = program
        self.makers = {name: op for op in program.body for name in op.outputs}
        self.stored = {holding.value for holding in program.parameters} | program.received
        self.values, self.layouts = dict(program.values), dict(program.layouts)
        self.first: dict[str, Op] = {}
        self.early: list[PrologueValue] = []
        self.changed: dict[str, Op | None] = {}

    def count(self, op: Op) -> None:
        """The mean of a loss divides by the labels that count in all microbatches."""
        counting = count_op(op, "runtime.count_labels")
        if not self._take(counting.inputs):
            return
        (name,) = counting.outputs
        inputs = tuple(self._early(source) for source in counting.inputs)
        self.first[counting.name] = replace(counting, inputs=inputs, outputs=(f"{name}@early",))
        for counted in (name, f"{name}@early"):
            self.values[counted], self.layouts[counted] = Value(name=counted, shape=(), dtype="int64"), replicated(0)
        axes = tuple(axis for axis in op.argument("samples") if axis != MB)
        self.early.append(PrologueValue(value=name, source=f"{name}@early", axes=axes))
        self.changed[op.name] = with_label_count(op, name, samples=())

    def reduce(self, op: Op) -> None:
        """A sum (or max, or min) over time of what comes from inputs alone, and hands no gradient back to them."""
        if self.values[op.inputs[0]].gradient or not self._take(op.inputs):
            return
        axes = tuple(axis for axis in op.argument("axes") if axis != MB)
        how = cast(Reduction, op.argument("op", "sum"))
        self.early.append(PrologueValue(value=op.outputs[0], source=self._early(op.inputs[0]), how=how, axes=axes))
        self.changed[op.name] = None

    def _take(self, sources: tuple[str, ...]) -> bool:
        """Have these values made in the prologue, if they come from inputs alone."""
        chains = [from_inputs(source, self.makers, self.stored) for source in sources]
        if any(chain is None for chain in chains):
            return False
        for op in (op for chain in chains for op in chain or ()):
            again = replace(op, inputs=tuple(map(self._early, op.inputs)), outputs=tuple(map(self._early, op.outputs)))
            self.first.setdefault(op.name, again)
            for name in op.outputs:
                self.values[self._early(name)] = replace(self.values[name], name=self._early(name))
                self.layouts[self._early(name)] = self.layouts[name]
        return True

    def _early(self, name: str) -> str:
        """The prologue's name for a value that an op makes; inputs and buffers have theirs."""
        return f"{name}@early" if name in self.makers else name

    def done(self) -> LoweredProgram:
        body = tuple(self.changed.get(op.name, op) for op in self.program.body)
        program = self.program.with_(
            prologue=tuple(self.first.values()),
            early=tuple(self.early),
            body=tuple(op for op in body if op is not None),
            values=self.values,
            layouts=self.layouts,
        )
        return prune(program)  # what only the prologue needs


def check_time(program: LoweredProgram) -> LoweredProgram:
    """Refuse ops that would have to see other microbatches."""
    if MB in program.mesh.sizes:
        raise_all(
            LoweringError,
            "the batch can't be cut into microbatches, since these need the whole of it (use "
            'PipelineOptions(microbatches=1), or semantics="local" there to train as if each microbatch were a batch '
            "of its own):",
            list(dict.fromkeys(_needing(program))),
        )
    return program


def _needing(program: LoweredProgram) -> Iterator[str]:
    for op in program.body:
        over = [op.argument(key) for key in GROUP_ARGUMENTS]
        if not any(MB in axes for axes in over if isinstance(axes, tuple)):
            continue
        kind = op.target.removeprefix("comm.")
        if op.target.startswith("comm."):
            forward, backward = COLLECTIVES[kind]
            if forward is None and (backward is None or not program.values[op.outputs[0]].gradient):
                continue
            yield str(program.graph.by_name.get(op.name.split(" < ")[0], op.name.split(" < ")[0]))
        else:  # an algorithm communicates to the other shards of its op, and these are other microbatches
            yield str(op)

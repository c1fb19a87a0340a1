"""A graph at small sizes: every shape and every size among the arguments, mapped together.

The shapes follow from the atoms of the real graph (`sizes.py`), and each op is called on tensors without memory to see
that it makes them. Where it does not, something was a size that the atoms know nothing of, and that is mended:

    the op makes another size of an atom that begins here (a convolution's rows)     that size is taken
    the op can't be called, or makes something else     its atoms keep their real sizes: those it looks along, then all

and everything starts again. An op that can't be called at its real sizes either is refused, with its line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..capture import Function
from ..capture.interpret import run_op
from ..errors import PlanError
from ..ir import Dtype, Graph, Op, Value, check
from ..rules import Analysis
from ..rules.kept import OPAQUE
from .arguments import Resized, resize_arguments
from .sizes import Sizes, leaves

FLOATS = {"float32": "float64", "float16": "float64", "bfloat16": "float64", "complex64": "complex128"}


class Unfit(Exception):
    """An op that can't be run at the sizes it has. `made` are the shapes that came out, if any."""

    def __init__(self, op: Op, why: str, made: Sequence[tuple[int, ...]] = ()) -> None:
        super().__init__(why)
        self.op, self.why, self.made = op, why, made


def widened(graph: Graph) -> Graph:
    """The same graph with all floats in double precision. Casts stay, and cast nothing."""

    def wide(held: object) -> object:
        if isinstance(held, Dtype):
            return Dtype(FLOATS.get(held, held))
        return tuple(wide(inner) for inner in held) if isinstance(held, tuple) else held

    values = {name: replace(held, dtype=FLOATS.get(held.dtype, held.dtype)) for name, held in graph.values.items()}
    ops = (
        replace(op, arguments=tuple((name, wide(held)) for name, held in op.arguments), autocast=None)
        for op in graph.ops
    )
    return replace(graph, values=values, ops=tuple(ops))


def shrunk(graph: Graph, sizes: Sizes) -> Graph:
    """The graph at small sizes, not yet tried."""
    facts = sizes.facts
    values = {name: replace(held, shape=sizes.shape(name)) for name, held in graph.values.items()}

    def shapes(names: Sequence[str], held: Mapping[str, Value]) -> tuple[tuple[int, ...], ...]:
        return tuple(held[name].shape for name in names)

    ops = tuple(
        resize_arguments(
            Resized(
                op=op, inputs=shapes(op.inputs, graph.values), outputs=shapes(op.outputs, graph.values),
                small_inputs=shapes(op.inputs, values), small_outputs=shapes(op.outputs, values),
            )
        )
        for op in graph.ops
    )  # fmt: skip
    batch = None if graph.batch is None else sizes.dim(facts.batch_dim)
    return replace(graph, values=values, ops=ops, batch=batch)


def fit(graph: Graph, sizes: Sizes, functions: Mapping[str, Function], attempt: Callable[[Graph], None]) -> Graph:
    """The graph at small sizes that it runs at, some of them mended. `attempt` runs it with values."""
    while True:
        small = check(shrunk(graph, sizes))
        try:
            try_shapes(small, functions)
            attempt(small)
        except Unfit as error:
            if not _mend(error, sizes):
                raise PlanError(
                    f"{error.op} can't be made smaller, and can't be run at its real sizes either: {error.why}; it has "
                    "to be tried on a machine that is large enough, with sw.verify"
                ) from error
            continue
        return small


def try_shapes(graph: Graph, functions: Mapping[str, Function]) -> None:
    """Call every op on tensors without memory; Unfit for the first that does not make what the graph says."""
    values = {
        name: torch.empty(held.shape, dtype=getattr(torch, held.dtype), device="meta")
        for name, held in graph.values.items()
    }
    for op in graph.ops:
        if op.target == OPAQUE:  # these are seen when they run
            continue
        expect(op, graph, run_fitting(op, [values[name] for name in op.inputs], functions))


def run_fitting(op: Op, given: Sequence[Tensor], functions: Mapping[str, Function]) -> tuple[Tensor, ...]:
    """What an op gives; Unfit if it can't be called."""
    try:
        with torch.device("meta") if given and given[0].is_meta else torch.device("cpu"):
            return run_op(op, given, functions)
    except (RuntimeError, IndexError, ValueError, TypeError, AssertionError, NotImplementedError) as error:
        raise Unfit(op, str(error).splitlines()[0] if str(error) else type(error).__name__) from error


def expect(op: Op, graph: Graph, made: Sequence[Tensor]) -> None:
    wanted = [graph.values[name].shape for name in op.outputs]
    shapes = [tuple(held.shape) for held in made]
    if shapes != wanted:
        raise Unfit(op, f"it makes {list(map(list, shapes))} where {list(map(list, wanted))} is expected", shapes)


def _mend(error: Unfit, sizes: Sizes) -> bool:
    """Change the sizes around an op that does not fit; whether there was anything to change."""
    facts, op = sizes.facts, error.op
    if len(error.made) == len(op.outputs) and _take(error, sizes):
        return True
    return sizes.keep(_looked_along(facts, op), str(op)) or sizes.keep(_all_atoms(facts, op), str(op))


def _take(error: Unfit, sizes: Sizes) -> bool:
    """Take over the sizes that an op makes, where they are of atoms that it begins."""
    facts, op = sizes.facts, error.op
    known = {atom for name in op.inputs for dim in facts.dims[name] for atom in leaves(facts, dim)}
    changed = False
    for name, shape in zip(op.outputs, error.made, strict=True):
        dims = facts.dims[name]
        if len(shape) != len(dims):
            return False
        for dim, size in zip(dims, shape, strict=True):
            if sizes.dim(dim) == size:
                continue
            atoms = facts.atoms.expand(dim)
            if len(atoms) != 1 or atoms[0] in known or facts.atoms.sections(atoms[0]) is not None or size < 2:
                return False
            if atoms[0] in sizes.fixed:  # it was mended before, and something else wants it otherwise
                return False
            changed = sizes.fix(atoms[0], size, str(op)) or changed
    return changed


def _looked_along(facts: Analysis, op: Op) -> Iterator[int]:
    """The atoms that an op does not just carry along: of dims without a label, with a blocked one, or looked up."""
    signature = facts.signatures[op.name]
    sums = signature.rule.sums if signature.rule is not None else {}
    shown = {label for bound in signature.outputs for dim in bound.dims for section in dim for label in section}
    for bound in (*signature.inputs, *signature.outputs):
        for pattern, dim in zip(bound.dims, facts.dims[bound.value], strict=True):
            labels = [label for section in pattern for label in section]
            free = labels and all(
                label not in signature.blocked and (label in shown or label in sums) for label in labels
            )
            if not free:
                yield from leaves(facts, dim)


def _all_atoms(facts: Analysis, op: Op) -> Iterator[int]:
    for name in (*op.inputs, *op.outputs):
        for dim in facts.dims[name]:
            yield from leaves(facts, dim)

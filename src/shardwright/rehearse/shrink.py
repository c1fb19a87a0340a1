"""A graph at small sizes: every shape and every size among the arguments, mapped together.

The shapes follow from the atoms of the real graph (`sizes.py`), and each op is called on meta tensors to check them.
Where they differ, some argument was a size that the atoms don't know, which is repaired:

    the op outputs another size for an atom that begins here (a convolution's width)     that size is taken
    the op can't be called, or outputs something else     its atoms keep their real sizes: first those it works along

and everything starts again. An op that can't be called at its real sizes either is refused, with its line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..capture import ImportedFunction
from ..capture.interpret import run_op
from ..errors import PlanError
from ..ir import Dtype, Graph, Op, Value, check
from ..ops.user_calls import OPAQUE
from ..rules import Analysis
from .arguments import Resized, resize_arguments
from .sizes import Sizes, leaves

FLOATS = {"float32": "float64", "float16": "float64", "bfloat16": "float64", "complex64": "complex128"}

MOST = 2**28
"""Maximum elements of all values of a rehearsed graph, 2 GiB in float64."""


class Unfit(Exception):
    """An op that can't run at its small sizes. `shapes` are its outputs', if any."""

    def __init__(self, op: Op, why: str, shapes: Sequence[tuple[int, ...]] = ()) -> None:
        super().__init__(why)
        self.op, self.why, self.shapes = op, why, shapes


def widened(graph: Graph) -> Graph:
    """The same graph with all floats in double precision. Casts stay as no-ops."""

    def wide(argument: object) -> object:
        if isinstance(argument, Dtype):
            return Dtype(FLOATS.get(argument, argument))
        return tuple(wide(inner) for inner in argument) if isinstance(argument, tuple) else argument

    values = {name: replace(value, dtype=FLOATS.get(value.dtype, value.dtype)) for name, value in graph.values.items()}
    ops = (
        replace(op, arguments=tuple((name, wide(value)) for name, value in op.arguments), autocast=None)
        for op in graph.ops
    )
    return replace(graph, values=values, ops=tuple(ops))


def shrunk(graph: Graph, sizes: Sizes) -> Graph:
    """The graph at small sizes, unchecked."""
    analysis = sizes.analysis
    values = {name: replace(value, shape=sizes.shape(name)) for name, value in graph.values.items()}

    def shapes(names: Sequence[str], of: Mapping[str, Value]) -> tuple[tuple[int, ...], ...]:
        return tuple(of[name].shape for name in names)

    ops = tuple(
        resize_arguments(
            Resized(
                op=op, inputs=shapes(op.inputs, graph.values), outputs=shapes(op.outputs, graph.values),
                small_inputs=shapes(op.inputs, values), small_outputs=shapes(op.outputs, values),
            )
        )
        for op in graph.ops
    )  # fmt: skip
    batch = None if graph.batch is None else sizes.dim(analysis.batch_dim)
    return replace(graph, values=values, ops=ops, batch=batch)


def fit(
    graph: Graph, sizes: Sizes, functions: Mapping[str, ImportedFunction], attempt: Callable[[Graph], None]
) -> Graph:
    """The graph at small sizes that it runs at, some of them repaired. `attempt` runs it with values."""
    while True:
        small = check(shrunk(graph, sizes))
        try:
            try_shapes(small, functions)
            _check_room(small, sizes)
            attempt(small)
        except Unfit as error:
            if not _mend(error, sizes):
                raise PlanError(
                    f"{error.op} can't run at small sizes nor at its real sizes: {error.why}; "
                    "use sw.verify on a machine that is large enough"
                ) from error
            continue
        return small


def _check_room(graph: Graph, sizes: Sizes) -> None:
    """Refuse what would not fit on a laptop, before anything is allocated."""
    total = sum(value.elements for value in graph.values.values())
    if total > MOST:
        raise PlanError(
            f"the small graph of {graph.name} still has {total:,} elements, more than the {MOST:,} that can be "
            f"rehearsed, since these sizes could not shrink: {'; '.join(sizes.kept()) or 'none'}; plan for an "
            "smaller example"
        )


def try_shapes(graph: Graph, functions: Mapping[str, ImportedFunction]) -> None:
    """Call every op on meta tensors; raises Unfit for the first whose outputs differ from the graph."""
    values = {
        name: torch.empty(value.shape, dtype=getattr(torch, value.dtype), device="meta")
        for name, value in graph.values.items()
    }
    for op in graph.ops:
        if op.target == OPAQUE:  # these are checked when they run
            continue
        expect(op, graph, run_fitting(op, [values[name] for name in op.inputs], functions))


def run_fitting(op: Op, tensors: Sequence[Tensor], functions: Mapping[str, ImportedFunction]) -> tuple[Tensor, ...]:
    """Run an op; raises Unfit if it can't be called."""
    try:
        with torch.device("meta") if tensors and tensors[0].is_meta else torch.device("cpu"):
            return run_op(op, tensors, functions)
    except (RuntimeError, IndexError, ValueError, TypeError, AssertionError, NotImplementedError) as error:
        raise Unfit(op, str(error).splitlines()[0] if str(error) else type(error).__name__) from error


def expect(op: Op, graph: Graph, tensors: Sequence[Tensor]) -> None:
    wanted = [graph.values[name].shape for name in op.outputs]
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if shapes != wanted:
        raise Unfit(op, f"it outputs {list(map(list, shapes))} instead of {list(map(list, wanted))}", shapes)


def _mend(error: Unfit, sizes: Sizes) -> bool:
    """Change the sizes around an op that does not fit; returns whether anything changed."""
    analysis, op = sizes.analysis, error.op
    if len(error.shapes) == len(op.outputs) and _take(error, sizes):
        return True
    return sizes.keep(_looked_along(analysis, op), str(op)) or sizes.keep(_all_atoms(analysis, op), str(op))


def _take(error: Unfit, sizes: Sizes) -> bool:
    """Adopt the sizes that an op outputs, for atoms that begin at it."""
    analysis, op = sizes.analysis, error.op
    known = {atom for name in op.inputs for dim in analysis.dims[name] for atom in leaves(analysis, dim)}
    changed = False
    for name, shape in zip(op.outputs, error.shapes, strict=True):
        dims = analysis.dims[name]
        if len(shape) != len(dims):
            return False
        for dim, size in zip(dims, shape, strict=True):
            if sizes.dim(dim) == size:
                continue
            atoms = analysis.atoms.expand(dim)
            if len(atoms) != 1 or atoms[0] in known or analysis.atoms.sections(atoms[0]) is not None or size < 2:
                return False
            if atoms[0] in sizes.fixed:  # already repaired, and another op conflicts
                return False
            changed = sizes.fix(atoms[0], size, str(op)) or changed
    return changed


def _looked_along(analysis: Analysis, op: Op) -> Iterator[int]:
    """The atoms that an op works along: of dims without a label, with a blocked one, or indexed."""
    signature = analysis.signatures[op.name]
    sums = signature.rule.sums if signature.rule is not None else {}
    shown = {label for bound in signature.outputs for dim in bound.dims for section in dim for label in section}
    for bound in (*signature.inputs, *signature.outputs):
        for pattern, dim in zip(bound.dims, analysis.dims[bound.value], strict=True):
            labels = [label for section in pattern for label in section]
            free = labels and all(
                label not in signature.blocked and (label in shown or label in sums) for label in labels
            )
            if not free:
                yield from leaves(analysis, dim)


def _all_atoms(analysis: Analysis, op: Op) -> Iterator[int]:
    for name in (*op.inputs, *op.outputs):
        for dim in analysis.dims[name]:
            yield from leaves(analysis, dim)

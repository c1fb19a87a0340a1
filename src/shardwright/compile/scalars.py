"""Whether a float of a call may be an input of a program: the graph has to be the same in all else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..capture import CapturedGraph
from ..errors import CaptureError
from ..ir import Graph, Op, Slot
from ..runtime.model.float_inputs import NotAnInput


def check_floats(
    capture: Callable[[list[Any]], CapturedGraph], leaves: Sequence[Any], floats: Mapping[int, float]
) -> None:
    """Refuse floats, by leaf of a call, as inputs unless the graph is the same with them as constants."""
    plain = [floats.get(at, leaf) for at, leaf in enumerate(leaves)]
    try:
        constant, lifted = capture(plain), capture(list(leaves))
    except CaptureError as error:
        raise NotAnInput(str(error)) from error
    names = [leaf.value for at, leaf in enumerate(lifted.input_leaves) if at in floats and leaf.value]
    if not same_but_for(lifted.graph, constant.graph, names):
        raise NotAnInput("the graph is another one with a number as an input")


def same_but_for(lifted: Graph, constant: Graph, inputs: Iterable[str]) -> bool:
    """Whether a graph with some floats as inputs computes what one with these floats as constants does.

    What is computed of them alone (1 - weight) is a number in the other, and the op of a tensor and a number has
    another overload (pow.Tensor_Scalar, pow.Tensor_Tensor). All else has to agree, checks that were left out included.
    """
    numbers = set(inputs)
    steps: list[Op] = []
    for op in lifted.ops:
        if op.inputs and numbers.issuperset(op.inputs):
            numbers.update(op.outputs)
        else:
            steps.append(op)
    if lifted.branches or lifted.notes != constant.notes or len(steps) != len(constant.ops):
        return False
    pairs = zip(steps, constant.ops, strict=True)
    same = all(_facts(lifted, op) == _facts(constant, like) and _same_arguments(op, like) for op, like in pairs)
    return same and _outputs(lifted) == _outputs(constant)


def _facts(graph: Graph, op: Op) -> tuple[Any, ...]:
    values = [graph.values[name] for name in op.outputs]
    return op.target.split(".")[:2], op.module_path, op.no_grad, [(value.shape, value.dtype) for value in values]


def _same_arguments(op: Op, like: Op) -> bool:
    mine, theirs = dict(op.arguments), dict(like.arguments)
    return mine.keys() == theirs.keys() and all(_agree(mine[name], theirs[name]) for name in mine)


def _agree(lifted: Any, constant: Any) -> bool:
    """Whether two arguments of ops say the same: a tensor may stand for a number."""
    if isinstance(lifted, tuple) and isinstance(constant, tuple):
        return len(lifted) == len(constant) and all(map(_agree, lifted, constant))
    if isinstance(lifted, Slot):
        return isinstance(constant, Slot | float | int)
    return type(lifted) is type(constant) and bool(lifted == constant)


def _outputs(graph: Graph) -> list[Any]:
    values = (None if output.value is None else graph.values[output.value] for output in graph.outputs)
    return [value and (value.shape, value.dtype) for value in values]

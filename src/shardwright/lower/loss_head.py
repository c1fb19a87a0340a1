"""The head of a loss: the linear that makes its logits, and all that is between the two.

    x, weight (, bias) ─► linear ─► logits ─► slices of rows, views, casts, a scale or soft cap ─► cross_entropy
                                                                                              └──► logsumexp (z-loss)

A loss can be computed in chunks of rows if each row goes this way by itself and nothing else reads the logits. The
same look is taken at a graph, when a plan is made, and at a program, where reshards may stand between.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..ir import Graph, Op, Value
from ..ops.chunked_losses import (
    ADD,
    ADDED_MATMUL,
    COPIES,
    LINEAR,
    LOGSUMEXPS,
    LOSSES,
    MATMULS,
    SLICE,
    SLICE_ARGUMENTS,
    TURNS,
    VIEWS,
    elementwise_step,
    turned_dims,
)

ONLY_LOSS = 'compile=sw.CompileOptions(outputs="scalars")'
"""What drops logits that a model returns beside its loss."""


class HeadFault(Exception):
    """Why the logits of a loss can't be made in chunks, as the end of a sentence."""


@dataclass(frozen=True, kw_only=True)
class OpFlow:
    """Who makes and reads each value, of a graph or of a program."""

    makers: Mapping[str, Op]
    readers: Callable[[str], Sequence[Op]]
    values: Mapping[str, Value]
    needed: Collection[str]  # values that leave

    @classmethod
    def of_graph(cls, graph: Graph) -> OpFlow:
        return cls(
            makers=graph.producer,
            readers=lambda name: [op for op, _ in graph.users[name]],
            values=graph.values,
            needed=set(graph.sinks()),
        )


@dataclass(frozen=True, kw_only=True)
class LossHead:
    """What a loss is computed of instead of its logits.

    slices      (dim, start, end, step) of x
    steps       casts and elementwise ops between the linear and the loss, as the runtime names them
    logsumexp   the op that takes it of the same logits; `flat` if that has one dim for all rows
    ops         all that become one call
    """

    x: str
    weight: str
    bias: str | None
    linear: Op
    slices: tuple[tuple[int, int, int, int], ...]
    steps: tuple[tuple[Any, ...], ...]
    logsumexp: Op | None
    flat: bool
    ops: tuple[Op, ...]


@dataclass
class _Path:
    """What happens to logits on the way to a reader."""

    class_dim: int
    rank: int
    slices: list[tuple[int, int, int, int]] = field(default_factory=list)
    steps: list[tuple[Any, ...]] = field(default_factory=list)
    reshaped: bool = False

    def follow(self, op: Op, values: Mapping[str, Value]) -> None:
        before, after = values[op.inputs[0]].shape, values[op.outputs[0]].shape
        turned = self.class_dim != self.rank - 1
        if op.target in COPIES:
            return
        if op.target in VIEWS and not turned and before[-1] == after[-1]:
            self.reshaped = True
            self.rank, self.class_dim = len(after), len(after) - 1
        elif op.target == SLICE and not turned and not self.reshaped:
            self.slices.append(self._slice(op))
        elif op.target in TURNS:
            order = turned_dims(op, self.rank)
            if [dim for dim in order if dim != self.class_dim] != [d for d in range(self.rank) if d != self.class_dim]:
                raise HeadFault(f"{op} changes the order of the rows of its logits")
            self.class_dim = order.index(self.class_dim)
        elif (step := elementwise_step(op)) is not None:
            self.steps.append(step)
        else:
            raise HeadFault(
                f"{op} stands between its logits and their linear; in chunks can be slices and views of rows, casts, "
                "a scale and a soft cap (tanh)"
            )

    def _slice(self, op: Op) -> tuple[int, int, int, int]:
        dim, start, end, step = (op.argument(key, usual) for key, usual in SLICE_ARGUMENTS)
        if not all(isinstance(number, int) for number in (dim, start, end, step)) or dim % self.rank == self.class_dim:
            raise HeadFault(f"{op} takes some of the classes")
        return dim % self.rank, start, end, step


def find_head(loss: Op, flow: OpFlow) -> LossHead:
    """The head of a loss; raises HeadFault if its logits can't be made in chunks."""
    logits, target = loss.inputs[0], loss.tensor("target")
    if loss.target not in LOSSES:
        raise HeadFault("it is no cross_entropy; name the op of an F.cross_entropy")
    if target is None or flow.values[target].floating:
        raise HeadFault("its targets are probabilities; pass class numbers")
    back = _ops_before(logits, flow)
    linear, bias_add = back[0], next((op for op in back[1:2] if _is_bias(op, flow)), None)
    x, weight, bias, turned = _product(linear, flow)
    if bias_add is not None:
        bias = bias_add.inputs[1]
    between = back[1 if bias_add is None else 2 :]
    path = _path(between, flow.values[linear.outputs[0]])
    for op in between:
        path.follow(op, flow.values)
    if path.class_dim != (1 if path.rank > 1 else 0):
        raise HeadFault(f"the classes of its logits are not in the last dim of {linear}")
    start = linear.outputs[0] if bias_add is None else bias_add.outputs[0]
    inside, others = _readers(start, loss, flow)
    flat = False
    if others:
        flat = _check_logsumexp(others, start, path, linear, flow)
    ops = tuple({op.name: op for op in (*back, *inside, loss, *others)}.values())
    _check_modes(ops)
    for op in ops:
        if op not in (loss, *others) and any(name in flow.needed for name in op.outputs):
            raise HeadFault(f"its logits leave the model, where they are whole; return only the loss ({ONLY_LOSS})")
    if bias_add is not None and [*flow.readers(linear.outputs[0])] != [bias_add]:
        raise HeadFault(f"its logits are read without their bias too, by {flow.readers(linear.outputs[0])[-1]}")
    return LossHead(
        x=x, weight=weight, bias=bias, linear=linear, slices=tuple(path.slices), steps=tuple(path.steps),
        logsumexp=others[0] if others else None, flat=flat, ops=(*ops, *turned),
    )  # fmt: skip


def _path(between: Sequence[Op], logits: Value) -> _Path:
    return _Path(class_dim=len(logits.shape) - 1, rank=len(logits.shape))


def _ops_before(logits: str, flow: OpFlow) -> list[Op]:
    """The ops from the matmul that makes logits to those, in order."""
    ops: list[Op] = []
    name = logits
    while True:
        op = flow.makers.get(name)
        if op is None:
            raise HeadFault("its logits are not made by a linear of the same stage")
        ops.append(op)
        if op.target in MATMULS:
            return ops[::-1]
        if op.target.startswith("comm.") or reads_several(op, flow):
            raise HeadFault(f"{op} stands between its logits and their linear")
        name = op.inputs[0]


def reads_several(op: Op, flow: OpFlow) -> bool:
    """Whether more goes into an op than logits: all but the addition of a bias."""
    return len(op.inputs) != 1 and not _is_bias(op, flow)


def _is_bias(op: Op, flow: OpFlow) -> bool:
    if op.target != ADD or len(op.inputs) != 2 or op.argument("alpha", 1) != 1:
        return False
    logits, added = (flow.values[name] for name in op.inputs)
    maker = flow.makers.get(op.inputs[0])
    alike = added.shape == logits.shape[-1:] and added.dtype == logits.dtype
    return alike and maker is not None and maker.target in MATMULS and len(maker.inputs) == 2


def _product(op: Op, flow: OpFlow) -> tuple[str, str, str | None, tuple[Op, ...]]:
    """x, weight and bias of a matmul, and the op that turns the weight, if x @ weight.T was written."""
    if op.target == LINEAR:
        x, weight, *rest = op.inputs
        if len(flow.values[weight].shape) != 2:
            raise HeadFault(f"{op} has a weight of one dim")
        return x, weight, rest[0] if rest else None, ()
    added = op.target == ADDED_MATMUL
    if added and len(op.arguments) > 3:
        raise HeadFault(f"{op} scales what it adds")
    names = ("mat1", "mat2") if added else tuple(name for name, _ in op.arguments[:2])
    x, turned = (op.inputs[op.argument(name).index] for name in names)
    turn = flow.makers.get(turned)
    if turn is None or turn.target not in TURNS or len(flow.values[turn.inputs[0]].shape) != 2:
        raise HeadFault(f"{op} multiplies with a weight of [features, classes]; write F.linear(x, weight)")
    return x, turn.inputs[0], op.tensor("self") if added else None, (turn,) if [*flow.readers(turned)] == [op] else ()


def _readers(start: str, loss: Op, flow: OpFlow) -> tuple[list[Op], list[Op]]:
    """The ops that hand logits on, and those that take the logsumexp; nothing else may read them."""
    inside: list[Op] = []
    others: list[Op] = []
    names = [start]
    while names:
        for op in flow.readers(names.pop()):
            if op.name == loss.name:
                continue
            if op.target in LOGSUMEXPS:
                others.append(op)
            elif op.target in (*VIEWS, *COPIES, *TURNS, SLICE) or elementwise_step(op) is not None:
                inside.append(op)
                names += op.outputs
            else:
                raise HeadFault(f"{op} reads the logits too; chunks don't leave them whole for it")
    return inside, list({op.name: op for op in others}.values())


def _check_logsumexp(others: Sequence[Op], start: str, path: _Path, linear: Op, flow: OpFlow) -> bool:
    """Whether the logsumexp, which has to be of the rows and the steps of the loss, has one dim for all rows."""
    op = others[0]
    if len(others) > 1:
        raise HeadFault(f"{others[0]} and {others[1]} both take a logsumexp of its logits; take it once")
    dims = op.argument("dim")
    dim = dims[0] if isinstance(dims, tuple) and len(dims) == 1 else dims
    own = _path((), flow.values[start])
    between: list[Op] = []
    name = op.inputs[0]
    while name != start:
        between.append(flow.makers[name])
        name = between[-1].inputs[0]
    for before in reversed(between):
        own.follow(before, flow.values)
    if not isinstance(dim, int) or dim % own.rank != own.class_dim or op.argument("keepdim", False):
        raise HeadFault(f"{op} is not over the classes, or keeps their dim; write logsumexp(logits, -1)")
    if (own.slices, own.steps) != (path.slices, path.steps):
        raise HeadFault(f"{op} is of other rows than the loss, or of another dtype; take both of the same tensor")
    if own.class_dim != own.rank - 1:
        raise HeadFault(f"{op} is of logits whose classes are not the last dim")
    leading = len(flow.values[linear.outputs[0]].shape) - 1
    if own.reshaped and own.rank != 2:
        raise HeadFault(f"{op} is of rows in another shape than the loss or the linear has")
    return own.reshaped and leading != 1


def _check_modes(ops: Sequence[Op]) -> None:
    first = ops[0]
    for op in ops:
        if (op.region, op.no_grad) != (first.region, first.no_grad):
            raise HeadFault(f"{op} and {first} are not recomputed alike; recompute both or none of them")
        if op.autocast is not None:
            raise HeadFault(f"{op} is run under autocast as a whole")

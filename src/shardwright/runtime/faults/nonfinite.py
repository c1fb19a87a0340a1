"""Where a NaN or an infinity comes from: the first op of a step that makes one from finite values.

A failed step is run again, with the same batch, the same dropout masks and the same generated program, and
the inputs and outputs of every op that torch runs are checked, on every rank, in forward and backward. An op is the
origin if its inputs are finite and its outputs are not. The state of the run is not changed.

    find_nonfinite(model, args)      which op, at which line, on which ranks
    first_gradient(model)            the first parameter whose gradient is not finite
    agree_finite(model, loss)        whether all ranks are finite, at the cost of one small all_reduce
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.errors import NonFiniteError

from ..collectives import objects, process_group
from ..model.access import accumulation_of, skeleton_of
from ..model.parallel_model import ParallelModel
from ..optimizer.adopt import leaf_of
from ..parameters.sharded import Untouched
from ..pipeline.nonfinite import are_finite, gradients_of
from ..world import here
from . import flight_recorder
from .watch import report_failure

LossOf = Callable[[Any], Any]

_MAKES_NOTHING = ("empty", "new_empty", "resize", "set_", "detach", "view", "_unsafe_view", "as_strided", "alias")


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFiniteOrigin:
    """The first op with a non-finite output, on one rank."""

    order: int  # how many ops had run before it
    kind: str  # "nan" or "inf"
    op: str
    shape: tuple[int, ...]
    count: int  # non-finite elements
    phase: str
    line: str  # of the generated program, with the user's

    def __str__(self) -> str:
        what = "not a number" if self.kind == "nan" else "infinite"
        bad = f"{self.count} of {math.prod(self.shape)} elements of {list(self.shape)} are {what}"
        return f"{self.phase} of {self.op} at {self.line}: {bad}"


def find_nonfinite(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, *, loss_of: LossOf | None = None
) -> str | None:
    """Run a step again and find its first non-finite op; None if all is finite. All ranks must call it.

    `loss_of` takes the model's output; default: the first scalar in it.
    """
    origin = _broken_before(model, args, kwargs or {})
    first = origin or _rerun(model, args, kwargs or {}, loss_of or first_number)
    return _agreed(first)


@report_failure
@torch.no_grad()
def agree_finite(model: nn.Module, loss: Tensor | None, *, gradients: bool = False) -> bool:
    """Whether the loss, and optionally gradients, are finite on all ranks. All ranks must call it."""
    checked = gradients_of(model.parameters()) if gradients else []
    with Untouched():
        device = here().device
        fine = torch.ones((), device=device) if loss is None else torch.isfinite(loss.detach()).all().float().to(device)
        if checked:
            fine = fine * are_finite(checked).to(device)
        if dist.is_initialized() and dist.get_world_size() > 1:
            flight_recorder.enter("all_reduce", None, "whether all is finite")
            process_group.all_reduce(fine, None, "min").wait()
        return bool(fine.item())


@torch.no_grad()
def first_gradient(model: nn.Module) -> str | None:
    """The first parameter, in the order of the model, whose gradient is not finite; on which ranks."""
    gradients = {key: gradients_of([parameter]) for key, parameter in model.named_parameters()}
    mine = [key for key, grads in gradients.items() if grads and not bool(are_finite(grads))]
    every = objects.all_gather_objects(mine, "gradients that are not finite")
    order = {key: at for at, (key, _) in enumerate(_original(model).named_parameters())}
    bad = sorted({key for bad_keys in every for key in bad_keys}, key=lambda key: (order.get(key, len(order)), key))
    if not bad:
        return None
    ranks = ", ".join(str(rank) for rank, bad_keys in enumerate(every) if bad[0] in bad_keys)
    more = f", and of {len(bad) - 1} more parameters" if len(bad) > 1 else ""
    return f"the gradient of {bad[0]} is not finite on rank {ranks}{more}"


def explain_nonfinite(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, *, loss_of: LossOf | None = None
) -> NonFiniteError:
    """The error with everything known about a non-finite step. All ranks must call it."""
    parameter = first_gradient(model)
    origin = find_nonfinite(model, args, kwargs, loss_of=loss_of)
    cause = [f"it begins in the {origin}" if origin else "repeating the step is finite: it depends on something else"]
    return NonFiniteError("; ".join(["the step is not finite", *([parameter] if parameter else []), *cause]))


def first_number(output: Any) -> Any:
    """The first scalar in a model's output, or None."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    return next((x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.numel() == 1), None)


# -- checking ops --------------------------------------------------------------------------------


class _Looking(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds the first op that makes a NaN from none, and the first that makes an infinity from finite values."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nan: NonFiniteOrigin | None = None
        self.inf: NonFiniteOrigin | None = None
        self._count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._count += 1
        name = func._schema.name.split("::")
        looks = self.nan is None and name[0] != "c10d" and not name[-1].startswith(_MAKES_NOTHING)
        before = _broken((args, kwargs)) if looks else (False, False)  # an op may overwrite its inputs
        result = func(*args, **(kwargs or {}))
        if looks:
            nan, inf = _broken(result)
            if nan and not before[0]:
                self.nan = self._origin("nan", name[-1], result)
            elif inf and not any(before) and self.inf is None:
                self.inf = self._origin("inf", name[-1], result)
        return result

    def _origin(self, kind: str, op: str, result: Any) -> NonFiniteOrigin:
        test = torch.isnan if kind == "nan" else torch.isinf
        bad = next(x for x in _floats(result) if bool(test(x).any()))
        node = torch._C._current_autograd_node()
        return NonFiniteOrigin(
            order=self._count, kind=kind, op=op, shape=tuple(bad.shape), count=int(test(bad).sum()),
            phase="forward" if node is None else "backward", line=_line(node),
        )  # fmt: skip


def _floats(values: Any) -> Iterator[Tensor]:
    for x in pytree.tree_leaves(values):
        if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()) and not x.is_meta and x.numel():
            yield x


def _broken(values: Any) -> tuple[bool, bool]:
    """Whether there is a NaN, and whether there is an infinity, among tensors and numbers."""
    nan = inf = False
    for x in pytree.tree_leaves(values):
        if isinstance(x, float):
            nan, inf = nan or math.isnan(x), inf or math.isinf(x)
    for x in _floats(values):
        plain = x.detach()
        nan, inf = nan or bool(torch.isnan(plain).any()), inf or bool(torch.isinf(plain).any())
    return nan, inf


def _line(node: Any) -> str:
    """The location of an op: from the stack in forward; in backward that of its forward."""
    if node is None:
        place = flight_recorder.place_of(flight_recorder.caller())
        return str(flight_recorder.line_of(place)) if place is not None else "an unknown location"
    for entry in reversed(node.metadata.get("traceback_", [])):
        line = flight_recorder.line_in(entry)
        if line is not None:
            return str(line)
    return str(node.name())


# -- running again -------------------------------------------------------------------------------


def _broken_before(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> NonFiniteOrigin | None:
    """A non-finite input, parameter or buffer at the start of the step."""
    named: list[tuple[str, Tensor]] = [
        (f"input {pytree.keystr(path)}", x)
        for path, x in pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))[0]
        if isinstance(x, Tensor)
    ]
    named += [(f"parameter {key}", tensor) for key, tensor in model.named_parameters()]
    with torch.no_grad(), Untouched():
        for name, tensor in named:
            for kind, test in (("nan", torch.isnan), ("inf", torch.isinf)):
                if tensor.is_floating_point() and not tensor.is_meta and bool(test(tensor.detach()).any()):
                    return NonFiniteOrigin(
                        order=0, kind=kind, op=name, shape=tuple(tensor.shape), count=int(test(tensor.detach()).sum()),
                        phase="value", line="the beginning of the step",
                    )  # fmt: skip
    return None


def _rerun(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], loss_of: LossOf) -> NonFiniteOrigin | None:
    looking = _Looking()
    with _unchanged(model), torch.autograd.set_detect_anomaly(True, check_nan=False), looking:
        loss = loss_of(model(*args, **kwargs))
        if isinstance(loss, Tensor) and loss.requires_grad:
            torch.autograd.backward(loss)
    if looking.nan is None or (looking.inf is not None and looking.inf.order < looking.nan.order):
        return looking.inf
    return looking.nan


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Restore gradients, buffers, counters and random state afterwards; the step repeats its random numbers."""
    compiled = [part for part in model.modules() if isinstance(part, ParallelModel)]
    random = [(generator, generator.step) for part in compiled if (generator := part.random) is not None]
    turns = [(turn, turn.count) for turn in map(accumulation_of, compiled)]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    with Untouched():
        gradients = [(leaf, leaf.grad) for leaf in _leaves(model)]
        for leaf, _ in gradients:
            leaf.grad = None
    for generator, step in random:
        generator.step = max(0, step - 1)
    for turn, count in turns:
        turn.count = max(0, count - 1)
    try:
        yield
    finally:
        for generator, step in random:
            generator.step = step
        for turn, count in turns:
            turn.count = count
        with torch.no_grad(), Untouched():
            for buffer, value in buffers:
                buffer.copy_(value)
            for leaf in _leaves(model):
                leaf.grad = None
            for leaf, gradient in gradients:
                leaf.grad = gradient


def _leaves(model: nn.Module) -> list[Tensor]:
    """All tensors that may have a gradient: parameters, and their shards in the optimizer."""
    leaves: dict[int, Tensor] = {}
    for parameter in model.parameters():
        for leaf in (parameter, leaf_of(parameter)):
            leaves[id(leaf)] = leaf
    return list(leaves.values())


def _original(model: nn.Module) -> nn.Module:
    """The original model, with the parameters of all stages."""
    return skeleton_of(model) if isinstance(model, ParallelModel) else model


# -- over ranks ----------------------------------------------------------------------------------


def _agreed(origin: NonFiniteOrigin | None) -> str | None:
    """The first origin over all ranks, and the ranks that share it."""
    every = objects.all_gather_objects(origin, "what ranks found")
    there = [(rank, other) for rank, other in enumerate(every) if other is not None]
    if not there:
        return None
    _, first = min(there, key=lambda item: (item[1].order, item[0]))
    same = [rank for rank, other in there if (other.op, other.line, other.phase) == (first.op, first.line, first.phase)]
    return str(first) if len(every) == 1 else f"{first}, on rank {', '.join(map(str, same))}"

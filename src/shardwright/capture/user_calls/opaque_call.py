"""One call of an opaque submodule: what it takes and returns, and how it is run with tensors from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...control_flow import tie_to_operands
from ...errors import CaptureError, InputError
from ..building.call_paths import register_containers
from .kept import Position
from .real_run import refusal


@dataclass(frozen=True, slots=True)
class OpaqueOutput:
    """A tensor that an opaque submodule returns, or the new value of a buffer of its."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    gradient: bool = True


@dataclass(slots=True, kw_only=True)
class OpaqueCall:
    """One call of an opaque submodule. `outputs` and what follows it are known once its forward was tried."""

    key: str  # the path, with "@1" for the second call
    path: str
    batch: bool
    arguments: tuple[Any, ...]  # the leaves of (args, kwargs), with a Position for each tensor
    in_spec: pytree.TreeSpec
    names: tuple[str, ...]  # of its parameters and buffers, as it calls them
    outputs: tuple[OpaqueOutput, ...] = ()
    results: tuple[Any, ...] = ()  # the leaves of what it returns, with a Position for each tensor
    out_spec: pytree.TreeSpec | None = None
    changed: tuple[str, ...] = ()
    tensors: int = 0  # how many of its inputs are arguments
    rule: str = ""  # how it may be split, where more is known of it: a layer of experts
    observed: bool = False  # whether it had to be seen running on real data
    lasting: bool = True  # its tensors stay after a call: a checkpoint inside of it may run it again in backward

    def shapes(self, tensors: list[Tensor]) -> list[Tensor]:
        """Empty tensors of the shapes that the call gives: what the marker op stands for in a trace."""
        return [torch.empty(output.shape, dtype=output.dtype) for output in self.outputs]

    def settle(self, result: Any, changed: Mapping[str, Tensor], *, known: bool) -> None:
        """Take down what a call gave. Unless it is `known` without data, a number in it may be another next time."""
        self.observed = self.batch or not known
        register_containers(result)
        leaves, self.out_spec = pytree.tree_flatten(result)
        outputs: list[OpaqueOutput] = []
        results: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                results.append(Position(len(outputs)))
                outputs.append(OpaqueOutput(self._sizes(leaf), leaf.dtype, leaf.requires_grad or not known))
                continue
            if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool) or not (known or leaf is None):
                raise self._refusal(f"it returns {leaf!r}, which may depend on data", "Return tensors only")
            results.append(leaf)
        for tensor in changed.values():
            outputs.append(OpaqueOutput(tuple(tensor.shape), tensor.dtype, False))
        self.outputs, self.results, self.changed = tuple(outputs), tuple(results), tuple(changed)
        if self.batch:
            self._check_rows()

    def settle_as(self, tensor: Tensor) -> None:
        """It gives one tensor like another, without having been tried."""
        _, self.out_spec = pytree.tree_flatten(0)
        self.outputs, self.results = (OpaqueOutput(tuple(tensor.shape), tensor.dtype),), (Position(0),)

    @property
    def rows(self) -> bool:
        """Whether it may be called with a part of the batch."""
        return self.batch or bool(self.rule)

    def _sizes(self, tensor: Tensor) -> tuple[int, ...]:
        if not all(isinstance(size, int) for size in tensor.shape):
            what = f"the shape of what it returns, {[str(size) for size in tensor.shape]}, depends on data"
            raise self._refusal(what, "Return a tensor of a fixed shape, padded or masked, or make its parent opaque")
        return tuple(tensor.shape)

    def _check_rows(self) -> None:
        if self.changed:
            what = f"batch=True claims that samples are independent, but it writes to its buffer {self.changed[0]}"
            raise self._refusal(what, "Leave batch out")
        shapes = [list(output.shape) for output in self.outputs]
        if not all(shapes) or len({shape[0] for shape in shapes}) != 1:
            what = f"batch=True claims that all it returns has the same batch dim, but the shapes are {shapes}"
            raise self._refusal(what, "Return tensors with one row for each row of the batch, or leave batch out")

    def _refusal(self, what: str, remedy: str) -> CaptureError:
        return refusal(self.path, what, remedy)

    def call(self, forward: Callable[..., Any], tensors: Sequence[Tensor]) -> Any:
        leaves = [
            tensors[argument.index] if isinstance(argument, Position) else argument for argument in self.arguments
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self.in_spec)
        before = [_version(tensor) for tensor in tensors]
        result = forward(*args, **kwargs)
        if before != [_version(tensor) for tensor in tensors]:
            raise self._refusal("it changes one of its arguments in place", "Write x = x + 1 instead of x += 1 there")
        return result


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


class OpaqueBody:
    """A submodule of ours whose parameters and buffers are given anew for every call."""

    def __init__(self, part: nn.Module) -> None:
        self.part = part
        self.slots: dict[str, list[tuple[nn.Module, dict[str, Any], str]]] = {}
        first: dict[int, str] = {}
        for path, owner in part.named_modules():
            both: list[dict[str, Any]] = [owner._parameters, owner._buffers]
            for slots in both:
                for key, tensor in slots.items():
                    name = first.setdefault(id(tensor), f"{path}.{key}" if path else key)
                    self.slots.setdefault(name, []).append((owner, slots, key))
        self.state: dict[str, tuple[Tensor, int]] = {}

    def give(self, state: Mapping[str, Tensor]) -> None:
        """Put tensors in their places (tied weights have several)."""
        self.state = {name: (tensor, _version(tensor)) for name, tensor in state.items()}
        for name, tensor in state.items():
            for owner, slots, key in self.slots[name]:
                slots[key] = tensor
                if isinstance(owner, nn.RNNBase):
                    owner._flat_weights = [getattr(owner, weight, None) for weight in owner._flat_weights_names]

    def now(self, name: str) -> Tensor:
        _, slots, key = self.slots[name][0]
        tensor: Tensor = slots[key]
        return tensor

    def changed(self, path: str) -> list[str]:
        """The buffers that were written to, or exchanged, since they were given."""
        names = [n for n, (tensor, v) in self.state.items() if self.now(n) is not tensor or _version(tensor) != v]
        for name in names:
            if self.slots[name][0][1] is self.slots[name][0][0]._parameters:
                raise refusal(path, f"its forward writes to its parameter {name}", "Make it a buffer (register_buffer)")
        return names


@contextmanager
def placed(part: nn.Module, state: Mapping[str, Tensor]) -> Iterator[OpaqueBody]:
    """Within this a submodule has other tensors."""
    body = OpaqueBody(part)
    before = {name: body.now(name) for name in state}
    body.give(state)
    try:
        yield body
    finally:
        body.give(before)


@contextmanager
def forwards(changed: Iterable[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Within this modules run something else than their forward."""
    undo: list[tuple[dict[str, Any], Any]] = []
    try:
        for part, forward in changed:
            slots = vars(part)
            undo.append((slots, slots.get("forward")))
            slots["forward"] = forward
        yield
    finally:
        for slots, before in undo:
            del slots["forward"]
            if before is not None:
                slots["forward"] = before


class OpaqueModule:
    """An opaque submodule ready to be called: its module, and how one call of it looks."""

    def __init__(
        self, call: OpaqueCall, body: OpaqueBody, flags: Sequence[bool], dtypes: Sequence[torch.dtype] = ()
    ) -> None:
        self.call, self.body, self.flags = call, body, tuple(flags)
        self.path, self.names = call.path, call.names
        self.dtypes = tuple(dtypes) or tuple(output.dtype for output in call.outputs)

    def __call__(self, tensors: Sequence[Tensor], state: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """What the user's forward gives for these arguments, parameters and buffers, and the changed buffers."""
        call, body = self.call, self.body
        for module, flag in zip(body.part.modules(), self.flags, strict=True):
            module.training = flag
        body.give({name: tensor.clone() if name in call.changed else tensor for name, tensor in state.items()})
        if call.rule and hasattr(body.part, "num_experts"):  # this rank may have some of them only
            vars(body.part)["num_experts"] = next(iter(state.values())).shape[0]
        result = call.call(body.part.forward, tensors)
        if set(body.changed(call.path)) - set(call.changed):
            raise refusal(call.path, "it changed a buffer, and did not when it was captured", "Always write to it")
        leaves, spec = pytree.tree_flatten(result)
        outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._expect(spec, leaves, outputs)
        outputs = (
            list(tie_to_operands(outputs, tensors)) if call.batch else outputs
        )  # its rows decide, and ranks have others
        outputs += [body.now(name).detach() for name in call.changed]
        if not call.lasting:  # else weights that were gathered for this call would live on
            body.give({name: torch.empty_like(tensor, device="meta") for name, tensor in state.items()})
        return tuple(tensor.to(dtype) for tensor, dtype in zip(outputs, self.dtypes, strict=True))

    def _expect(self, spec: pytree.TreeSpec, leaves: Sequence[Any], outputs: Sequence[Tensor]) -> None:
        call = self.call
        wanted = [output.shape[1:] if call.rows else output.shape for output in call.outputs][: len(outputs)]
        shapes = [tuple(output.shape)[1:] if call.rows else tuple(output.shape) for output in outputs]
        rest = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        known = [leaf for leaf in call.results if not isinstance(leaf, Position)]
        if spec != call.out_spec or shapes != wanted or rest != known:
            raise InputError(
                f"the opaque submodule {call.path or 'model'} returned tensors of shapes {[list(x) for x in shapes]} "
                f"and {rest}, and when captured {[list(x) for x in wanted]} and {known}; what it returns must not "
                f"depend on data: return tensors of fixed shapes, or make its parent opaque"
            )


def runner(calls: Mapping[str, OpaqueCall], module: nn.Module, bodies: dict[str, OpaqueBody]) -> Callable[..., Any]:
    """The function behind the op "call.opaque", for whoever runs a graph op by op."""

    def run(
        key: str, batch: bool, rule: str, tensors: Sequence[Tensor], names: Sequence[str], state: Sequence[Tensor],
        axes: Any = (),
    ) -> Any:  # fmt: skip
        call = calls[key]
        part = OpaqueModule(call, bodies[call.path], [m.training for m in module.get_submodule(call.path).modules()])
        return part(tensors, dict(zip(names, state, strict=True)))

    return run

"""Submodules that stay as they are: one op in the graph, the user's own forward at run time.

`opaque` marks a submodule. While a model is traced, a marked submodule puts one marker in
the graph instead of its insides. The op reads the tensors among its arguments and all of
its parameters and buffers, and makes the tensors that it returns and the new values of the
buffers that it changes; so parameters, gradients and buffers are handled as for any op.

What it returns is found out on fakes. Where that fails (`.item()`, numpy, a branch on data),
the model is run once on a real example, and what the submodule returned is taken down.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ..errors import CaptureError, InputError
from .keep import Kept, Position, current, paused
from .real import Seen, refusal
from .signature import register_containers

MARK = "_shardwright_opaque"
Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class Wish:
    """How a submodule wants to be kept."""

    batch: bool = False


def opaque(module: Module, *, batch: bool = False) -> Module:
    """Keep a submodule as it is: `model.tokenizer = sw.opaque(model.tokenizer)`. Returns the same module.

    It becomes one op that runs whole on every device, whatever Python it is written in. With `batch` its rows are
    said to be independent, and it is split on dim 0 of what it takes and returns; the claim is checked on the
    example, forward and backward, and refused if it is not true.
    """
    if not isinstance(module, nn.Module):
        raise InputError(f"sw.opaque takes a submodule, not a {type(module).__name__}; pass model.path.to.submodule")
    vars(module)[MARK] = Wish(batch)
    return module


def opaque_parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The submodules that are marked, the outermost of those that hold each other."""
    inside: tuple[str, ...] = ()
    for path, part in module.named_modules():
        if MARK in vars(part) and not path.startswith(inside or ("\0",)):
            inside = (*inside, f"{path}." if path else "")
            yield path, part


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor that an opaque submodule returns, or the new value of a buffer of its."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    gradient: bool = True


@dataclass(slots=True, kw_only=True)
class Opaque:
    """One call of an opaque submodule. `made` and what follows it are known once its forward was tried."""

    key: str  # the path, with "@1" for the second call
    path: str
    batch: bool
    arguments: tuple[Any, ...]  # the leaves of (args, kwargs), with a Position for each tensor
    in_spec: pytree.TreeSpec
    names: tuple[str, ...]  # of its parameters and buffers, as it calls them
    made: tuple[Made, ...] = ()
    results: tuple[Any, ...] = ()  # the leaves of what it returns, with a Position for each tensor
    out_spec: pytree.TreeSpec | None = None
    changed: tuple[str, ...] = ()
    tensors: int = 0  # how many of its inputs are arguments
    looked: bool = False  # whether it had to be seen running on real data

    def shapes(self, tensors: list[Tensor]) -> list[Tensor]:
        """Empty tensors of the shapes that the call gives: what the marker op stands for in a trace."""
        return [torch.empty(made.shape, dtype=made.dtype) for made in self.made]

    def settle(self, result: Any, changed: Mapping[str, Tensor], *, known: bool) -> None:
        """Take down what a call gave. Unless it is `known` without data, a number in it may be another next time."""
        self.looked = self.batch or not known
        register_containers(result)
        leaves, self.out_spec = pytree.tree_flatten(result)
        made: list[Made] = []
        results: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                results.append(Position(len(made)))
                made.append(Made(self._sizes(leaf), leaf.dtype, leaf.requires_grad or not known))
                continue
            if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool) or not (known or leaf is None):
                raise self._refusal(f"it returns {leaf!r}, which may depend on data", "Return tensors only")
            results.append(leaf)
        for tensor in changed.values():
            made.append(Made(tuple(tensor.shape), tensor.dtype, False))
        self.made, self.results, self.changed = tuple(made), tuple(results), tuple(changed)
        if self.batch:
            self._check_rows()

    def _sizes(self, tensor: Tensor) -> tuple[int, ...]:
        if not all(isinstance(size, int) for size in tensor.shape):
            what = f"the shape of what it returns, {[str(size) for size in tensor.shape]}, depends on data"
            raise self._refusal(what, "Return a tensor of a fixed shape, padded or masked, or make its parent opaque")
        return tuple(tensor.shape)

    def _check_rows(self) -> None:
        if self.changed:
            what = f"batch=True says that rows are independent, but it writes to its buffer {self.changed[0]}"
            raise self._refusal(what, "Leave batch out")
        shapes = [list(made.shape) for made in self.made]
        if not all(shapes) or len({shape[0] for shape in shapes}) != 1:
            what = f"batch=True says that all it returns has the same rows, but the shapes are {shapes}"
            raise self._refusal(what, "Return tensors with one row for each row of the batch, or leave batch out")

    def _refusal(self, what: str, remedy: str) -> CaptureError:
        return refusal(self.path, what, remedy)

    def call(self, forward: Callable[..., Any], tensors: Sequence[Tensor]) -> Any:
        leaves = [tensors[held.index] if isinstance(held, Position) else held for held in self.arguments]
        args, kwargs = pytree.tree_unflatten(leaves, self.in_spec)
        before = [_version(tensor) for tensor in tensors]
        result = forward(*args, **kwargs)
        if before != [_version(tensor) for tensor in tensors]:
            raise self._refusal("it changes one of its arguments in place", "Write x = x + 1 instead of x += 1 there")
        return result


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


# -- while a model is traced ------------------------------------------------------------------


@contextmanager
def marking(module: nn.Module, kept: Kept, real: Mapping[str, Sequence[Seen]]) -> Iterator[None]:
    """For the length of a trace, opaque submodules put a marker in the graph. `real` is what was seen of them."""
    undo: list[tuple[dict[str, Any], Any]] = []
    try:
        for path, part in opaque_parts(module):
            slots = vars(part)
            undo.append((slots, slots.get("forward")))
            slots["forward"] = _marked(kept, path, part, part.forward, real.get(path, ()))
        yield
    finally:
        for slots, before in undo:
            del slots["forward"]
            if before is not None:
                slots["forward"] = before


def _marked(kept: Kept, path: str, part: nn.Module, original: Callable[..., Any], seen: Sequence[Seen]) -> Any:
    wish: Wish = vars(part)[MARK]

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if current() is not kept:
            return original(*args, **kwargs)
        number = sum(isinstance(call, Opaque) and call.path == path for call in kept.calls.values())
        register_containers((args, kwargs))
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        places = iter(range(len(tensors)))
        arguments = tuple(Position(next(places)) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        held = {**dict(part.named_parameters()), **dict(part.named_buffers())}
        call = Opaque(
            key=f"{path}@{number}" if number else path, path=path, batch=wish.batch, arguments=arguments, in_spec=spec,
            names=tuple(held), tensors=len(tensors),
        )  # fmt: skip
        kept.calls[call.key] = call
        if number < len(seen):
            one = seen[number]
            call.settle(one.result, one.written if wish.batch else one.buffers, known=False)
        else:
            result, changed = tried(call, [*tensors, *held.values()])
            call.settle(result, {name: held[name] for name in changed}, known=True)
        found = torch.ops.shardwright_capture.call(call.key, [*tensors, *held.values()])
        made = len(call.made) - len(call.changed)
        with torch.no_grad():
            for name, new in zip(call.changed, found[made:], strict=True):
                held[name].copy_(new)
        results = [found[leaf.index] if isinstance(leaf, Position) else leaf for leaf in call.results]
        assert call.out_spec is not None
        return pytree.tree_unflatten(results, call.out_spec)

    def tried(call: Opaque, tensors: list[Tensor]) -> tuple[Any, list[str]]:
        try:
            with paused(), _disable_current_modes(), torch._C.DisableTorchFunction():
                return _on_fakes(call, part, original, tensors)
        except CaptureError:
            raise
        except Exception as error:  # whatever it is, only a run with real data will tell
            kept.wanting = (path, error)
            raise CaptureError(f"{path} has to be seen running", path=path) from None

    return forward


def _on_fakes(
    call: Opaque, part: nn.Module, forward: Callable[..., Any], tensors: Sequence[Tensor]
) -> tuple[Any, list[str]]:
    """What the forward gives on fakes of its own, so that nothing of it is in the trace; and the buffers it changed."""
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    with mode:
        fakes = [_fake(tensor) for tensor in tensors]
        state = dict(zip(call.names, fakes[call.tensors :], strict=True))
        with placed(part, state) as body:
            with _Norms() as norms:
                result = call.call(forward, fakes[: call.tensors])
            written = [name for name, tensor in state.items() if id(tensor) in norms.written]
            return result, list(dict.fromkeys([*body.changed(call.path), *written]))


class _Norms(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Batch norms write to their statistics without a sign on fakes; this sees which they are given."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if "batch_norm" in func.__name__ and any(held is True for held in args):
            self.written.update(id(held) for held in args[3:5] if held is not None)
        return func(*args, **(kwargs or {}))


def _fake(tensor: Tensor) -> Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, tensor.requires_grad)
    return made.requires_grad_().clone() if tensor.requires_grad else made  # no leaf: it may be written to


# -- a submodule that is called with tensors from outside --------------------------------------


class Body:
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
        self.given: dict[str, tuple[Tensor, int]] = {}

    def give(self, state: Mapping[str, Tensor]) -> None:
        """Put tensors in their places (tied weights have several)."""
        self.given = {name: (tensor, _version(tensor)) for name, tensor in state.items()}
        for name, tensor in state.items():
            for owner, slots, key in self.slots[name]:
                slots[key] = tensor
                if isinstance(owner, nn.RNNBase):
                    owner._flat_weights = [getattr(owner, held, None) for held in owner._flat_weights_names]

    def now(self, name: str) -> Tensor:
        _, slots, key = self.slots[name][0]
        found: Tensor = slots[key]
        return found

    def changed(self, path: str) -> list[str]:
        """The buffers that were written to, or exchanged, since they were given."""
        found = [n for n, (tensor, v) in self.given.items() if self.now(n) is not tensor or _version(tensor) != v]
        for name in found:
            if self.slots[name][0][1] is self.slots[name][0][0]._parameters:
                raise refusal(path, f"its forward writes to its parameter {name}", "Make it a buffer (register_buffer)")
        return found


@contextmanager
def placed(part: nn.Module, state: Mapping[str, Tensor]) -> Iterator[Body]:
    """Within this a submodule has other tensors."""
    body = Body(part)
    before = {name: body.now(name) for name in state}
    body.give(state)
    try:
        yield body
    finally:
        body.give(before)


class OpaquePart:
    """An opaque submodule ready to be called: a body of its own, and how one call of it looks."""

    def __init__(self, call: Opaque, body: Body, flags: Sequence[bool], dtypes: Sequence[torch.dtype] = ()) -> None:
        self.call, self.body, self.flags = call, body, tuple(flags)
        self.path, self.names = call.path, call.names
        self.dtypes = tuple(dtypes) or tuple(made.dtype for made in call.made)

    def __call__(self, tensors: Sequence[Tensor], state: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """What the user's forward gives for these arguments, parameters and buffers, and the changed buffers.

        The tensors stay in their places afterwards: a checkpoint inside of it runs it again in backward.
        """
        call, body = self.call, self.body
        for module, flag in zip(body.part.modules(), self.flags, strict=True):
            module.training = flag
        body.give({name: held.clone() if name in call.changed else held for name, held in state.items()})
        result = call.call(body.part.forward, tensors)
        if set(body.changed(call.path)) - set(call.changed):
            raise refusal(call.path, "it changed a buffer, and did not when it was captured", "Always write to it")
        leaves, spec = pytree.tree_flatten(result)
        found = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._expect(spec, leaves, found, len(tensors))
        found += [body.now(name).detach() for name in call.changed]
        return tuple(held.to(dtype) for held, dtype in zip(found, self.dtypes, strict=True))

    def _expect(self, spec: pytree.TreeSpec, leaves: Sequence[Any], found: Sequence[Tensor], given: int) -> None:
        call = self.call
        wanted = [made.shape[1:] if call.batch else made.shape for made in call.made][: len(found)]
        shapes = [tuple(held.shape)[1:] if call.batch else tuple(held.shape) for held in found]
        rest = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        known = [leaf for leaf in call.results if not isinstance(leaf, Position)]
        if spec != call.out_spec or shapes != wanted or rest != known:
            raise InputError(
                f"the opaque submodule {call.path or 'model'} returned tensors of shapes {[list(x) for x in shapes]} "
                f"and {rest}, and when captured {[list(x) for x in wanted]} and {known}; what it returns must not "
                f"depend on data: return tensors of fixed shapes, or make its parent opaque"
            )


def runner(calls: Mapping[str, Opaque], module: nn.Module, bodies: dict[str, Body]) -> Callable[..., Any]:
    """The function behind the op "call.opaque", for whoever runs a graph op by op."""

    def run(
        key: str, batch: bool, tensors: Sequence[Tensor], names: Sequence[str], held: Sequence[Tensor], axes: Any = ()
    ) -> Any:
        call = calls[key]
        part = OpaquePart(call, bodies[call.path], [m.training for m in module.get_submodule(call.path).modules()])
        return part(tensors, dict(zip(names, held, strict=True)))

    return run


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
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ...errors import CaptureError, InputError
from ..building.call_paths import register_containers
from ..tracing.python_random import draws_kept
from .experts import fits, is_known, rule_of
from .kept import KeptCalls, Position, current, paused
from .opaque_call import OpaqueCall, forwards, placed
from .real_run import ObservedCall

MARK = "_shardwright_opaque"
Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class OpaqueRequest:
    """How an opaque submodule may be called."""

    batch: bool = False
    reason: str = ""  # why it was not captured, where nobody marked it
    experts: bool = False


def opaque(module: Module, *, batch: bool = False) -> Module:
    """Keep a submodule as it is: `model.tokenizer = sw.opaque(model.tokenizer)`. Returns the same module.

    It becomes one op that runs replicated on every device, whatever Python it is written in. With `batch` its samples
    are declared independent, and it is split on dim 0 of what it takes and returns; the claim is checked on the
    example, forward and backward, and refused if it is not true.
    """
    if not isinstance(module, nn.Module):
        raise InputError(f"sw.opaque takes a submodule, not a {type(module).__name__}; pass model.path.to.submodule")
    vars(module)[MARK] = OpaqueRequest(batch)
    return module


def experts(module: Module) -> Module:
    """Say that a submodule is a layer of experts: `model.experts = sw.experts(model.experts)`. Returns the same module.

    Its forward takes tokens [t, d], the numbers of each token's experts [t, k] and their weights [t, k], and
    returns [t, d]; its parameters hold one slice for each expert. It stays one op, which may be split on its tokens
    and, with the policy ep, on its experts. The layers of transformers are known without it.
    """
    if not isinstance(module, nn.Module):
        raise InputError(f"sw.experts takes a submodule, not a {type(module).__name__}; pass model.path.to.submodule")
    vars(module)[MARK] = OpaqueRequest(experts=True)
    return module


def opaque_request(module: nn.Module) -> OpaqueRequest | None:
    """How a submodule is opaque, if it is."""
    return vars(module).get(MARK) or (OpaqueRequest(experts=True) if is_known(module) else None)


def opaque_parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The opaque submodules, the outermost of nested ones."""
    inside: tuple[str, ...] = ()
    for path, part in module.named_modules():
        if opaque_request(part) is not None and not path.startswith(inside or ("\0",)):
            inside = (*inside, f"{path}." if path else "")
            yield path, part


# -- while a model is traced ------------------------------------------------------------------


def marking(
    module: nn.Module, user_calls: KeptCalls, real: Mapping[str, Sequence[ObservedCall]]
) -> AbstractContextManager[None]:
    """For the length of a trace, opaque submodules put a marker in the graph. `real` is what was seen of them."""
    return forwards(
        (part, _marked(user_calls, path, part, part.forward, real.get(path, ()))) for path, part in opaque_parts(module)
    )


def _marked(
    user_calls: KeptCalls, path: str, part: nn.Module, original: Callable[..., Any], seen: Sequence[ObservedCall]
) -> Any:
    request = opaque_request(part)
    assert request is not None

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if current() is not user_calls:
            return original(*args, **kwargs)
        if request.experts and not fits(pytree.tree_leaves((args, kwargs))):
            if MARK in vars(part):
                what = "its forward does not take tokens [t, d], the experts of each [t, k] and their weights [t, k]"
                raise CaptureError(f"{path} is no layer of experts: {what}.", path=path)
            return original(*args, **kwargs)
        number = sum(isinstance(call, OpaqueCall) and call.path == path for call in user_calls.calls.values())
        register_containers((args, kwargs))
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        places = iter(range(len(tensors)))
        arguments = tuple(Position(next(places)) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        state = {**dict(part.named_parameters()), **dict(part.named_buffers())}
        call = OpaqueCall(
            key=f"{path}@{number}" if number else path, path=path, batch=request.batch, arguments=arguments,
            in_spec=spec, names=tuple(state), tensors=len(tensors),
            rule=rule_of(part, state) if request.experts else "",
            lasting=MARK in vars(part),  # layers of transformers that are known have no checkpoints inside
        )  # fmt: skip
        user_calls.calls[call.key] = call
        if request.experts:
            call.settle_as(tensors[0])
        elif number < len(seen):
            observed = seen[number]
            call.settle(observed.result, observed.written if request.batch else observed.buffers, known=False)
        else:
            result, changed = tried(call, [*tensors, *state.values()])
            call.settle(result, {name: state[name] for name in changed}, known=True)
        outputs = torch.ops.shardwright_capture.call(call.key, [*tensors, *state.values()])
        returned = len(call.outputs) - len(call.changed)
        with torch.no_grad():
            for name, new in zip(call.changed, outputs[returned:], strict=True):
                state[name].copy_(new)
        results = [outputs[leaf.index] if isinstance(leaf, Position) else leaf for leaf in call.results]
        assert call.out_spec is not None
        return pytree.tree_unflatten(results, call.out_spec)

    def tried(call: OpaqueCall, tensors: list[Tensor]) -> tuple[Any, list[str]]:
        try:
            with paused(), _disable_current_modes(), torch._C.DisableTorchFunction(), draws_kept():
                return _on_fakes(call, part, original, tensors)
        except CaptureError:
            raise
        except Exception as error:  # whatever it is, only a run with real data will tell
            user_calls.wanting = (path, error)
            raise CaptureError(f"{path} has to be seen running", path=path) from None

    return forward


def _on_fakes(
    call: OpaqueCall, part: nn.Module, forward: Callable[..., Any], tensors: Sequence[Tensor]
) -> tuple[Any, list[str]]:
    """What the forward returns on fake tensors of its own, outside of the trace, and the buffers it changed."""
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
        if "batch_norm" in func.__name__ and any(argument is True for argument in args):
            self.written.update(id(argument) for argument in args[3:5] if argument is not None)
        return func(*args, **(kwargs or {}))


def _fake(tensor: Tensor) -> Tensor:
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, tensor.requires_grad)
    return fake.requires_grad_().clone() if tensor.requires_grad else fake  # no leaf: it may be written to

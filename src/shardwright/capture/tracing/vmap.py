"""`torch.vmap` while a model is traced: the result is ops on batches.

Export would note down functorch's own bookkeeping instead of tensor ops. So a vmapped function is traced here by
itself, below functorch, where every op has its batch dim, and the ops that come out are run in its place. What the
function closes over (weights of the model) is met there as it is, so that gradients go to it.

Transforms that differentiate inside of the model (`torch.func.grad`, `vjp`, `jvp`, `jacrev`) are refused: a trace of a
backward drops the gradients of what was saved for it, and training through it would silently lose terms.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import fx
from torch._functorch import apis, eager_transforms
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ...errors import CaptureError
from ..user_calls.kept import KeptCalls, current
from .grad_mode import grad_is_off
from .node_notes import NO_GRAD, set_note

_NESTED = ("grad_increment_nesting", "jvp_increment_nesting")


@contextmanager
def vectorizing(user_calls: KeptCalls) -> Iterator[None]:
    """For the length of a trace, vmap is the ops that it comes to, and derivatives inside of a model are refused."""
    patched: Any = apis
    transforms: Any = eager_transforms
    vmap = patched.vmap_impl
    nested = {name: getattr(transforms, name) for name in _NESTED}
    inside = False

    def vmap_seen(
        func: Any, in_dims: Any, out_dims: Any, randomness: str, chunk_size: Any, *args: Any, **kw: Any
    ) -> Any:
        nonlocal inside
        if current() is not user_calls or inside or torch.compiler.is_dynamo_compiling():
            return vmap(func, in_dims, out_dims, randomness, chunk_size, *args, **kw)
        inside = True
        try:
            return _batched(lambda *a, **k: vmap(func, in_dims, out_dims, randomness, chunk_size, *a, **k), args, kw)
        finally:
            inside = False

    def refuse(*_: Any) -> NoReturn:
        raise CaptureError(
            "it differentiates inside of the model (torch.func.grad, vjp, jvp, jacrev, ...), and a graph has no "
            "backward in it. Write the derivative with plain tensor operations, compute it in the training loop with "
            "torch.autograd.grad(..., create_graph=True), or keep the submodule out with sw.opaque(submodule)."
        )

    def refuse_seen(name: str) -> Any:
        return lambda *args: refuse() if current() is user_calls else nested[name](*args)

    try:
        patched.vmap_impl = vmap_seen
        for name in _NESTED:
            setattr(transforms, name, refuse_seen(name))
        yield
    finally:
        patched.vmap_impl = vmap
        for name, original in nested.items():
            setattr(transforms, name, original)


class _NotedGradMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes on every node whether gradients are on; a trace below functorch has no regions of `no_grad`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = set_note(NO_GRAD, not torch.is_grad_enabled())
        try:
            return func(*args, **(kwargs or {}))
        finally:
            set_note(NO_GRAD, before)


class _Again(fx.Interpreter):
    """Runs the ops of a trace, each with gradients on or off as they were."""

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "call_function" and grad_is_off(n, False) and torch.is_grad_enabled():
            with torch.no_grad():
                return super().run_node(n)
        return super().run_node(n)


def _batched(call: Any, args: Any, kwargs: Any) -> Any:
    """A call of a vmapped function as ops on batches, in the place of the call."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    returned: list[Any] = []

    def flat(*tensors: torch.Tensor) -> list[Any]:
        inputs = list(leaves)
        for at, tensor in zip(places, tensors, strict=True):
            inputs[at] = tensor
        a, k = pytree.tree_unflatten(inputs, spec)
        with _NotedGradMode():  # type: ignore[no-untyped-call]
            outputs, made_spec = pytree.tree_flatten(call(*a, **k))
        returned[:] = [made_spec]
        return outputs

    tensors = [leaves[at] for at in places]
    with _disable_current_modes(), torch._C.DisableTorchFunction(), traceback.preserve_node_meta():
        graph = make_fx(flat, tracing_mode="real", _allow_non_fake_inputs=True)(*tensors)
    results = _Again(graph).run(*tensors)  # in the trace of the model
    return pytree.tree_unflatten(list(results), returned[0])

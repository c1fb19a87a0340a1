"""Deferred weight gradients, so that a schedule can compute them when a rank would be idle.

The backward of a matmul has two halves of the same size: the gradient of its input, which
the previous stage is waiting for, and that of its weight, which nobody needs before the end of
the step. A `WeightGradientQueue` has the matmuls and convolutions of a model as methods. While it
collects, their backward computes only the gradient of the input, and queues (input, output's
gradient); `run` does the rest of a microbatch. Otherwise they are the plain ops.

    B of stage 1    dx = dy W                     W of stage 1    dW += dyᵀ x,  db += Σ dy

Only for weights that are leaves: what is computed from a parameter (a cast, a gather) has a
backward of its own, which is not put off.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

Deferred = Callable[[], None]


class WeightGradientQueue:
    """The weights' gradients that a stage still owes, by microbatch."""

    def __init__(self) -> None:
        self.collects = False
        self.microbatch = 0  # whose backward runs
        self._owed: dict[int, list[Deferred]] = defaultdict(list)

    def put(self, deferred: Deferred) -> None:
        """Owe something to the microbatch whose backward runs."""
        self._owed[self.microbatch].append(deferred)

    @torch.no_grad()
    def run(self, microbatch: int) -> None:
        """Add what is owed of a microbatch to the `.grad` of its weights."""
        for deferred in self._owed.pop(microbatch, ()):
            deferred()

    def clear(self) -> None:
        """Owe nothing, after a run that broke off."""
        self._owed.clear()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`F.linear`."""
        if not self._puts_off(x, weight, bias):
            return F.linear(x, weight, bias)
        y: Tensor = _DeferredMatmul.apply(self, x, weight, bias, True)  # type: ignore[no-untyped-call]
        return y

    def mm(self, x: Tensor, weight: Tensor) -> Tensor:
        """`x @ weight`, with any number of leading dims of x."""
        if weight.ndim != 2 or not self._puts_off(x, weight, None):
            return x @ weight
        y: Tensor = _DeferredMatmul.apply(self, x, weight, None, False)  # type: ignore[no-untyped-call]
        return y

    def addmm(self, bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """`torch.addmm` of a bias that is one row."""
        if bias.ndim != 1 or bias.shape != weight.shape[1:] or not self._puts_off(x, weight, bias):
            return torch.addmm(bias, x, weight)
        y: Tensor = _DeferredMatmul.apply(self, x, weight, bias, False)  # type: ignore[no-untyped-call]
        return y

    def convolution(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Sequence[int] = (1,),
        padding: Sequence[int] = (0,),
        dilation: Sequence[int] = (1,),
        transposed: bool = False,
        output_padding: Sequence[int] = (0,),
        groups: int = 1,
    ) -> Tensor:
        """`torch.convolution`."""
        rest = (list(stride), list(padding), list(dilation), transposed, list(output_padding), groups)
        if not self._puts_off(x, weight, bias):
            return torch.ops.aten.convolution.default(x, weight, bias, *rest)  # type: ignore[no-any-return]
        y: Tensor = _DeferredConvolution.apply(self, x, weight, bias, rest)  # type: ignore[no-untyped-call]
        return y

    def conv1d(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, **how: Any) -> Tensor:
        """`F.conv1d`."""
        return self._convolution(F.conv1d, x, weight, bias, **how)

    def conv2d(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, **how: Any) -> Tensor:
        """`F.conv2d`."""
        return self._convolution(F.conv2d, x, weight, bias, **how)

    def conv3d(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, **how: Any) -> Tensor:
        """`F.conv3d`."""
        return self._convolution(F.conv3d, x, weight, bias, **how)

    def _convolution(
        self,
        plain: Callable[..., Tensor],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: int | Sequence[int] = 1,
        padding: int | str | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
    ) -> Tensor:
        if isinstance(padding, str) or x.ndim != weight.ndim:  # padding by words, or no batch
            return plain(x, weight, bias, stride, padding, dilation, groups)
        dims = weight.ndim - 2
        steps, around, apart = ((n,) * dims if isinstance(n, int) else n for n in (stride, padding, dilation))
        return self.convolution(x, weight, bias, steps, around, apart, output_padding=(0,) * dims, groups=groups)

    def _puts_off(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        return (
            self.collects
            and torch.is_grad_enabled()
            and _owes(weight)
            and (bias is None or not bias.requires_grad or _owes(bias))
            and not torch.is_autocast_enabled(x.device.type)
        )


def _owes(weight: Tensor) -> bool:
    return weight.is_leaf and weight.requires_grad


def add_gradient(leaf: Tensor, gradient: Tensor) -> None:
    """As autograd does at the end of a backward."""
    leaf.grad = gradient.to(leaf.grad_dtype) if leaf.grad is None else leaf.grad.add_(gradient)


class _DeferredMatmul(torch.autograd.Function):
    """x Wᵀ + b (`transposed`: weights as `F.linear` has them) or x W + b."""

    @staticmethod
    def forward(
        ctx: Any, queue: WeightGradientQueue, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool
    ) -> Tensor:
        ctx.queue, ctx.transposed, ctx.leaves = queue, transposed, (weight, bias)
        ctx.save_for_backward(x, weight)
        if transposed:
            return F.linear(x, weight, bias)
        return x @ weight if bias is None else torch.addmm(bias, x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, used = ctx.saved_tensors
        weight, bias = ctx.leaves
        transposed = ctx.transposed

        def add_weight_gradient() -> None:
            flat, inputs = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
            left, right = (flat, inputs) if transposed else (inputs, flat)
            if weight.grad is None or weight.grad.dtype != left.dtype:
                add_gradient(weight, left.t() @ right)
            else:
                weight.grad.addmm_(left.t(), right)
            if bias is not None and bias.requires_grad:
                add_gradient(bias, flat.sum(0))

        ctx.queue.put(add_weight_gradient)
        needed = ctx.needs_input_grad[1]
        return None, (gradient @ (used if transposed else used.t())) if needed else None, None, None, None


class _DeferredConvolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, queue: WeightGradientQueue, x: Tensor, weight: Tensor, bias: Tensor | None, rest: tuple[Any, ...]
    ) -> Tensor:
        ctx.queue, ctx.rest, ctx.leaves = queue, rest, (weight, bias)
        ctx.save_for_backward(x, weight)
        return torch.ops.aten.convolution.default(x, weight, bias, *rest)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, used = ctx.saved_tensors
        weight, bias = ctx.leaves
        sizes = None if bias is None else list(bias.shape)
        back = torch.ops.aten.convolution_backward.default
        rest = ctx.rest

        def add_weight_gradient() -> None:
            with_bias = bias is not None and bias.requires_grad
            _, dw, db = back(gradient, x, used, sizes, *rest, [False, True, with_bias])
            add_gradient(weight, dw)
            if with_bias:
                add_gradient(bias, db)

        ctx.queue.put(add_weight_gradient)
        dx = None
        if ctx.needs_input_grad[1]:
            dx = back(gradient, x, used, sizes, *rest, [True, False, False])[0]
        return None, dx, None, None, None

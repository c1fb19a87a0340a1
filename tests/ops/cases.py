"""What is tried: the samples of torch's own tests, each as a tiny module that calls the op with tensors as inputs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal import common_methods_invocations, common_modules
from torch.utils import _pytree as pytree

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
OTHERWISE = (torch.int64, torch.bool, torch.complex128)
"""For an op that takes none of the dtypes above, the first of these that it takes."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One call: a module, the tensors that it is called with, and how people find it again."""

    subject: str  # the op or module, such as "nn.functional.pad.reflect"
    number: int
    dtype: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.subject} #{self.number} {self.dtype}"


class OpCall(nn.Module):
    """An op as a model. The op is in a closure, so that copies of the module share it."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *tensors: Tensor) -> Any:
        return self.call(*tensors)


@cache
def ops() -> dict[str, Any]:
    """torch's ops by name; variants have their name behind a dot.

    Those that draw are wrapped to seed the generator first, which a program does by itself: here they are not.
    """
    common_methods_invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    return {
        f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name: op
        for op in common_methods_invocations.op_db
    }


@cache
def modules() -> dict[str, Any]:
    return {info.name: info for info in common_modules.module_db}


def dtype_for(op: Any, wanted: str) -> torch.dtype | None:
    """The dtype to try an op in; None if it is not for this op."""
    if op.supports_dtype(DTYPES[wanted], "cpu"):
        return DTYPES[wanted]
    if wanted != "float64":
        return None
    return next((dtype for dtype in (torch.float32, *OTHERWISE) if op.supports_dtype(dtype, "cpu")), None)


def op_samples(name: str, dtype: str, limit: int | None = None) -> Iterator[Sample]:
    """The samples of an op, in torch's order."""
    op = ops()[name]
    kind = dtype_for(op, dtype)
    if kind is None:
        return
    gradient = op.supports_autograd and (kind.is_floating_point or kind.is_complex)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        built = list(islice(op.sample_inputs("cpu", kind, requires_grad=gradient), limit))
    for number, sample in enumerate(built):
        leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        module = OpCall(_bound(op.op, leaves, spec))
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
        yield Sample(
            subject=name, number=number, dtype=str(kind).removeprefix("torch."), module=module, args=tensors
        )  # fmt: skip


def _bound(op: Callable[..., Any], leaves: list[Any], spec: pytree.TreeSpec) -> Callable[..., Any]:
    """The op as a function of its tensors alone."""

    def call(*tensors: Tensor) -> Any:
        inputs = iter(tensors)
        first, args, kwargs = pytree.tree_unflatten(
            [next(inputs) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec
        )
        return op(first, *args, **kwargs)

    return call


def module_samples(name: str, dtype: str, limit: int | None = None) -> Iterator[Sample]:
    """The samples of a module, in training and, where that differs, in evaluation."""
    info = modules()[name]
    if DTYPES[dtype] not in info.dtypes:
        return
    number = 0
    for training in (True, False) if info.train_and_eval_differ else (True,):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            inputs = info.module_inputs_func(info, "cpu", DTYPES[dtype], True, training)
        for value in islice(inputs, limit):
            if value.forward_input is None:
                continue
            arguments, call = value.constructor_input, value.forward_input
            torch.manual_seed(number)
            model = info.module_cls(*arguments.args, **arguments.kwargs).to("cpu", DTYPES[dtype]).train(training)
            yield Sample(
                subject=name, number=number, dtype=dtype, module=model, args=tuple(call.args), kwargs=dict(call.kwargs)
            )  # fmt: skip
            number += 1

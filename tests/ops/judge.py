"""One sample, compiled by `sw.parallelize` for one device and run from its generated file, beside eager.

right     outputs, gradients and buffers are those of eager
drawn     right, but random numbers could be compared in shape and dtype only
refused   an error of our tree
wrong     other numbers, shapes, dtypes or gradients
foreign   an error that is not one of ours
skipped   eager itself can't do it

In a narrow dtype two right results may differ by more than the tolerance: a gradient that cancels, a logit that is
rounded once or twice. Such a sample is run by eager in float64 as well, and is right where the program is no farther
from that than eager in the narrow dtype.
"""

from __future__ import annotations

import copy
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwright.errors import ShardwrightError
from shardwright.parallelize import parallelize
from shardwright.rules import is_random
from shardwright.runtime.algorithms.random import Randomness
from tests.ops.cases import Sample
from tests.ops.expectations import undefined

Kind = Literal["right", "drawn", "refused", "wrong", "foreign", "skipped"]

TOLERANCE = {
    torch.float64: 1e-10, torch.complex128: 1e-10, torch.float32: 1e-5, torch.complex64: 1e-5, torch.bfloat16: 2e-2,
    torch.float16: 2e-3,
}  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    kind: Kind
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a call gave: its results, the gradients of inputs and parameters, the buffers afterwards."""

    result: Any
    gradients: list[Tensor | None]
    buffers: list[Tensor]


class EagerFails(Exception):
    """What is compared with can't run."""


def judge(sample: Sample, folder: Path) -> Verdict:
    """Compile a sample for one device, and hold it against eager."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            wanted = run_eager(sample)
        except EagerFails as error:
            return Verdict("skipped", str(error))
        return decided(sample, folder, wanted)


def decided(sample: Sample, folder: Path, wanted: Run) -> Verdict:
    """What to say of a sample that eager can do."""
    model = parallelize(copy.deepcopy(sample.module), plan="single", compile={"directory": folder})
    try:
        actual = run_call(model, model, sample)
    except ShardwrightError as error:
        return Verdict("refused", f"{type(error).__name__}: {error}")
    except Exception as error:  # whatever it is, a user would see it
        return Verdict("foreign", described(error))
    drawn = [op for op in model._around["compiler"].programs[0].graph.ops if op.draws]
    if not drawn and not undefined(sample.subject):
        off = difference(actual, wanted)
        if off:
            off = difference(actual, wanted, exact=run_wide(sample))
        return Verdict("wrong", off) if off else Verdict("right")
    if len(drawn) == 1 and is_random(drawn[0]):
        off = difference(actual, _drawing_alike(sample, model.random, drawn[0].name))
        return Verdict("wrong", off) if off else Verdict("right")
    off = difference(actual, wanted, values=False)
    return Verdict("wrong", off) if off else Verdict("drawn")


def _drawing_alike(sample: Sample, random: Randomness, op: str) -> Run:
    """Eager with the random numbers that a program draws for an op."""
    with random.drawing(op):
        return run_eager(sample)


def described(error: BaseException) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error).strip()[:300]} ({where.filename.rsplit('/', 1)[-1]}:{where.lineno})"


def run_eager(sample: Sample) -> Run:
    module = copy.deepcopy(sample.module)
    try:
        return run_call(module, module, sample)
    except Exception as error:  # torch's samples have some that it refuses itself
        raise EagerFails(described(error)) from error


def run_wide(sample: Sample) -> Run | None:
    """Eager in float64 on the values of a sample of a narrow dtype; None where eager can't do it."""
    if sample.dtype not in ("float32", "bfloat16"):
        return None
    args, kwargs = pytree.tree_map_only(Tensor, _widened, (sample.args, sample.kwargs))
    try:
        return run_eager(replace(sample, module=copy.deepcopy(sample.module).double(), args=args, kwargs=kwargs))
    except EagerFails:
        return None


def _widened(x: Tensor) -> Tensor:
    wide = torch.complex128 if x.is_complex() else torch.float64 if x.is_floating_point() else x.dtype
    return x.detach().to(wide).requires_grad_(x.requires_grad)


def run_call(call: Callable[..., Any], module: nn.Module, sample: Sample) -> Run:
    """Forward, and backward of a fixed mix of whatever has a gradient."""
    leaves, spec = pytree.tree_flatten((sample.args, sample.kwargs))
    fresh = [leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
             for leaf in leaves]  # fmt: skip
    args, kwargs = pytree.tree_unflatten(fresh, spec)
    result = call(*args, **kwargs)
    wanted = [leaf for leaf in fresh if isinstance(leaf, Tensor) and leaf.requires_grad]
    wanted += [parameter for parameter in module.parameters() if parameter.requires_grad]
    return Run(
        result=pytree.tree_map_only(Tensor, Tensor.detach, result),
        gradients=gradients_of(pytree.tree_leaves(result), wanted),
        buffers=[buffer.detach().clone() for buffer in module.buffers()],
    )


def gradients_of(results: Sequence[Any], wanted: Sequence[Tensor]) -> list[Tensor | None]:
    values = [x for x in results if isinstance(x, Tensor) and x.requires_grad]
    if not values or not wanted:
        return [None] * len(wanted)
    total = torch.stack([mixed(x) for x in values]).sum()
    return list(torch.autograd.grad(total, wanted, allow_unused=True))


def mixed(x: Tensor) -> Tensor:
    """A number that every element of a tensor goes into with a weight of its own."""
    weights = torch.arange(1, x.numel() + 1, dtype=torch.float64).cos().view(x.shape)
    parts = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    weights = torch.stack([weights, 2 * weights], -1) if x.is_complex() else weights
    return (parts.double() * weights).sum()


def difference(actual: Run, wanted: Run, *, values: bool = True, exact: Run | None = None) -> str:
    """What is off, in words; nothing if all agrees. Without `values`, shapes and dtypes alone are looked at.

    exact    the same in float64: what is as near to it as `wanted` is right
    """
    mine, theirs = pytree.tree_flatten(actual.result), pytree.tree_flatten(wanted.result)
    if str(mine[1]) != str(theirs[1]):
        return f"the result is {mine[1]}, not {theirs[1]}"
    runs = [_named(run) for run in (actual, wanted, exact) if run is not None]
    for (name, x), (_, y), *wide in zip(*runs, strict=True):
        off = apart(x, y, values)
        if off and not any(no_farther(x, y, z) for _, z in wide):
            return f"{name} {off}"
    return ""


def _named(run: Run) -> list[tuple[str, Any]]:
    """All that a run gave, each under its name."""
    groups = (("result", pytree.tree_leaves(run.result)), ("gradient", run.gradients), ("buffer", run.buffers))
    return [(f"{group} {at}", leaf) for group, leaves in groups for at, leaf in enumerate(leaves)]


def no_farther(mine: Any, theirs: Any, exact: Any) -> bool:
    """Whether a floating point result is no farther from the one of float64 than eager's in the narrow dtype."""
    if not all(isinstance(x, Tensor) and x.is_floating_point() for x in (mine, theirs, exact)):
        return False
    if mine.dtype != theirs.dtype or not mine.shape == theirs.shape == exact.shape:
        return False
    off, rounding = (float((x.double() - exact).abs().max()) for x in (mine, theirs))
    return off <= rounding  # not if one of them is NaN


def apart(mine: Any, theirs: Any, values: bool = True) -> str:
    """How two results differ; nothing if they don't."""
    if not isinstance(mine, Tensor) or not isinstance(theirs, Tensor):
        same = type(mine) is type(theirs) and (mine == theirs or mine != mine)
        return "" if same else f"is {_short(mine)}, not {_short(theirs)}"
    if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
        return f"is {list(mine.shape)} {mine.dtype}, not {list(theirs.shape)} {theirs.dtype}"
    if not values or not theirs.numel():
        return ""
    if not (theirs.is_floating_point() or theirs.is_complex()):
        other = int((mine != theirs).sum())
        return f"differs in {other} of {theirs.numel()} elements" if other else ""
    wide = torch.complex128 if theirs.is_complex() else torch.float64
    x, y = mine.to(wide), theirs.to(wide)
    even = (x == y) | (x.isnan() & y.isnan())
    if bool(even.all()):
        return ""
    finite = y[y.isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 0.0
    off = float((x - y)[~even].abs().nan_to_num(torch.inf).max())
    return "" if off <= TOLERANCE[theirs.dtype] * scale else f"is off by {off:.3g}, at a scale of {scale:.3g}"


def _short(value: Any) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)[:60]

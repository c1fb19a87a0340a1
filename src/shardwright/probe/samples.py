"""Inputs to probe an op with: the call at small sizes, and random tensors for it.

Real sizes are too slow to probe, so sizes, and integers among the arguments, are mapped to small ones:
equal ones stay equal, larger ones stay larger, a product of two others stays their product, and
numbers up to 3 stay as they are. Calling the op shows whether it accepts that. A call that is small
enough is probed as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..ir import Op, Value
from ..rules import OpCall
from .check import Run, backward, informative

SMALL = 2_000
"""Maximum elements of all tensors of a call that is probed as it is."""

LARGE = 100_000
"""Maximum elements of a call that is probed as it is if it can't be made smaller."""

KINDS = (("normal", True), ("positive", True), ("normal", False))
"""The kinds of random numbers that are tried, each in float64 or in the dtype of the call."""

Provided = Callable[[int], tuple[OpCall, list[Tensor]]]
PROVIDED: dict[str, Provided] = {}
"""Ops whose user draws the inputs, by target: a call and its tensors for a seed."""


class NotProbed(Exception):
    """Why an op can't be probed."""


@dataclass(frozen=True)
class Sample:
    """A call at sizes at which it runs. `real` maps a size of the sample to the real one."""

    call: OpCall
    real: dict[int, int]
    kind: str = "normal"
    wide: bool = True
    provided: Provided | None = None

    def draw(self, seed: int) -> list[Tensor]:
        """Random inputs, the same for the same seed."""
        if self.provided is not None:
            return self.provided(seed)[1]
        generator = torch.Generator().manual_seed(seed)
        top = _safe_top(self.call.inputs)
        return [_tensor(value, top, self.kind, self.wide, generator) for value in self.call.inputs]


def make_sample(call: OpCall, run: Run) -> Sample:
    """The call at small sizes at which it runs; NotProbed if there are none."""
    if call.op.target in PROVIDED:
        return _provided(call, PROVIDED[call.op.target])
    if not call.inputs:
        raise NotProbed("it reads no tensor")
    if any(0 in value.shape for value in call.inputs):
        raise NotProbed("an input is empty")
    elements = sum(value.elements for value in (*call.inputs, *call.outputs))
    error: Exception | None = None
    for sample in _tries(call, elements):
        try:
            outputs = run(sample.call.op, sample.draw(0))
        except Exception as refusal:  # an op may reject sizes or values with any error
            error = error or refusal
            continue
        if _alike(outputs, call.outputs):
            if _proves(sample, run):
                return _with_outputs(sample, call, outputs)
            error = error or ValueError("its result or a gradient has no finite element")
    if error is None or elements > LARGE:
        raise NotProbed(f"it has {elements} elements and does not run with fewer" + (f" ({error})" if error else ""))
    raise NotProbed(f"it can't be called with random inputs: {str(error).splitlines()[0]}")


def is_finite_somewhere(sample: Sample, run: Run, seed: int) -> bool:
    """Whether each result and gradient has a finite element: numbers may be outside of the op's domain."""
    values = sample.call.inputs
    inputs = [x.requires_grad_(v.gradient and v.floating) for x, v in zip(sample.draw(seed), values, strict=True)]
    outputs = run(sample.call.op, inputs)
    gradients = backward(outputs, [torch.ones_like(y) if y.is_floating_point() else None for y in outputs], inputs)
    return all(informative(x) for x in (*outputs, *gradients) if x is not None)


def _proves(sample: Sample, run: Run) -> bool:
    try:
        return is_finite_somewhere(sample, run, 0)
    except Exception:  # whoever probes the op says why its backward does not run
        return True


def smallest_sample(call: OpCall, run: Run, accept: Callable[[Sample], bool]) -> Sample:
    """The call at the smallest sizes at which it runs and is accepted; may raise NotProbed."""
    infinite: Sample | None = None
    for image in (_distinct(call), _images(call)):
        for kind, wide in KINDS:
            sample = _mapped(call, image, kind, wide)
            if sum(value.elements for value in (*sample.call.inputs, *sample.call.outputs)) > LARGE // 4:
                continue
            try:
                outputs = run(sample.call.op, sample.draw(0))
            except Exception:  # an op may reject sizes or values with any error
                continue
            sample = _with_outputs(sample, call, outputs)
            if _alike(outputs, call.outputs) and accept(sample):
                if all(map(informative, outputs)):
                    return sample
                infinite = infinite or sample
    if infinite is not None:  # its shapes can be checked
        return infinite
    raise NotProbed("it does not run at small sizes")


def _distinct(call: OpCall) -> dict[int, int]:
    """A small size for every size and number, in order, ignoring products."""
    dims = {size for value in (*call.inputs, *call.outputs) for size in value.shape}
    named = {number for _, number in numbers(call.op) if 1 < number <= max(dims, default=1)}
    return {size: min(size, 4 + at) if size > 3 else size for at, size in enumerate(sorted(dims | named))}


def _with_outputs(sample: Sample, call: OpCall, outputs: Sequence[Tensor]) -> Sample:
    """The sample with the shapes of its actual outputs."""
    pairs = zip(call.outputs, outputs, strict=False)
    values = tuple(replace(value, shape=tuple(x.shape)) for value, x in pairs)
    return replace(sample, call=OpCall(sample.call.op, sample.call.inputs, values))


def _provided(call: OpCall, draw: Provided) -> Sample:
    """The user's own inputs. Their sizes map to real ones by position."""
    drawn, _ = draw(0)
    if [len(x.shape) for x in drawn.inputs] != [len(x.shape) for x in call.inputs]:
        raise NotProbed("the inputs passed for probing don't match the call")
    values = zip((*drawn.inputs, *drawn.outputs), (*call.inputs, *call.outputs), strict=True)
    pairs = [(small, real) for small, real in values if len(small.shape) == len(real.shape)]
    real = {small: other for x, y in pairs for small, other in zip(x.shape, y.shape, strict=True)}
    inputs, outputs = (
        tuple(replace(x, gradient=y.gradient) for x, y in zip(ours, theirs, strict=True))
        for ours, theirs in ((drawn.inputs, call.inputs), (drawn.outputs, call.outputs))
    )
    return Sample(OpCall(drawn.op, inputs, outputs), real, provided=draw)


def _tries(call: OpCall, elements: int) -> Iterator[Sample]:
    sizes = {size for value in (*call.inputs, *call.outputs) for size in value.shape}
    for kind, wide in KINDS:
        same = Sample(call, {size: size for size in sizes}, kind, wide)
        if elements <= SMALL:
            yield same
            continue
        yield _mapped(call, _images(call), kind, wide)
        if elements <= LARGE:
            yield same


def numbers(op: Op) -> Iterator[tuple[str, int]]:
    """The integers among an op's arguments, by path: "num_heads", or "size.2" in a list."""
    for name, value in op.arguments:
        if type(value) is int:
            yield name, value
        elif isinstance(value, tuple):
            yield from ((f"{name}.{at}", item) for at, item in enumerate(value) if type(item) is int)


def with_numbers(op: Op, changes: dict[str, int]) -> Op:
    """The op with other numbers at some paths."""
    arguments = dict(op.arguments)
    for path, number in changes.items():
        name, _, at = path.partition(".")
        if at:
            items = list(arguments[name])
            items[int(at)] = number
            arguments[name] = tuple(items)
        else:
            arguments[name] = number
    return replace(op, arguments=tuple(arguments.items()))


def _images(call: OpCall) -> dict[int, int]:
    """A small size for every size and number: products stay products, and larger ones stay larger."""
    dims = {size for value in (*call.inputs, *call.outputs) for size in value.shape}
    named = {number for _, number in numbers(call.op) if 1 < number <= max(dims, default=1)}
    image = {size: size for size in (*dims, *named) if size <= 3}
    top = 3
    for size in sorted((dims | named) - set(image)):
        factors = [factor for factor in sorted(image, reverse=True) if factor > 1 and size % factor == 0]
        unit = next(
            (image[factor] for factor in factors if factor in named and factor > 3), 1
        )  # groups divide the channels
        pairs = (image[factor] * image[size // factor] for factor in factors if size // factor in image)
        larger = next((pair for pair in pairs if pair > top and pair % unit == 0), 0)
        image[size] = top = larger or unit * (top // unit + 1)
    return {size: min(size, small) for size, small in image.items()}


def _mapped(call: OpCall, image: dict[int, int], kind: str, wide: bool) -> Sample:
    def small(value: Value) -> Value:
        return replace(value, shape=tuple(image[size] for size in value.shape))

    op = with_numbers(call.op, {path: image[number] for path, number in numbers(call.op) if number in image})
    mapped = OpCall(op, tuple(map(small, call.inputs)), tuple(map(small, call.outputs)))
    return Sample(mapped, {small: size for size, small in image.items()}, kind, wide)


def _alike(results: Sequence[Tensor], outputs: Sequence[Value]) -> bool:
    """Whether the outputs match the real call in number, in dims, and in which dims have size 1."""
    return [[size == 1 for size in x.shape] for x in results] == [[size == 1 for size in y.shape] for y in outputs]


def _safe_top(inputs: Sequence[Value]) -> int:
    """Integers below this can index any dim of the float inputs."""
    sizes = [size for value in inputs if value.floating for size in value.shape if size > 1]
    return max(2, min(sizes, default=4))


def _tensor(value: Value, top: int, kind: str, wide: bool, generator: torch.Generator) -> Tensor:
    if value.floating:
        complex_ = value.dtype.startswith("complex")
        dtype: Any = (torch.complex128 if complex_ else torch.float64) if wide else getattr(torch, value.dtype)
        if kind == "positive" and not complex_:
            return (0.05 + 0.9 * torch.rand(value.shape, generator=generator, dtype=torch.float64)).to(dtype)
        drawn = torch.complex128 if complex_ else torch.float64
        return torch.randn(value.shape, generator=generator, dtype=drawn).to(dtype)
    if value.dtype == "bool":
        return torch.rand(value.shape, generator=generator) < 0.5
    return torch.randint(top, value.shape, generator=generator).to(getattr(torch, value.dtype))

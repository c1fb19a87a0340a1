"""Measures one device: products, attention, pointwise ops and copies, by size and dtype, as they run in training.

All ranks measure at once, since in training they compete for the memory too; the slowest counts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..cluster import USUAL_OVERLAP, AttentionPrice, Curve, Device, Efficiency, Kind
from ..cluster.catalogue import matching
from ..runtime import accelerator
from .timing import Effort, seconds

HEADS, HEAD = 4, 64
PRODUCTS = ("matmul", "attention", "convolution")
FRESH = 4  # times that the operands of pointwise ops are larger than others, to get fresh pages
ONCE: tuple[Kind, ...] = ("convolution", "function", "pooling", "copy")  # in float32 alone, for all dtypes


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One kind of op in one dtype: (flops or bytes, seconds), sizes growing."""

    kind: Kind
    dtype: str
    points: tuple[tuple[float, float], ...]

    @property
    def rates(self) -> tuple[tuple[float, float], ...]:
        return tuple((size, size / time) for size, time in self.points)


def is_crowded(device: torch.device, ranks: int) -> bool:
    """Whether the ranks of a machine have more threads than it has cores."""
    return device.type == "cpu" and ranks * torch.get_num_threads() > (os.cpu_count() or 1)


def measure_ops(
    device: torch.device, effort: Effort, advance: Callable[[str], None], crowded: bool = False
) -> tuple[Series, ...]:
    """Every series on one device, in the order in which they are reported."""
    efficiencies = []
    for kind, dtype in series_of(effort):
        advance(f"{kind} {name_of(dtype)}")
        points = []
        for call in _sizes(kind, dtype, device, effort):
            time = seconds(call.run, device, effort, crowded=crowded)
            points.append((call.size, time / call.passes))
            if time > effort.longest:
                break
        efficiencies.append(Series(kind=kind, dtype=name_of(dtype), points=tuple(points)))
    return tuple(efficiencies)


def measure_edge(device: torch.device, measured: tuple[Series, ...], effort: Effort, crowded: bool = False) -> float:
    """The smallest side at which a product reaches half of what a square one of as many flops does."""
    squares = next(series for series in measured if series.kind == "matmul" and series.dtype == "float32")
    curve = Curve(squares.points)
    samples, side = 64, 1024
    a, b = torch.rand(samples, side, device=device), torch.rand(side, side, device=device)
    thin = seconds(lambda: a @ b, device, effort, crowded=crowded)
    expected = curve.at(2.0 * samples * side * side)
    return float(f"{max(0.0, samples * (thin / expected - 1.0)):.3g}")


def series_of(effort: Effort) -> list[tuple[Kind, torch.dtype]]:
    kinds: tuple[Kind, ...] = ("matmul", "attention", "pointwise")
    return [*((kind, dtype) for kind in kinds for dtype in effort.dtypes), *((kind, torch.float32) for kind in ONCE)]


def measure_attention(device: torch.device, effort: Effort, crowded: bool = False) -> AttentionPrice:
    """How fused attention departs from its curve, which is of forward without a mask: causal, masked, backward."""
    length = min(512, max(64, effort.largest // (4 * HEADS * HEAD)))
    q, k, v = (torch.rand(1, HEADS, length, HEAD, device=device).requires_grad_() for _ in range(3))
    mask, attend = torch.zeros(length, length, device=device), functional.scaled_dot_product_attention
    gradient = torch.rand(1, HEADS, length, HEAD, device=device)

    def train() -> object:
        return torch.autograd.grad(attend(q, k, v), (q, k, v), gradient)

    with torch.no_grad():
        plain = seconds(lambda: attend(q, k, v), device, effort, crowded=crowded)
        causal = seconds(lambda: attend(q, k, v, is_causal=True), device, effort, crowded=crowded)
        masked = seconds(lambda: attend(q, k, v, mask), device, effort, crowded=crowded)
    backward = max(seconds(train, device, effort, crowded=crowded) - plain, plain / 2)
    usual = AttentionPrice()
    seen = min(1.0, 0.5 + 0.5 * usual.diagonal / length)  # of a causal one: half, and the blocks on the diagonal
    return AttentionPrice(
        causal=_rounded(seen * plain / causal), backward=_rounded(2.5 * plain / backward),
        masked=_rounded(masked / plain),
    )  # fmt: skip


def slowest_attention(ranks: Sequence[AttentionPrice]) -> AttentionPrice:
    """The attention of all ranks as one."""
    return AttentionPrice(
        causal=min(price.causal for price in ranks), backward=min(price.backward for price in ranks),
        masked=max(price.masked for price in ranks),
    )  # fmt: skip


class SizedCall(NamedTuple):
    """A call that does so much: flops (of a product) or bytes, each of so many passes."""

    size: float
    run: Callable[[], object]
    passes: float = 1.0


def _sizes(kind: Kind, dtype: torch.dtype, device: torch.device, effort: Effort) -> Iterator[SizedCall]:
    """Ever larger calls.

    Products and functions are measured as they train: forward and backward, whose passes are priced alike. What a
    pointwise op writes is allocated anew each time; beyond some size a CPU gets fresh pages for it, which is why its
    sizes grow further.
    """
    length, largest = 64, 0
    while largest < effort.largest * (FRESH if kind == "pointwise" else 1):
        call, largest = _CALLS[kind](length, lambda *shape: torch.rand(shape, device=device).to(dtype))
        yield call
        length *= 2


Make = Callable[..., Tensor]


def _trained(forward: Callable[[], Tensor], *inputs: Tensor) -> Callable[[], object]:
    """Forward and backward of a call, to the gradients of all inputs."""
    for tensor in inputs:
        tensor.requires_grad_()
    gradient = torch.ones_like(forward())
    return lambda: torch.autograd.grad(forward(), inputs, gradient)


def _matmul(length: int, make: Make) -> tuple[SizedCall, int]:
    x, w = make(length, length), make(length, length)
    run = _trained(lambda: functional.linear(x, w), x, w)
    return SizedCall(2.0 * length**3, run, passes=3.0), x.nbytes


def _attention(length: int, make: Make) -> tuple[SizedCall, int]:
    q, k, v = (make(1, HEADS, length, HEAD) for _ in range(3))
    work = 4.0 * HEADS * HEAD * length**2
    return SizedCall(work, lambda: functional.scaled_dot_product_attention(q, k, v)), q.nbytes


def _convolution(length: int, make: Make) -> tuple[SizedCall, int]:
    x, w = make(8, 64, length // 8, length // 8), make(64, 64, 3, 3)
    run = _trained(lambda: functional.conv2d(x, w, padding=1), x, w)
    return SizedCall(2.0 * 9 * 64 * x.numel(), run, passes=3.0), x.nbytes


def _pointwise(length: int, make: Make) -> tuple[SizedCall, int]:
    x, y = make(length * length).requires_grad_(), make(length * length)
    return SizedCall(3.0 * x.nbytes, lambda: x + y), x.nbytes


def _function(length: int, make: Make) -> tuple[SizedCall, int]:
    """Two passes: forward reads and writes, backward reads twice and writes."""
    x = make(length * length)
    return SizedCall(2.5 * x.nbytes, _trained(lambda: functional.gelu(x), x), passes=2.0), x.nbytes


def _pooling(length: int, make: Make) -> tuple[SizedCall, int]:
    x = make(1, 16, length // 4, length // 4)
    return SizedCall(1.25 * x.nbytes, lambda: functional.max_pool2d(x, 2)), x.nbytes


def _copy(length: int, make: Make) -> tuple[SizedCall, int]:
    x, y = make(length * length), make(length * length)
    return SizedCall(2.0 * x.nbytes, lambda: y.copy_(x)), x.nbytes


_CALLS: dict[Kind, Callable[[int, Make], tuple[SizedCall, int]]] = {
    "matmul": _matmul, "attention": _attention, "convolution": _convolution, "pointwise": _pointwise,
    "function": _function, "pooling": _pooling, "copy": _copy,
}  # fmt: skip


def slowest(ranks: list[tuple[Series, ...]]) -> tuple[Series, ...]:
    """The series of all ranks as one: at each size that every rank has come to, the longest time."""
    times = []
    for same in zip(*ranks, strict=True):
        shared = min(len(series.points) for series in same)
        columns = zip(*(series.points[:shared] for series in same), strict=True)
        points = tuple((column[0][0], max(time for _, time in column)) for column in columns)
        times.append(Series(kind=same[0].kind, dtype=same[0].dtype, points=points))
    return tuple(times)


def as_device(
    device: torch.device,
    measured: tuple[Series, ...],
    sharing: int,
    edge: float = 0.0,
    attention: AttentionPrice | None = None,
) -> Device:
    """The measurements as a device. Peaks are those of the catalogue if it has the device, else the best seen."""
    known = known_device(device)
    flops: dict[str, float] = dict(known.flops) if known else {}
    for series in measured:
        if series.kind in PRODUCTS and not (known and series.dtype in dict(known.flops)):
            best = _rounded(max(rate for _, rate in series.rates))
            flops[series.dtype] = max(best, flops.get(series.dtype, 0.0))
    copies = next(series for series in measured if series.kind == "copy")
    bandwidth = known.bandwidth if known else _rounded(max(rate for _, rate in copies.rates))
    efficiency = []
    for series in measured:
        peak = flops[series.dtype] if series.kind in PRODUCTS else bandwidth
        curve = Curve(tuple((size, _rounded(rate / peak)) for size, rate in series.rates))
        dtype = "" if series.kind in ONCE else series.dtype
        efficiency.append(Efficiency(kind=series.kind, dtype=dtype, curve=curve))
    name = known.name if known else accelerator.name_of(device)
    return Device(
        name=name,
        flops=tuple(flops.items()),
        memory=accelerator.memory_of(device) // sharing,
        bandwidth=bandwidth,
        efficiency=tuple(efficiency),
        edge=edge,
        # short sequences are in the curve
        attention=attention or (replace(known.attention, short=0.0) if known else AttentionPrice()),
        overlap=known.overlap if known else USUAL_OVERLAP,
    )


def known_device(device: torch.device) -> Device | None:
    """The entry of the catalogue for an accelerator. A CPU has none."""
    if device.type == "cpu":
        return None
    return matching(accelerator.name_of(device), accelerator.memory_of(device))


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")

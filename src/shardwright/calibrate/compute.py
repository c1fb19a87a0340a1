"""Measures one device: products, attention, pointwise ops and copies, by size and dtype.

All ranks measure at once, since in training they compete for the memory too; the slowest counts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from ..cluster import USUAL_OVERLAP, AttentionPrice, Curve, Device, Efficiency, Kind
from ..cluster.catalogue import matching
from ..runtime import accelerator
from .timing import Effort, seconds

HEADS, HEAD = 4, 64
PRODUCTS = ("matmul", "attention", "convolution")
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
        for size, run in _sizes(kind, dtype, device, effort):
            time = seconds(run, device, effort, crowded=crowded)
            points.append((size, time))
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


def _sizes(
    kind: Kind, dtype: torch.dtype, device: torch.device, effort: Effort
) -> Iterator[tuple[float, Callable[[], Tensor]]]:
    """Ever larger calls, each with its flops (matmul, attention) or bytes."""

    def make(*shape: int) -> Tensor:
        return torch.rand(shape, device=device).to(dtype)

    length = 64
    while True:
        if kind == "matmul":
            a, b = make(length, length), make(length, length)
            largest, work = a.nbytes, 2.0 * length**3
            yield work, lambda a=a, b=b: a @ b  # type: ignore[misc]
        elif kind == "attention":
            q, k, v = (make(1, HEADS, length, HEAD) for _ in range(3))
            largest, work = q.nbytes, 4.0 * HEADS * HEAD * length**2
            yield work, lambda q=q, k=k, v=v: functional.scaled_dot_product_attention(q, k, v)  # type: ignore[misc]
        elif kind == "convolution":  # forward alone, as in the others
            x, w = make(8, 64, length // 8, length // 8), make(64, 64, 3, 3)
            largest, work = x.nbytes, 2.0 * 9 * 64 * x.numel()
            yield work, lambda x=x, w=w: functional.conv2d(x, w, padding=1)  # type: ignore[misc]
        elif kind == "pointwise":
            x, y = make(length * length), make(length * length)
            largest = x.nbytes
            yield 3.0 * x.nbytes, lambda x=x, y=y: x + y  # type: ignore[misc]
        elif kind == "function":
            x = make(length * length)
            largest = x.nbytes
            yield 2.0 * x.nbytes, lambda x=x: functional.gelu(x)  # type: ignore[misc]
        elif kind == "pooling":
            x = make(1, 16, length // 4, length // 4)
            largest = x.nbytes
            yield 1.25 * x.nbytes, lambda x=x: functional.max_pool2d(x, 2)  # type: ignore[misc]
        else:
            x, y = make(length * length), make(length * length)
            largest = x.nbytes
            yield 2.0 * x.nbytes, lambda x=x, y=y: y.copy_(x)  # type: ignore[misc]
        if largest >= effort.largest:
            return
        length *= 2


def slowest(ranks: list[tuple[Series, ...]]) -> tuple[Series, ...]:
    """The series of all ranks as one: at each size that every rank has come to, the longest time."""
    times = []
    for same in zip(*ranks, strict=True):
        shared = min(len(series.points) for series in same)
        columns = zip(*(series.points[:shared] for series in same), strict=True)
        points = tuple((column[0][0], max(time for _, time in column)) for column in columns)
        times.append(Series(kind=same[0].kind, dtype=same[0].dtype, points=points))
    return tuple(times)


def as_device(device: torch.device, measured: tuple[Series, ...], sharing: int, edge: float = 0.0) -> Device:
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
        # short sequences are in the curve; the rest was not measured
        attention=replace(known.attention, short=0.0) if known else AttentionPrice(),
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

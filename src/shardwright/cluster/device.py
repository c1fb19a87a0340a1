"""One device: how fast it computes, how much memory it has, and how long an op takes on it.

The time of an op is a roofline with the efficiency of its kind at its size:

    matmul, attention    max(flops / (peak * efficiency at flops), bytes / (bandwidth * efficiency of copies))
    pointwise, copy      bytes / (bandwidth * efficiency at bytes)
    convolution          as matmul; function (gelu, exp, tanh, ...) and pooling (the largest of some neighbours) as
                         pointwise; a device that does not say them has the efficiency of these. On a CPU they are much
                         slower.

Fused attention has its own way with short sequences, masks and the backward pass: `AttentionPrice`.

A matmul whose smallest side is `edge` reaches half of what the curve gives, one of large sides all of it: matmuls work
in tiles, and fill and empty a pipeline along what they sum. Curves that were measured are of products as they are, with
no edge.

Below the smallest size of an efficiency curve the time no longer shrinks: what is left is the time to start
a kernel. An efficiency above 1 is possible, where a cache is faster than the memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, get_args

from ..errors import ClusterError
from .curve import Curve

Kind = Literal["matmul", "attention", "convolution", "pointwise", "function", "pooling", "copy"]
KINDS: tuple[Kind, ...] = get_args(Kind)
LIKE: dict[Kind, Kind] = {"convolution": "matmul", "function": "pointwise", "pooling": "pointwise"}
"""Kinds that a device need not say, and what they are like then."""

USUAL_OVERLAP = 0.3
"""Of a device that nothing is known of, such as a CPU, whose cores do both: a guess that `calibrate` replaces."""

# Bytes of an element, by the names that torch has for dtypes.
ITEM = {
    "float64": 8, "float32": 4, "tfloat32": 4, "float16": 2, "bfloat16": 2, "float8": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Which fraction of the peak ops of one kind reach: of the flops by flops, or of the bandwidth by bytes."""

    kind: Kind
    curve: Curve
    dtype: str = ""  # empty: any

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ClusterError(f"{self.kind!r} is no kind of op; there are {', '.join(KINDS)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPrice:
    """How fused attention departs from its efficiency, which is that of long sequences where a query sees every key.

    short       keys at which it reaches half of it
    causal      the part of it that a causal one reaches, counting only the scores that are needed
    diagonal    rows of a causal one that are computed together, so that half of their square on the diagonal is wasted
    backward    the part of the forward rate that the five matmuls of backward reach
    ramp        more keys than `short` that backward needs for half of its rate
    masked      how many times slower the kernel is that takes a mask as a tensor
    """

    short: float = 0.0
    causal: float = 1.0
    diagonal: float = 128.0
    backward: float = 0.8
    ramp: float = 0.0
    masked: float = 1.6

    def __post_init__(self) -> None:
        for what in ("short", "diagonal", "ramp"):
            if not 0 <= getattr(self, what) < math.inf:
                raise ClusterError(f"attention_kernel.{what} is {getattr(self, what)}; it must be zero or more tokens")
        for what in ("causal", "backward", "masked"):
            if not 0 < getattr(self, what) < math.inf:
                raise ClusterError(f"attention_kernel.{what} is {getattr(self, what)}; it must be a positive number")

    def forward_work(
        self, flops: float, keys: float, *, seen: float = 1.0, edges: int = 0, mask: bool = False
    ) -> float:
        """The flops of a long attention without a mask that take as long as `flops`, those of all pairs.

        seen    the share of pairs that are needed: half if causal
        edges   how many diagonals bound them: one if causal, two with a window
        """
        work = flops * (1.0 + self.short / keys) * min(1.0, seen + 0.5 * edges * self.diagonal / keys)
        return work / (self.causal if edges else 1.0) * (self.masked if mask else 1.0)

    def backward_part(self, keys: float) -> float:
        """How many times as long as forward backward takes: 5 matmuls for 2."""
        return 2.5 / self.backward * (1.0 + self.ramp / keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What a device can do: peak flops per second by dtype, bytes of memory, its peak bytes per second.

    overlap     the part of its processors that kernels keep while a collective runs
    """

    name: str
    flops: tuple[tuple[str, float], ...]
    memory: int
    bandwidth: float
    efficiency: tuple[Efficiency, ...] = field(repr=False)
    edge: float = 0.0
    attention: AttentionPrice = AttentionPrice()
    overlap: float = USUAL_OVERLAP
    _peaks: dict[str, float] = field(init=False, repr=False, compare=False)
    _curves: dict[tuple[str, str], Curve] = field(init=False, repr=False, compare=False)  # computed once, read often

    def __post_init__(self) -> None:
        named = f"the device {self.name!r}"
        if not self.name:
            raise ClusterError("a device needs a name")
        if not self.flops:
            raise ClusterError(f"{named} has no flops; say at least those of float32")
        for what, value in (*self.flops, ("memory", self.memory), ("bandwidth", self.bandwidth)):
            if not 0 < value < math.inf:
                raise ClusterError(f"{named}: {what} is {value}; it must be a positive number")
        if not 0 <= self.edge < math.inf:
            raise ClusterError(f"{named}: edge is {self.edge}; it must be zero or more elements")
        if not 0 <= self.overlap <= 1:
            raise ClusterError(f"{named}: overlap is {self.overlap}; it must be in [0, 1]")
        if len(dict(self.flops)) != len(self.flops):
            raise ClusterError(f"{named} gives the flops of a dtype twice")
        keys = [(item.kind, item.dtype) for item in self.efficiency]
        if len(set(keys)) != len(keys):
            raise ClusterError(f"{named} gives an efficiency twice")
        missing = [kind for kind in KINDS if kind not in LIKE and kind not in {kind for kind, _ in keys}]
        if missing:
            raise ClusterError(f"{named} has no efficiency of {', '.join(missing)}")
        object.__setattr__(self, "_peaks", dict(self.flops))
        object.__setattr__(self, "_curves", {})

    def __str__(self) -> str:
        return self.name

    @property
    def known_dtypes(self) -> Mapping[str, float]:
        """The dtypes that there are flops for, with them."""
        return self._peaks

    def peak(self, dtype: str) -> float:
        """Peak flops per second in a dtype."""
        if dtype in self._peaks:
            return self._peaks[dtype]
        raise ClusterError(f"{self.name} has no flops for {dtype!r}, only for {', '.join(dict(self.flops))}")

    @property
    def scales(self) -> bool:
        """Whether a part of an op never takes less than that part of its time: nothing is better at small sizes."""
        return all(low <= high for item in self.efficiency for (_, low), (_, high) in pairwise(item.curve.points))

    def fraction(self, kind: Kind, size: float, dtype: str = "") -> float:
        """The fraction of the peak at a size; of this dtype if it is known, else of any, else of the first known."""
        curve = self._curve(kind, dtype)
        return curve.at(size) * min(1.0, size / curve.first)

    def op_time(self, flops: float, bytes: float, kind: Kind, dtype: str) -> float:
        """Seconds for an op that does so much arithmetic and reads and writes so many bytes."""
        if kind in ("pointwise", "function", "pooling", "copy"):
            return self._memory_time(bytes, kind, dtype)
        return max(self._compute_time(flops, kind, dtype), self._memory_time(bytes, "copy", dtype))

    def matmul_time(self, m: int, n: int, k: int, dtype: str, batch: int = 1) -> float:
        """Seconds for `batch` products of an m x k and a k x n matrix."""
        moved = (m * k + k * n + m * n) * batch * item_bytes(dtype)
        return self.op_time(2.0 * m * n * k * batch / self.side_part(min(m, n, k)), moved, "matmul", dtype)

    def side_part(self, smallest: float) -> float:
        """The fraction of its rate that a matmul reaches whose smallest side has so many elements."""
        return smallest / (smallest + self.edge)

    def _compute_time(self, flops: float, kind: Kind, dtype: str) -> float:
        if flops <= 0:
            return 0.0
        return flops / (self.peak(dtype) * self.fraction(kind, flops, dtype))

    def _memory_time(self, bytes: float, kind: Kind, dtype: str) -> float:
        if bytes <= 0:
            return 0.0
        return bytes / (self.bandwidth * self.fraction(kind, bytes, dtype))

    def _curve(self, kind: Kind, dtype: str) -> Curve:
        if (kind, dtype) not in self._curves:
            curves = {item.dtype: item.curve for item in self.efficiency if item.kind == kind}
            if not curves:
                return self._curve(LIKE[kind], dtype)
            self._curves[kind, dtype] = curves.get(dtype) or curves.get("") or next(iter(curves.values()))
        return self._curves[kind, dtype]


def item_bytes(dtype: str) -> int:
    if dtype not in ITEM:
        raise ClusterError(f"{dtype!r} is no dtype that has a size; there are {', '.join(ITEM)}")
    return ITEM[dtype]

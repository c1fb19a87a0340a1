"""What was measured, as tables to look at."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..cluster import Cluster, Device, Efficiency
from .compute import PRODUCTS


def tables(cluster: Cluster) -> Group:
    """The devices, and the collectives if there are any."""
    parts: list[Table | Text] = [Text(cluster.about)]
    parts += [_devices(device) for device in cluster.devices]
    if cluster.measured:
        parts.append(_collectives(cluster))
    return Group(*parts)


def _devices(device: Device) -> Table:
    title = f"{device.name}: {device.memory / 2**30:.1f} GiB, {_rate(device.bandwidth, 'B/s')}"
    table = Table("op", "dtype", "best", "half of it from", "smallest call", title=title, title_justify="left")
    for item in device.efficiency:
        table.add_row(*_row(device, item))
    return table


def _row(device: Device, item: Efficiency) -> tuple[str, ...]:
    unit, size_unit = ("FLOPS", "FLOP") if item.kind in PRODUCTS else ("B/s", "B")
    peak = device.peak(item.dtype or "float32") if unit == "FLOPS" else device.bandwidth
    best = max(value for _, value in item.curve.points)
    half = next(size for size, value in item.curve.points if value >= best / 2)
    size, value = item.curve.points[0]
    return item.kind, item.dtype, _rate(best * peak, unit), _rate(half, size_unit), _time(size / (value * peak))


def _collectives(cluster: Cluster) -> Table:
    seen = [size for table in cluster.measured for size, _ in table.seconds.points]
    sizes = sorted({2 ** round(size - 1).bit_length() for size in seen})
    table = Table("collective", "ranks", *(_size(size) for size in sizes), title="by bytes", title_justify="left")
    for measured in cluster.measured:
        reached = [_time(measured.time(size)) if size <= measured.seconds.last * 1.01 else "" for size in sizes]
        table.add_row(measured.kind, " + ".join(map(str, measured.ranks)), *reached)
    return table


def _rate(value: float, unit: str) -> str:
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def _size(value: float) -> str:
    for factor, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= factor:
            return f"{value / factor:g} {unit}"
    return f"{value:g} B"


def _time(value: float) -> str:
    if value >= 0.1:
        return f"{value:.3g} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} us"

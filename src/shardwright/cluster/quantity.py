"""Numbers with units, as people write them in a file: "79.1 GiB", "300 GB/s", "200 Gb/s", "2.5 us", "312 TFLOPS"."""

from __future__ import annotations

import math
import re
from typing import Any, Literal

Measure = Literal["bytes", "bytes/s", "seconds", "flops", "number"]

_BYTES = {"B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40, "KB": 1e3, "MB": 1e6, "GB": 1e9,
          "TB": 1e12}  # fmt: skip
UNITS: dict[Measure, dict[str, float]] = {
    "bytes": _BYTES,
    "bytes/s": {f"{unit}/s": factor for unit, factor in _BYTES.items()} | {"Gb/s": 1e9 / 8, "Mb/s": 1e6 / 8},
    "seconds": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9},
    "flops": {"GFLOPS": 1e9, "TFLOPS": 1e12, "PFLOPS": 1e15},
    "number": {},
}
WRITTEN: dict[Measure, str] = {"bytes": "GiB", "bytes/s": "GB/s", "seconds": "us", "flops": "TFLOPS"}
LARGEST = 1e30  # no byte, flop or second is meant by more
_TEXT = re.compile(r"\s*([-+0-9.eE]+)\s*([A-Za-z/]*)\s*")


def read(value: Any, measure: Measure) -> float:
    """The number that was written, in bytes, seconds or per second; ValueError if it is none."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = float(value) if abs(value) < 2**1000 else math.inf
    else:
        match = _TEXT.fullmatch(value) if isinstance(value, str) else None
        units = {"": 1.0} | UNITS[measure]
        if match is None or match[2] not in units:
            known = ", ".join(UNITS[measure])
            raise ValueError(f"{value!r} is not a number" + (f" with one of the units {known}" if known else ""))
        try:
            number = float(match[1]) * units[match[2]]
        except ValueError:
            raise ValueError(f"{value!r} is not a number") from None
    if not math.isfinite(number):
        raise ValueError(f"{value!r} is not finite")
    if abs(number) > LARGEST:
        raise ValueError(f"{value!r} is more than {LARGEST:g}")
    return number


def write(value: float, measure: Measure) -> str | float | int:
    """Short and with its unit if that gives the same number again, else the number."""
    if measure in WRITTEN:
        unit = WRITTEN[measure]
        text = f"{value / UNITS[measure][unit]:.6g} {unit}"
        if read(text, measure) == value:
            return text
    return int(value) if float(value).is_integer() else float(value)

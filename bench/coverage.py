"""python -m bench.coverage: measure all architectures, write bench/coverage.csv and docs/coverage.md.

--only NAMES   these model types (or kinds), and no page
--resume       keep what bench/coverage.csv has, measure the rest
--failed       as --resume, and measure again what failed
--built        only build the models and run them, to see whether configs and inputs fit
--masks        only capture them, to see what their attention masks are; the other columns stay as they are
--page         make the page from the CSV, measure nothing
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from .architectures.exceptions import LEFT_OUT
from .architectures.listed import KINDS, Architecture, architectures
from .architectures.measure import FIELDS, Row
from .architectures.page import page
from .architectures.pool import measured

RESULTS = Path("bench/coverage.csv")
PAGE = Path("docs/coverage.md")


def main() -> None:
    options = _options()
    known = read(RESULTS) if RESULTS.exists() else []
    if options.masks:
        known = _look_at_masks(options, known)
    elif not options.page:
        known = _run(options, known)
    if not options.only and not options.built:
        PAGE.write_text(page(known))


def _wanted(options: Any) -> list[Architecture]:
    every = [architecture for architecture in architectures() if architecture.model_type not in LEFT_OUT]
    names = options.only
    return [it for it in every if not names or it.model_type in names or it.kind in names]


def _look_at_masks(options: Any, known: list[Row]) -> list[Row]:
    """The rows that are known, with what a capture now says about their attention."""
    wanted, begun = _wanted(options), time.monotonic()
    rows = {(row.model_type, row.labels): row for row in known}
    for count, row in enumerate(measured(wanted, options.jobs, "captured")):
        key = (row.model_type, row.labels)
        _say(row, count, 2 * len(wanted), time.monotonic() - begun)
        if key in rows and row.captured:
            seen = {name: getattr(row, name) for name in ("attention", "causal", "unmasked", "structured", "masks")}
            rows[key] = replace(rows[key], **seen)
            write(RESULTS, _sorted(rows.values()))
    return _sorted(rows.values())


def _run(options: Any, known: list[Row]) -> list[Row]:
    wanted = _wanted(options)
    if options.resume or options.failed:
        bad = {row.model_type for row in known if not (row.dp and row.tp)} if options.failed else set()
        done = {row.model_type for row in known} - bad
        wanted = [expected for expected in wanted if expected.model_type not in done]
    again = {expected.model_type for expected in wanted}
    resuming = options.only or options.resume or options.failed
    kept = [row for row in known if row.model_type not in again] if resuming else []
    path = Path(options.csv) if options.csv else RESULTS
    actual = list(kept)
    begun = time.monotonic()
    for row in measured(wanted, options.jobs, "built" if options.built else "verified"):
        actual.append(row)
        _say(row, len({row.model_type for row in actual} & again), len(wanted), time.monotonic() - begun)
        write(path, _sorted(actual))
    return _sorted(actual)


def _options() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--csv", help="where the results go, if not to the project's own file")
    for name in ("resume", "failed", "built", "masks", "page"):
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_args()


def _say(row: Row, done: int, all_: int, seconds: float) -> None:
    message = row.reason or row.tp_reason or ("" if row.captured else "built")
    stages = (row.built, row.captured, row.dp, row.tp)
    marks = "".join(mark if stage else "-" for mark, stage in zip("bcdt", stages, strict=True))
    labels = "labels" if row.labels else ""
    print(f"{done:4}/{all_} {seconds:6.0f} s  {marks} {row.split:4.0%} {row.seconds:5.1f} s  "
          f"{row.model_type:28} {labels:6} {message[:150]}", file=sys.stderr, flush=True)  # fmt: skip


def _sorted(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (KINDS.index(row.kind), row.model_type, row.labels))


def write(path: Path, rows: Iterable[Row]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(FIELDS)
        for row in rows:
            writer.writerow([_cell(getattr(row, name)) for name in FIELDS])


def read(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return [Row(**{name: _value(name, text) for name, text in line.items()}) for line in csv.DictReader(file)]


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _value(name: str, text: str) -> Any:
    kind = Row.__annotations__[name]
    readers = {"bool": lambda text: text == "yes", "float": float, "int": int, "str": str}
    return readers[kind](text)


if __name__ == "__main__":
    main()

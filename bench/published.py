"""python -m bench.published: tokens a second as `sw.plan` predicts them, beside published ones of real clusters.

--rows       every row, not only the summary
--family F   only families whose name contains F

The tables are not part of the project. They are looked for in ../shared (--tables says another place). A row takes
2 to 10 seconds, all of them some minutes.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.errors import ShardwrightError

from .published_plans import predicted_seconds
from .published_rows import FILES, Row, read


@dataclass(frozen=True)
class Prediction:
    """A row with the tokens a second and GPU that are predicted for it, or the reason why there are none."""

    row: Row
    tokens: float
    fault: str = ""

    @property
    def error(self) -> float:
        return self.tokens / self.row.tokens - 1

    def __str__(self) -> str:
        row = self.row
        sizes = {"tp": row.tp, "pp": row.pp, "ep": row.ep, "cp": row.cp}
        axes = " ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
        how = f"{row.recompute} {axes}{' compiled' if row.compiled else ''}"
        text = f"{row.family:17} {row.model:13} {row.gpus:5} seq {row.seq:6} x {row.microbatch:3} {how:28} "
        if self.fault:
            return f"{text} {row.tokens:9.1f}  {self.fault}"
        return f"{text} {self.tokens:9.1f} {row.tokens:9.1f} {self.error:+7.1%}"


def main() -> None:
    options = _options()
    missing = [name for name in FILES if not (options.tables / name).exists()]
    if missing:
        print(f"{' and '.join(missing)}: not in {options.tables}. They are no part of the project; nothing to compare.")
        sys.exit(0)
    warnings.simplefilter("ignore")
    predictions = []
    for row in read(options.tables):
        if options.family in row.family:
            predictions.append(predict(row))
            if options.rows:
                print(predictions[-1], flush=True)
    report(predictions)


def _options() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, default=Path("../shared"))
    parser.add_argument("--rows", action="store_true")
    parser.add_argument("--family", default="")
    return parser.parse_args()


def predict(row: Row) -> Prediction:
    if row.unpriced:
        return Prediction(row, 0.0, row.unpriced)
    try:
        seconds = predicted_seconds(row)
    except ShardwrightError as error:
        return Prediction(row, 0.0, str(error).splitlines()[0])
    return Prediction(row, row.microbatch * row.accumulate * row.dp * row.seq / seconds / row.gpus)


def summary(predictions: Iterable[Prediction]) -> str:
    signed = [prediction.error for prediction in predictions]
    errors = sorted(map(abs, signed))
    return (
        f"{len(errors):3} rows, median error {statistics.median(errors):5.1%} ({statistics.median(signed):+.1%}), "
        f"90th percentile {percentile(errors, 0.9):5.1%}, worst {errors[-1]:5.1%}"
    )


def percentile(ordered: Sequence[float], part: float) -> float:
    return ordered[min(len(ordered) - 1, math.ceil(part * len(ordered)) - 1)]


def report(predictions: Sequence[Prediction]) -> None:
    """Medians of each family. What torch.compile has fused is a family by itself."""
    priced = [prediction for prediction in predictions if not prediction.fault]
    families: dict[str, list[Prediction]] = {}
    for prediction in priced:
        row = prediction.row
        families.setdefault(f"{row.family}{', compiled' if row.compiled else ''}", []).append(prediction)
    for family, rows in families.items():
        print(f"{family:26} {summary(rows)}")
    if priced:
        print(f"{'all':26} {summary(priced)}")
    for prediction in predictions:
        if prediction.fault:
            print(f"without a prediction: {prediction.row.model} of {prediction.row.family}: {prediction.fault}")


if __name__ == "__main__":
    main()

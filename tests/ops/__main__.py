"""`python -m tests.ops`: all of torch's ops, modules and optimizers, and a summary of what came of them.

The exit code is 1 if a number is wrong, an error is not one of ours, or a refusal is not in the expectations (or one
that is there no longer happens).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tests.ops.cases import DTYPES, modules, ops
from tests.ops.expectations import unexpected, unneeded
from tests.ops.optimizers import optimizers
from tests.ops.sweep import Finding, Suite, Task, sweep

BAD = ("wrong", "foreign")
ORDER = ("wrong", "foreign", "refused", "drawn", "right", "skipped")


def main() -> int:
    options = _options()
    tasks = list(_tasks(options))
    print(f"{len(tasks)} subjects (op, module or optimizer in one dtype)", flush=True)
    collected: list[Finding] = []
    with options.out.open("w", buffering=1) as file:
        for finding in sweep(tasks, options.processes, lambda text: print(text, flush=True)):
            collected.append(finding)
            verdict = finding.verdict
            line = f"{verdict.kind:8} {finding.sample}, {finding.ways} ways: {verdict.detail}".replace("\n", " | ")
            file.write(line + "\n")
            if verdict.kind in BAD:
                print(line[:300], flush=True)
    print(summary(collected))
    faults = [f"{f.sample}, {f.ways} ways: {f.verdict.kind}: {f.verdict.detail[:200]}" for f in collected
              if f.verdict.kind in BAD]  # fmt: skip
    faults += [
        f"{sample}: refused, and not in tests/ops/expectations.py: {why}" for sample, why in unexpected(collected)
    ]
    if options.samples == "all":
        faults += [f"{subject}: listed as refused, and no longer is" for subject in unneeded(collected)]
    print("\n".join(["", f"{len(faults)} faults", *faults]) if faults else "clean")
    return 1 if faults else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.ops", description=__doc__)
    parser.add_argument("--ops", default="", metavar="PATTERN", help="a regular expression for the names of subjects")
    parser.add_argument("--suite", choices=["op", "module", "optimizer"], action="append")
    parser.add_argument("--dtype", choices=list(DTYPES), action="append")
    parser.add_argument("--samples", default="all", help="all, or so many of each subject")
    parser.add_argument("--split", type=int, default=8, help="so many samples of each subject are split as well")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("ops.log"), help="one line for each sample")
    return parser.parse_args()


def _tasks(options: argparse.Namespace) -> Iterable[Task]:
    limit = None if options.samples == "all" else int(options.samples)
    subjects: dict[Suite, Iterable[str]] = {"op": ops(), "module": modules(), "optimizer": optimizers()}
    for suite in options.suite or subjects:
        for dtype in (options.dtype or list(DTYPES)) if suite != "optimizer" else ["float64"]:
            for name in subjects[suite]:
                if re.search(options.ops, name):
                    yield Task(suite, name, dtype, limit, options.split if dtype == "float64" else 0)


def summary(findings: Iterable[Finding]) -> str:
    """How many subjects and samples came out how, on one device and split."""
    rows: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    for finding in findings:
        where = "one device" if finding.ways == 1 else f"{finding.ways} ways"
        key = (finding.task.suite, finding.task.dtype, where)
        rows.setdefault(key, {}).setdefault(finding.task.subject, []).append(finding.verdict.kind)
    lines = []
    for (suite, dtype, where), subjects in sorted(rows.items()):
        worst = Counter(min(kinds, key=ORDER.index) for kinds in subjects.values())
        each = Counter(kind for kinds in subjects.values() for kind in kinds)
        shown = ", ".join(f"{kind} {worst[kind]} ({each[kind]})" for kind in ORDER if each[kind])
        lines.append(f"{suite:9} {dtype:8} {where:10} {len(subjects):4} subjects ({each.total()} samples): {shown}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

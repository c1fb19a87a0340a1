"""`python -m tests.mutants`: changes one thing at a time in the package, and counts what the tests do not notice."""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from .changes import Mutant, mutants
from .nearest import Neighbourhood
from .trial import Change, Lab, Verdict, snapshot

TREE = Path(__file__).parents[2]
PACKAGE = "shardwright"
ROOMS = ("rules", "lower", "emit", "runtime", "checkpoint")


def drawn(package: Path, rooms: Sequence[str], seed: int) -> Iterator[Mutant]:
    """All mutants of some packages, in a random order, one of each package in turn."""
    draw = random.Random(seed)
    by_room = []
    for room in rooms:
        files = [package / room] if room.endswith(".py") else sorted((package / room).rglob("*.py"))
        of_room = [mutant for file in files for mutant in mutants(package, str(file.relative_to(package)))]
        by_room.append(draw.sample(of_room, len(of_room)))
    for turn in itertools.zip_longest(*by_room):
        yield from (mutant for mutant in turn if mutant is not None)


def changes_of(sample: Iterable[Mutant], near: Neighbourhood, most: int) -> Iterator[Change]:
    """The changes to try, each with its tests; what can't be compiled is none."""
    for mutant in sample:
        text = mutant.text(near.package)
        if text is not None:
            tests = tuple(f"tests/{test}" for test in near.nearest(mutant.file, most))
            yield Change(name=str(mutant), file=f"src/{near.package.name}/{mutant.file}", text=text, tests=tests)


def summary(verdicts: Sequence[Verdict]) -> str:
    """Counts, and the survivors one by one."""
    counts = Counter(verdict.outcome for verdict in verdicts)
    caught, survived = counts["caught"] + counts["timed out"], counts["survived"]
    lines = [f"survived: {verdict.name}" for verdict in verdicts if verdict.outcome == "survived"]
    share = f"{caught / len(verdicts):.1%}" if verdicts else "none"
    lines.append(
        f"{len(verdicts)} mutants: {caught} caught ({share}; {counts['timed out']} of them by a time limit), "
        f"{survived} survived"
    )
    return "\n".join(lines)


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--packages", default=",".join(ROOMS), help="folders or files of the package, with commas")
    parser.add_argument("--count", type=int, default=300, help="how many mutants")
    parser.add_argument("--skip", type=int, default=0, help="how many of the drawn ones to leave out first")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no mutant after this")
    parser.add_argument("--each", type=float, default=60.0, help="seconds after which a mutant gets no more tests")
    parser.add_argument("--files", type=int, default=12, help="files of tests for a mutant, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--report", type=Path, default=None, help="a file for the verdicts, as JSON")
    parser.add_argument("--again", type=Path, default=None, help="a report, whose survivors are tried again")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    options = parsed(arguments)
    begin, done = time.monotonic(), list[Verdict]()

    def tell(verdict: Verdict) -> None:
        done.append(verdict)
        by = f" by {verdict.test} ({verdict.error})" if verdict.test else ""
        print(f"{len(done):4d} {verdict.seconds:4.0f} s {verdict.outcome} {verdict.name}{by}", flush=True)
        if options.report is not None:
            options.report.write_text(json.dumps([vars(value) for value in done], indent=1))

    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        tree = snapshot(TREE, Path(scratch) / "tree")
        near = Neighbourhood(tree / "src" / PACKAGE, tree / "tests")
        coming: Iterable[Mutant] = drawn(near.package, options.packages.split(","), options.seed)
        if options.again is not None:
            left = {load["name"] for load in json.loads(options.again.read_text()) if load["outcome"] == "survived"}
            coming = (mutant for mutant in coming if str(mutant) in left)
        changes = changes_of(coming, near, options.files)
        chosen = list(itertools.islice(changes, options.skip, options.skip + options.count))
        lab = Lab(tree=tree, scratch=Path(scratch), processes=options.processes, each=options.each)
        lab.warm_up(sorted({test for change in chosen for test in change.tests}))
        lab.run(chosen, tell, deadline=begin + options.seconds)
    print(summary(done))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

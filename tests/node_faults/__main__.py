"""`python -m tests.node_faults --count 100 --nodes 2`: random faults of runs on several nodes. Needs root.

A line for each; the exit code is 1 if anything is not as `trial.py` says. What the nodes printed stays in --folder for
trials that went wrong.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.namespaces import UnavailableError, made_nodes

from .trial import FAULTS, Trial, try_fault


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.node_faults", description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--only", choices=FAULTS, action="append", help="this kind of fault")
    parser.add_argument("--folder", type=Path, default=None, help="where output of the nodes is kept")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="node-faults-"))
    ended, wrong = Counter[str](), 0
    try:
        for seed in range(options.first, options.first + options.count):
            trial = Trial.drawn(seed, options.nodes, tuple(options.only or FAULTS))
            with made_nodes(options.nodes) as nodes:
                outcome = try_fault(nodes, trial, folder / str(seed))
            ended[f"{trial.fault}: {'to the end' if outcome.finished else 'with an error'}"] += 1
            wrong += bool(outcome.faults)
            print(f"{trial}: {'; '.join(outcome.faults) or 'fine'}, {outcome.seconds:.0f} s", flush=True)
            if not outcome.faults:
                shutil.rmtree(folder / str(seed))
    except UnavailableError as error:
        print(error)
        return 2
    print("\n".join(f"{count:4} {kind}" for kind, count in sorted(ended.items())))
    print(f"{sum(ended.values())} trials, {wrong} faults" + (f", output in {folder}" if wrong else ""))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m tests.fuzz [mutations] [kinds]`: mutates files of every kind, and prints what none of our errors tells."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence

from .kinds import KINDS
from .trial import try_all

COUNT, BATCH = 5000, 100


def main(words: Sequence[str]) -> int:
    count = int(words[0]) if words else COUNT
    kinds = [kind for kind in KINDS if kind in words[1:] or len(words) < 2]
    faults = 0
    for kind in kinds:
        outcomes = []
        seeds = list(range(-(-count // len(kinds))))
        for at in range(0, len(seeds), BATCH):
            outcomes += try_all(kind, seeds[at : at + BATCH])
        wrong = [outcome for outcome in outcomes if outcome.fault]
        faults += len(wrong)
        slowest = max(outcome.seconds for outcome in outcomes)
        refused = sum(outcome.refused for outcome in outcomes)
        print(f"{kind}: {len(outcomes)} mutations, {refused} refused, {len(wrong)} faults, slowest {slowest:.2f} s")
        for text, number in Counter(outcome.fault for outcome in wrong).most_common(20):
            seed = next(outcome.seed for outcome in wrong if outcome.fault == text)
            print(f"  {number} times, first with seed {seed}: {text}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`python -m tests.policies [trials] [first seed]`: random policies on random models, and what is wrong with any."""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from collections.abc import Sequence

from .trial import Outcome, try_policy

COUNT = 1000


def main(words: Sequence[str]) -> int:
    count, first = int(words[0]) if words else COUNT, int(words[1]) if len(words) > 1 else 0
    began, outcomes = time.monotonic(), list[Outcome]()
    for seed in range(first, first + count):
        outcome = try_policy(seed)
        outcomes.append(outcome)
        if outcome.fault:
            print(outcome, flush=True)
    refused = [outcome for outcome in outcomes if outcome.refused]
    wrong = [outcome for outcome in outcomes if outcome.fault]
    seconds = time.monotonic() - began
    same = count - len(refused) - len(wrong)
    print(f"{count} policies: {same} the same, {len(refused)} refused, {len(wrong)} faults, in {seconds:.0f} s")
    for text, number in Counter(kind_of(outcome) for outcome in refused).most_common(25):
        seed = next(outcome.seed for outcome in refused if kind_of(outcome) == text)
        print(f"  {number} refused, first with seed {seed}: {text}")
    return 1 if wrong else 0


def kind_of(outcome: Outcome) -> str:
    """A refusal without what differs from model to model."""
    text = " ".join(outcome.refused.split())
    text = re.sub(r"trial\.py:\d+: \w+\(.*?\): ", "", text)
    return re.sub(r"\d+|'[^']*'", "_", text)[:150]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`python -m tests.faults [words]`: injects the faults whose text has the words, and prints what noticed each."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.trial import Change, Lab, Verdict, snapshot

from .emitter import EMITTER
from .fault import Fault
from .lower import LOWER
from .packing import PACKING
from .rules import RULES
from .runtime import RUNTIME

TREE = Path(__file__).parents[2]
FAULTS = (*RUNTIME, *LOWER, *RULES, *EMITTER, *PACKING)
CHECK = "tests/faults/test_emitter.py::test_what_is_emitted_is_read_back"


def change_of(fault: Fault) -> Change:
    test = f"tests/{fault.test}" if fault.test else CHECK
    return Change(name=str(fault), file=f"src/shardwright/{fault.file}", text=fault.text, tests=(test,))


def noticed(fault: Fault, verdict: Verdict) -> bool:
    """Whether a fault was caught, and one of the emitter by the check of generated code."""
    caught = verdict.outcome in ("caught", "timed out")
    return caught and (bool(fault.test) or verdict.error.startswith("LoweringError"))


def main(words: Sequence[str]) -> int:
    faults = {str(fault): fault for fault in FAULTS if all(word in str(fault) for word in words)}
    missed: list[str] = []

    def tell(verdict: Verdict) -> None:
        fine = noticed(faults[verdict.name], verdict)
        missed.extend([] if fine else [verdict.name])
        by = f"{verdict.test.removeprefix('tests/')}: {verdict.error}"[:160]
        print(f"{'caught' if fine else 'MISSED'} | {verdict.name} | {by}", flush=True)

    with tempfile.TemporaryDirectory(prefix="faults-") as scratch:
        tree = snapshot(TREE, Path(scratch) / "tree")
        changes = [change_of(fault) for fault in faults.values()]
        lab = Lab(tree=tree, scratch=Path(scratch), each=300.0)
        lab.warm_up(sorted({change.tests[0].split("::")[0] for change in changes}))
        lab.run(changes, tell)
    print(f"{len(faults) - len(missed)} of {len(faults)} faults are caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

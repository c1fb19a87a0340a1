"""Runs the tests in two processes, so that both cores are busy: `python -m tests.side_by_side [options of pytest]`.

A unit is a folder of tests, or a file of those folders that take long. The longest known come first, and whoever is
free takes the next. What a unit that failed says is printed when it is done.
"""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).parent
BY_FILE = ("parity",)
FIRST = (
    "runtime", "plan", "parity/test_gloo.py", "checkpoint", "parity/test_pipelines.py", "coverage", "rules",
    "parity/test_loop.py", "parity/test_faults.py", "capture",
    "parity/test_experts.py",
)  # fmt: skip
NOTHING_THERE = 5  # pytest's exit code where it finds no test


def units() -> list[str]:
    """What is run together, relative to this folder."""
    found: list[str] = []
    for path in sorted(ROOT.iterdir()):
        if path.is_dir() and path.name in BY_FILE:
            found += [str(file.relative_to(ROOT)) for file in sorted(path.rglob("test_*.py"))]
        elif any(path.rglob("test_*.py")) or path.name.startswith("test_"):
            found.append(path.name)
    return sorted(found, key=lambda unit: FIRST.index(unit) if unit in FIRST else len(FIRST))


def run(unit: str, options: list[str]) -> tuple[str, int, float, str]:
    begin = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(ROOT / unit), *options]
    done = subprocess.run(command, cwd=ROOT.parent, capture_output=True, text=True, check=False)
    return unit, done.returncode, time.monotonic() - begin, done.stdout + done.stderr


def main(options: list[str]) -> int:
    begin, failed = time.monotonic(), []
    with ThreadPoolExecutor(max_workers=2) as workers:
        for job in as_completed([workers.submit(run, unit, options) for unit in units()]):
            unit, code, seconds, said = job.result()
            if code not in (0, NOTHING_THERE):
                failed.append(unit)
                print(said)
            last = said.strip().splitlines()[-1] if said.strip() else ""
            print(f"{'FAILED' if unit in failed else 'passed'} {unit} in {seconds:.0f} s: {last}", flush=True)
    minutes = (time.monotonic() - begin) / 60
    print(f"{'failed: ' + ', '.join(failed) if failed else 'all passed'}, {minutes:.1f} minutes")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

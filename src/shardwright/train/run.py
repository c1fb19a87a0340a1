"""The folder of a run. Nothing in it is overwritten silently.

run/
  config.yaml        as the run was started; config-from-000500.yaml where it resumed with another one
  plan.json          the plan
  report.html        the same to look at, see docs/report.md
  generated/         the code that runs
  metrics.csv, ...   logs
  checkpoints/       see docs/checkpoints.md
  .lock              which process writes here
  started            after the first step; without it the folder holds nothing that a new run would lose
  finished           how it ended; absent while it runs, or if it was killed
"""

from __future__ import annotations

import warnings
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from ..checkpoint import CheckpointFolder, checkpoint_at, checkpoints_in
from ..checkpoint.disk import replace_text
from ..checkpoint.folder_lock import FolderLock, acquire
from ..errors import CheckpointError, InputError

CONFIG, PLAN, GENERATED, CHECKPOINTS = "config.yaml", "plan.json", "generated", "checkpoints"
STARTED, FINISHED, REPORT = "started", "finished", "report.html"
Resume = Literal["last", "best"] | str | Path


class RunFolder:
    """Where a run writes; only the first rank does."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock: FolderLock | None = None

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    @property
    def generated(self) -> Path:
        return self.path / GENERATED

    def check_fresh(self) -> None:
        """Refuse to start a run in the folder of another. One that failed before its first step is none."""
        checkpoints = list(checkpoints_in(self.checkpoints).values())
        if not checkpoints and not self._has_steps():
            return
        step = f" (step {checkpoints[-1].step})" if checkpoints else ""
        ended = self.path / FINISHED
        description = f"a run that has ended: {ended.read_text().strip()}" if ended.exists() else f"a run{step}"
        way = 'resume it with resume="last"' if checkpoints else "it has no checkpoint to resume from: remove it"
        raise InputError(f"{self.path} contains {description}; {way}, or choose another directory")

    def find(self, resume: Resume, metric: str, mode: Literal["min", "max"]) -> Path | None:
        """The checkpoint to resume from; None for "last" or "best" if there is none yet."""
        if resume in ("last", "best"):
            folder = CheckpointFolder(self.checkpoints, metric=metric, mode=mode)
            return folder.find("latest" if resume == "last" else "best")
        path = Path(resume)
        inside = path / CHECKPOINTS
        checkpoint = checkpoint_at(inside if inside.is_dir() else path) if path.exists() else None
        if checkpoint is None:
            raise CheckpointError(
                f'resume={str(resume)!r}: there is no such checkpoint; pass "last", "best", or the path of a '
                "checkpoint or a run"
            )
        return checkpoint

    def write_config(self, text: str, step: int) -> None:
        """Write the config of this run. An existing one is kept; a different one gets another name."""
        path = self.path / CONFIG
        if path.exists() and path.read_text() != text:
            path = unused(self.path / f"config-from-{step:06d}.yaml", text)
        replace_text(path, text)

    def write_plan(self, text: str, step: int) -> None:
        """Write the plan; a different one of an earlier start is renamed after the step."""
        path = self.path / PLAN
        if path.exists() and path.read_text() != text:
            path.rename(unused(self.path / f"plan-until-{step:06d}.json", path.read_text()))
        replace_text(path, text)

    def write_report(self, html: str) -> None:
        """The report on the plan, made anew at every start and end. A run does not end for want of it."""
        try:
            replace_text(self.path / REPORT, html)
        except OSError as error:
            warnings.warn(f"the report of the run could not be written: {error}", stacklevel=2)

    def own(self) -> None:
        """Become the only run that writes here, or refuse to."""
        self._lock = acquire(self.path)

    def give_free(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def begin(self) -> None:
        """Mark the run as running, and drop what a run that failed before its first step left."""
        self.path.mkdir(parents=True, exist_ok=True)
        leftovers = () if self._has_steps() or checkpoints_in(self.checkpoints) else (CONFIG, PLAN)
        for name in (FINISHED, *leftovers):
            (self.path / name).unlink(missing_ok=True)

    def mark_started(self) -> None:
        """The first step is done."""
        replace_text(self.path / STARTED, f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC\n")

    def _has_steps(self) -> bool:
        return any((self.path / name).exists() for name in (STARTED, FINISHED))

    def end(self, how: str) -> None:
        replace_text(self.path / FINISHED, how + "\n")


def unused(path: Path, text: str) -> Path:
    """The path, numbered if needed, that does not exist or has this text already."""
    tried, number = path, 2
    while tried.exists() and tried.read_text() != text:
        tried, number = path.with_stem(f"{path.stem}-{number}"), number + 1
    return tried

"""The checkpoints of one run in a folder, with a pointer to the newest; old ones are removed.

    run/
      step-000100/
      step-000200/
      latest            the name of the newest complete one
      step-000300.part  being written, or left by a crash: removed at the next start

The pointer moves when a checkpoint is complete, and only then are old ones removed, so that it always
points to one that can be loaded. Only one run at a time may write to a folder (`folder_lock.py`).
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from torch import nn

from ..errors import CheckpointError, InputError
from ..formats import read_text
from ..runtime.optimizer.adopt import Optimizers
from ..runtime.world import here
from . import disk
from .folder_lock import acquire, has_other_writer
from .loading import Loaded, load
from .manifest import MANIFEST, Manifest, read_manifest
from .ranks import checkpoint_ranks
from .saving import PendingSave, begin
from .training import Schedulers, training_state

LATEST = "latest"


class CheckpointFolder:
    """The checkpoints of a run, by step. All ranks build it, and call `save`, `load` and `wait` together."""

    def __init__(
        self, path: str | Path, *, keep_last: int | None = None, keep_best: int = 0, metric: str | None = None,
        mode: Literal["min", "max"] = "min",
    ) -> None:  # fmt: skip
        """Keep all, or the last few and the best by a metric; `mode` is "min" or "max"."""
        if keep_last is not None and keep_last < 1:
            raise InputError(f"keep_last={keep_last} leaves nothing to resume from; use 1 or more, or None for all")
        if keep_best and metric is None:
            raise InputError(f"keep_best={keep_best} needs a metric: metric='loss'")
        if mode not in ("min", "max"):
            raise InputError(f'mode={mode!r} is unknown; use "min" or "max"')
        self.path = Path(path)
        self.keep_last, self.keep_best, self.metric, self.mode = keep_last, keep_best, metric, mode
        if here().rank == 0:
            self.path.mkdir(parents=True, exist_ok=True)
            if not has_other_writer(self.path):  # else what is half-written is its
                tidy(self.path)
        self._owned = False

    def save(
        self, step: int, model: nn.Module, optimizer: Optimizers = None, *, schedulers: Schedulers = None,
        data: Any = None, extra: Mapping[str, Any] | None = None, metrics: Mapping[str, float] | None = None,
        background: bool = False,
    ) -> PendingSave:  # fmt: skip
        """Save as step-000100, move the pointer, and remove superseded checkpoints. See `sw.save`."""
        state = training_state(model, optimizer, schedulers, extra)
        path = self.path / f"step-{step:06d}"
        self._own()

        def after() -> None:
            disk.replace_text(self.path / LATEST, path.name + "\n")
            for old in self._superfluous():
                disk.remove(old)

        return begin(path, state, data=data, step=step, metrics=metrics, background=background, after=after)

    def load(
        self, model: nn.Module, optimizer: Optimizers = None, *, which: str | int = "latest",
        schedulers: Schedulers = None, extra: Mapping[str, Any] | None = None, rng: bool = True,
    ) -> Loaded | None:  # fmt: skip
        """Resume from the "latest", the "best" or that of a step. None if the folder is empty. See `sw.load`."""
        meeting = checkpoint_ranks()
        meeting.settle()
        chosen = meeting.together(lambda: self.find(which) if meeting.first else None)
        name = meeting.deal([chosen.name if chosen is not None else None] * meeting.size)
        if name is None:
            return None
        return load(self.path / name, model, optimizer, schedulers=schedulers, extra=extra, rng=rng)

    def _own(self) -> None:
        """Become the only writer, until this process ends."""
        if not self._owned:
            meeting = checkpoint_ranks()
            meeting.settle()
            meeting.together(lambda: acquire(self.path) if meeting.first else None)
            self._owned = True

    def wait(self) -> None:
        """Wait for the pending save, and raise its error if it failed."""
        checkpoint_ranks().settle()

    def find(self, which: str | int = "latest") -> Path | None:
        """The checkpoint of that name or step; None if the folder is empty."""
        checkpoints = checkpoints_in(self.path)
        if not checkpoints:
            return None
        if which == "latest":
            return latest_in(self.path)
        if which == "best":
            return self.best()
        path = self.path / (f"step-{which:06d}" if isinstance(which, int) else which)
        if path not in checkpoints:
            raise CheckpointError(f"{path} does not exist; there are {', '.join(path.name for path in checkpoints)}")
        return path

    def best(self) -> Path | None:
        """The best by the metric, or the newest if none has the metric."""
        ranked = self._ranked()
        return ranked[0] if ranked else latest_in(self.path)

    def _ranked(self) -> list[Path]:
        """The checkpoints with the metric, best first; ties: newest first."""
        if self.metric is None:
            raise InputError('finding the best checkpoint needs a metric: metric="loss"')
        sign = 1.0 if self.mode == "min" else -1.0
        metrics = {
            path: manifest.metrics.get(self.metric, math.nan) for path, manifest in checkpoints_in(self.path).items()
        }
        newest = list(reversed([path for path, value in metrics.items() if not math.isnan(value)]))
        return sorted(newest, key=lambda path: sign * metrics[path])

    def _superfluous(self) -> list[Path]:
        if self.keep_last is None:
            return []
        checkpoints = list(checkpoints_in(self.path))
        keep = set(checkpoints[-self.keep_last :]) | {latest_in(self.path)}
        if self.keep_best:
            keep |= set(self._ranked()[: self.keep_best])
        return [path for path in checkpoints if path not in keep]


def checkpoints_in(folder: Path) -> dict[Path, Manifest]:
    """The complete checkpoints in a folder, by step. One with a damaged manifest counts as incomplete."""
    manifests: dict[Path, Manifest] = {}
    for mark in folder.glob(f"step-*/{MANIFEST}"):
        if mark.parent.suffix not in (disk.PART, disk.OLD):
            try:
                manifests[mark.parent] = read_manifest(mark.parent)
            except CheckpointError:
                continue
    return dict(sorted(manifests.items(), key=lambda item: (item[1].step or 0, item[0].name)))


def latest_in(folder: Path) -> Path | None:
    """The checkpoint that the pointer names; the newest if the pointer is lost."""
    pointer = folder / LATEST
    name = read_text(pointer, CheckpointError, 4096).decode(errors="replace").strip() if pointer.is_file() else ""
    is_name = Path(name).name == name and name.strip(".") != ""  # and not a path that leads out of the folder
    if is_name and (folder / name / MANIFEST).is_file():
        return folder / name
    return next(reversed(checkpoints_in(folder)), None)


def tidy(folder: Path) -> None:
    """Remove what a crash left half-written or half-removed, and restore the name of what was complete."""
    for left in [*folder.glob(f"step-*{disk.PART}"), *folder.glob(f"step-*{disk.OLD}")]:
        name = left.with_suffix("")
        if left.is_dir() and disk.find_folder(name, MANIFEST) == left:
            disk.move(left, name)
        elif left.is_dir():
            shutil.rmtree(left)
    (folder / (LATEST + disk.PART)).unlink(missing_ok=True)

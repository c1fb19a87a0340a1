"""Loggers of a run's metrics. Only the first rank logs.

ConsoleLogger       a line per logged step, on a terminal above a progress bar
CSVLogger           metrics.csv in the folder of the run
TensorBoardLogger   tensorboard --logdir run
WandbLogger         Weights & Biases, if wandb is installed
MLflowLogger        if mlflow is installed
"""

from __future__ import annotations

import csv
import importlib
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from ..checkpoint.disk import replace_text
from ..errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Facts about a run for loggers.

    step    the step from which it resumes; 0 at its start
    steps   the step at which it ends, if known
    """

    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    step: int = 0
    steps: int | None = None


class Logger:
    """Logs the metrics of a run. `start` is called before the first, `finish` after the last, also after an error."""

    def check(self) -> None:
        """Refuse if a package that it needs is missing. Called before anything is compiled."""

    def start(self, run: RunFacts) -> None:
        """A run begins or resumes."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Metrics of a step."""
        raise NotImplementedError

    def say(self, text: str) -> None:
        """A message."""

    def progress(self, step: int) -> None:
        """A step is done, whether or not it is logged."""

    def finish(self) -> None:
        """The run has ended."""


class ConsoleLogger(Logger):
    """A line per logged step. On a terminal a bar stays below: steps, time left, loss and rate.

    A line on a terminal has the metrics that fit its width, and the files have all of them.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._steps: int | None = None

    def start(self, run: RunFacts) -> None:
        self._steps = run.steps
        if self.console.is_terminal:
            left = (TimeRemainingColumn(), TextColumn("left")) if run.steps is not None else ()
            latest = TextColumn("{task.fields[latest]}")
            self._bar = Progress(BarColumn(20), MofNCompleteColumn(), *left, latest, console=self.console)
            self._task = self._bar.add_task("", total=run.steps, completed=run.step, latest="")
            self._bar.start()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        of = f" of {self._steps}" if self._steps is not None else ""
        line = f"step {step}{of}  {format_metrics(metrics)}"
        if self._bar is not None:
            latest = {name: metrics[name] for name in IN_BAR if name in metrics}
            self._bar.update(self._task, latest=format_metrics(latest), refresh=True)
            while len(line) > self.console.width and "  " in line:
                line = line.rpartition("  ")[0]
        self.console.print(line, markup=False)

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    def progress(self, step: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def finish(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


IN_BAR = ("loss", "seconds_per_step")
LABELS = {
    "seconds_per_step": ("{:.3g} s/step", 1.0), "predicted_seconds_per_step": ("predicted {:.3g}", 1.0),
    "rows_per_second": ("{:.4g} rows/s", 1.0),
    "tokens_per_second": ("{:.4g} tokens/s", 1.0), "mfu": ("MFU {:.3g} %", 100.0), "memory_gib": ("{:.2f} GiB", 1.0),
    "lr": ("lr {:.3g}", 1.0), "epoch": ("epoch {:.0f}", 1.0),
}  # fmt: skip


def format_metrics(metrics: Mapping[str, float]) -> str:
    """Metrics on one line."""
    shown = []
    for name, value in metrics.items():
        text, factor = LABELS.get(name, (name + " {:.5g}", 1.0))
        shown.append(text.format(value * factor))
    return "  ".join(shown)


class CSVLogger(Logger):
    """A row per logged step and a column per metric, in a file in the run's folder.

    A resumed run drops the rows of steps that it repeats; a backup of the file is written next to it.
    """

    def __init__(self, file: str = "metrics.csv") -> None:
        self.file = file
        self._path = Path(file)
        self._names: list[str] = []

    def start(self, run: RunFacts) -> None:
        self._path, self._names = run.folder / self.file, []
        if not self._path.exists():
            return
        text = self._path.read_text()
        rows = list(csv.DictReader(io.StringIO(text)))
        self._names = list(rows[0]) if rows else []
        kept = [row for row in rows if int(row["step"]) <= run.step]
        if len(kept) < len(rows):
            last = rows[-1]["step"]
            replace_text(self._path.with_name(f"{self._path.stem}-until-{int(last):06d}{self._path.suffix}"), text)
            self._rewrite(kept)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        row = {"step": str(step), **{name: repr(float(value)) for name, value in metrics.items()}}
        new = [name for name in row if name not in self._names]
        if new:
            rows = list(csv.DictReader(io.StringIO(self._path.read_text()))) if self._names else []
            self._names += new
            self._rewrite([*rows, row])
            return
        with self._path.open("a", newline="") as file:
            csv.DictWriter(file, self._names, lineterminator="\n").writerow(row)

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        text = io.StringIO()
        writer = csv.DictWriter(text, self._names, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        replace_text(self._path, text.getvalue())


class TensorBoardLogger(Logger):
    """Event files for TensorBoard, in a subfolder of the run's folder."""

    def __init__(self, folder: str = "tensorboard") -> None:
        self.folder = folder
        self._writer: Any = None

    def check(self) -> None:
        needed("tensorboard", "TensorBoardLogger")

    def start(self, run: RunFacts) -> None:
        needed("tensorboard", "TensorBoardLogger")
        module = importlib.import_module("torch.utils.tensorboard")
        purged = run.step + 1 if run.step else None
        self._writer = module.SummaryWriter(str(run.folder / self.folder), purge_step=purged)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def say(self, text: str) -> None:
        if self._writer is not None:
            self._writer.add_text("run", text)

    def finish(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WandbLogger(Logger):
    """Weights & Biases. A resumed run continues there too, if its id is passed."""

    def __init__(
        self, project: str = "shardwright", name: str | None = None, id: str | None = None, mode: str | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        """`options` are those of `wandb.init`."""
        self.options = {"project": project, "name": name, "id": id, "mode": mode, **options}
        self._run: Any = None

    def check(self) -> None:
        needed("wandb", "WandbLogger")

    def start(self, run: RunFacts) -> None:
        wandb = needed("wandb", "WandbLogger")
        settings = {key: value for key, value in self.options.items() if value is not None}
        self._run = wandb.init(dir=str(run.folder), config=dict(run.config), resume="allow", **settings)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def finish(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None


class MLflowLogger(Logger):
    """An MLflow experiment, on the server or in the folder at `uri`."""

    def __init__(self, experiment: str = "shardwright", name: str | None = None, uri: str | None = None) -> None:
        self.experiment, self.name, self.uri = experiment, name, uri
        self._mlflow: Any = None

    def check(self) -> None:
        needed("mlflow", "MLflowLogger")

    def start(self, run: RunFacts) -> None:
        mlflow = needed("mlflow", "MLflowLogger")
        if self.uri is not None:
            mlflow.set_tracking_uri(self.uri)
        mlflow.set_experiment(self.experiment)
        mlflow.start_run(run_name=self.name)
        self._mlflow = mlflow
        mlflow.log_params({name: str(value)[:500] for name, value in run.config.items()})

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics({name: float(value) for name, value in metrics.items()}, step=step)

    def finish(self) -> None:
        if self._mlflow is not None:
            self._mlflow.end_run()
            self._mlflow = None


def needed(package: str, who: str) -> Any:
    """Import an optional package."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise InputError(f"{who} needs the package {package}, which is not installed: pip install {package}") from error

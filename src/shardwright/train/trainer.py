"""`sw.Trainer`: a whole training run from a model, data and settings.

    trainer = sw.Trainer(model=net, train_data=rows, batch_size=64, max_steps=1000, plan="auto", directory="runs/first")
    trainer.fit()

It compiles the model for all ranks of the run, makes the loaders, resumes from a checkpoint if asked, and gives the
rest to `Loop`. The same from a file: `shardwright train config.yaml` (`config.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import yaml  # type: ignore[import-untyped]
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..checkpoint import CheckpointFolder, load_weights
from ..checkpoint.ranks import checkpoint_ranks
from ..data import Loader
from ..errors import InputError, raise_all
from ..options import CompileOptions, PipelineOptions, read_options, refuse_moved
from ..plan import Plan
from ..plan.request import read_source
from ..precision import read_precision
from ..report import report
from ..runtime.model.inputs import Mode
from ..runtime.world import here, start
from .agreement import Agreement
from .callbacks import Callback, Metrics
from .faults import StopOnSignal
from .feed import BatchSource, check_packing, sizes_of
from .loggers import ConsoleLogger, CSVLogger, Logger, RunFacts
from .loop import Progress, TrainingLoop
from .meters import Meter
from .options import (
    MOVED_IN_TRAINER,
    Checkpoints,
    LoaderOptions,
    LoggingOptions,
    OptimizationOptions,
    Profile,
    ValidationOptions,
)
from .profile import Profiler
from .run import RunFolder
from .scaling import LossScale, scale_for
from .setup import (
    compile_model,
    compile_without_ranks,
    described,
    meter_of,
    needs_ranks,
    plan_line,
    seed_everything,
    with_usual,
)
from .trainer_state import NAME, TrainerState, load_run

OptimizerMaker = Callable[[Any], Optimizer]
SchedulerMaker = Callable[[Optimizer], LRScheduler]


class Trainer:
    """A training run. All ranks make it with the same settings, and call its methods together.

    Args:
        model: a module that gives back its loss: a number, a dict with `loss`, or a tuple that begins with it
        train_data: a dataset of rows, map-style or iterable; or a DataLoader, which gives batches
        val_data: the same for validation
        loss: a function or module of (output, target), if the model does not compute its loss itself
        target: which argument is the target of `loss`, if batches are dicts and it is not called labels
        optimizer: from parameters to an optimizer: a class, or a function
        scheduler: from the optimizer to a schedule of its learning rate
        optimization: accumulation, clipping, loss scale, parameter groups: how gradients become an update
        batch_size: rows of one update, over all ranks
        loader: how batches are made of rows
        max_steps: the last step; max_epochs or this must be given
        max_epochs: the number of epochs
        validation: when the validation data is looked at
        plan: "auto", a plan string such as "dp=2,tp=2", the path of a plan file, or a policy ("mine.py:policy")
        cluster: what "auto" plans for, and whose peak MFU is of; see sw.parallelize
        memory: how much of a device's memory a plan may use, such as "70GiB"
        constraints: what the plan has to keep to: the path of a YAML file, or a list
        pipeline: microbatches, their semantics, and when backward runs; see sw.PipelineOptions
        precision: "fp32", "bf16-mixed", "fp16-mixed", "bf16", "fp16", or in full; see sw.parallelize
        inputs: "global": every rank loads the global batch; "per_replica": each data-parallel group its rows
        compile: which outputs leave the model (here "scalars" if not given: only numbers), which inputs have no batch
            dim, what is not captured; see sw.CompileOptions
        seed: of everything that is drawn
        directory: the folder of the run
        resume: continue from the "last" or the "best" checkpoint of the folder, or from one at a path
        weights: begin with the weights of a safetensors file or a Hugging Face folder
        checkpoints: when the run is saved; false for never
        logging: where numbers go and how often, and steps to trace
        callbacks: own code at any place of the run
    """

    model: Any  # the compiled model, once it is set up
    optimizer: Optimizer
    scheduler: Any
    batches: Loader
    meter: Meter
    agreement: Agreement
    scale: LossScale | None
    last_step: int | None  # at which the run will end, as far as that is known

    @refuse_moved("sw.Trainer", MOVED_IN_TRAINER)
    def __init__(
        self, *, model: nn.Module, train_data: Any, val_data: Any = None, loss: Callable[..., Any] | None = None,
        target: str | None = None, optimizer: OptimizerMaker = torch.optim.AdamW,
        scheduler: SchedulerMaker | None = None, optimization: OptimizationOptions | None = None,
        batch_size: int | None = None, loader: LoaderOptions | None = None, max_steps: int | None = None,
        max_epochs: int | None = None, validation: ValidationOptions | None = None,
        plan: str | Path | Plan = "auto", cluster: str | Path = "auto", memory: str | float | None = None,
        constraints: list[dict[str, Any]] | str | Path | None = None, pipeline: PipelineOptions | None = None,
        precision: Any = None, inputs: Literal["global", "per_replica"] = "global",
        compile: CompileOptions | None = None, seed: int = 0, directory: str | Path = "run",
        resume: str | Path | None = None, weights: str | Path | None = None,
        checkpoints: Checkpoints | bool = True, logging: LoggingOptions | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:  # fmt: skip
        self.config = described({name: value for name, value in locals().items() if name != "self"})
        self.loss_function, self.target = loss, target
        self.make_optimizer, self.make_scheduler = optimizer, scheduler
        self.optimization = read_options(OptimizationOptions, optimization)
        self.validation = read_options(ValidationOptions, validation)
        self.logging = read_options(LoggingOptions, logging)
        self.pipeline = read_options(PipelineOptions, pipeline)
        self.compile_options = with_usual(read_options(CompileOptions, compile))
        self.max_steps, self.max_epochs = max_steps, max_epochs
        self.plan, self.cluster, self.memory, self.constraints = plan, cluster, memory, constraints
        self.precision, self.seed = precision, seed
        self.inputs: Mode = inputs
        self.resume, self.weights = resume, weights
        self.checkpoints = Checkpoints() if checkpoints is True else checkpoints or None
        self.original: nn.Module | None = model
        self._check()
        sizes = self.optimization.micro_batch_size, self.optimization.accumulate
        rows, self.accumulate = sizes_of(batch_size, *sizes, train_data)
        options = read_options(LoaderOptions, loader)
        check_packing(options, self.optimization.reduction, train_data)
        self.source = BatchSource(data=train_data, rows=rows, options=options, seed=seed, shuffle=options.shuffle,
                             sampler=options.sampler)  # fmt: skip
        self.val_source = None if val_data is None else BatchSource(
            data=val_data, rows=rows, options=options, seed=seed, shuffle=False
        )  # fmt: skip
        self.run, self.progress = RunFolder(directory), Progress()
        loggers, profile = self.logging.loggers, self.logging.profile
        self.loggers = list(loggers) if loggers is not None else [ConsoleLogger(), CSVLogger()]
        self._active: list[Logger] = []  # that were started
        self.callbacks = [*callbacks, *([Profiler(profile)] if profile is not None else [])]
        if not any(isinstance(value, StopOnSignal) for value in callbacks):
            self.callbacks.append(StopOnSignal())
        self.last_val: Metrics = {}
        self.stop_reason: str | None = None
        self.scheduler = None
        self._compiled = False
        self._folder: CheckpointFolder | None = None
        self._saved_step = -1
        self._marks_start = False  # whether the first step is still to be marked in the folder, by this rank

    def __repr__(self) -> str:
        step, last = self.progress.step, self.max_steps or f"{self.max_epochs} epochs"
        return f"Trainer(plan {self.plan}, step {step} of {last}, in {self.run.path})"

    def _check(self) -> None:
        faults = []
        if self.max_steps is None and self.max_epochs is None:
            faults.append("say when the run ends: max_steps or max_epochs")
        for name in ("max_steps", "max_epochs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                faults.append(f"{name}={value} makes no sense; use 1 or more, or leave it out")
        if self.resume is not None and self.weights is not None:
            faults.append("resume brings weights of its own; leave out resume or weights")
        if self.inputs not in ("global", "per_replica"):
            faults.append(f'inputs={self.inputs!r} is not for a Trainer; use "global" or "per_replica"')
        raise_all(InputError, "these settings can't be run:", faults)

    # -- what a user calls -----------------------------------------------------------------------

    def fit(self) -> Progress:
        """Train to the end; how far it came."""
        with self._running(write=True):
            how = TrainingLoop(self).run()
            self.wait()
            if self.world.rank == 0:
                self.run.write_report(report(self.model).html)  # now with the measured step time
                self.run.end(how)
            self.say(f"the run is in {self.run.path}")
        return self.progress

    def profile(self) -> None:
        """Run a few steps and write a trace of them; nothing is saved. `logging.profile` says which steps."""
        profiler = next((callback for callback in self.callbacks if isinstance(callback, Profiler)), None) or Profiler(
            Profile()
        )
        if profiler not in self.callbacks:
            self.callbacks.append(profiler)
        with self._running(write=False):
            self.val_source = self.max_epochs = None
            self.max_steps = self.last_step = self.progress.step + profiler.options.start - 1 + profiler.options.steps
            TrainingLoop(self).run()

    def validate(self) -> Metrics:
        """Look at the validation data once, with the weights of `resume` or `weights` if given."""
        if self.val_source is None:
            raise InputError("there is nothing to validate on: give val_data")
        with self._running(write=False):
            return TrainingLoop(self).validate()

    def compile(self) -> Plan:
        """Plan the run and write its code and its plan, and no more. One process is enough for any plan."""
        world, devices = start(self.compile_options.timeout), needs_ranks(read_source(self.plan), self.cluster)
        if devices not in (None, world.size):
            plan, paths = compile_without_ranks(self, devices)
        else:
            self._compile()
            plan, paths = self.model.plan, (self.model.generated,)
        if world.rank == 0:
            self.run.path.mkdir(parents=True, exist_ok=True)
            self.run.write_plan(plan.to_json(), self.progress.step)
            self.run.write_report(report(plan).html)
        self.say(f"plan: {self.run.path / 'plan.json'}\ncode: {', '.join(map(str, paths))}")
        return plan

    def stop(self, reason: str) -> None:
        """End the run after this step, with a checkpoint. One rank's request is enough; it may come at any time."""
        self.stop_reason = self.stop_reason or reason

    @property
    def wants_to_stop(self) -> float:
        return 0.0 if self.stop_reason is None else 1.0

    # -- what the loop calls ---------------------------------------------------------------------

    def fire(self, place: str, *what: Any) -> None:
        """Call all callbacks at one place."""
        for callback in self.callbacks:
            getattr(callback, place)(self, *what)

    def log(self, metrics: Metrics) -> None:
        for logger in self._active:
            logger.log(metrics, self.progress.step)

    def say(self, text: str) -> None:
        """Tell the user something, once."""
        for logger in self.loggers if here().rank == 0 else ():
            logger.say(text)

    def advance(self, step: int) -> None:
        """A step is done."""
        if self._marks_start:
            self.run.mark_started()
            self._marks_start = False
        for logger in self._active:
            logger.progress(step)

    def _finish_logs(self) -> None:
        for logger in self._active:
            logger.finish()
        self._active = []

    def val_batches_anew(self) -> Loader:
        """The validation data from its beginning."""
        assert self.val_source is not None
        batches = self.val_source.batches(self.model)
        batches.set_epoch(0)
        batches.rewind()
        return batches

    def save(self) -> None:
        """Save the run as it is, unless this step was saved before."""
        kept, step = self.checkpoints, self.progress.step
        if kept is None or self._folder is None or self._saved_step == step:
            return
        with self.meter.paused():
            added: dict[str, Any] = {}
            self.fire("on_save_checkpoint", added)
            self._folder.save(
                step, self.model, self.optimizer, schedulers=self.scheduler, data=self.batches,
                extra={NAME: TrainerState(self, added)}, background=kept.background,
                metrics=self.last_val if self.progress.val_step == step else None,
            )  # fmt: skip
        self._saved_step = step
        self.say(f"checkpoint: step {step} in {self._folder.path}" + ", written beside training" * kept.background)

    def wait(self) -> None:
        """Wait for the checkpoint that is still being written."""
        if self._folder is not None:
            self._folder.wait()

    # -- setting up ------------------------------------------------------------------------------

    @contextmanager
    def _running(self, write: bool) -> Iterator[None]:
        """The trainer is set up, and its callbacks and logs end with what is done in it. `write` fills its folder."""
        try:
            self._set_up(self._find_checkpoint(write), write)
            yield
        finally:
            self.fire("on_finish")
            self._finish_logs()
            self.run.give_free()

    def _compile(self) -> None:
        """Compile, and make all that a step needs. The original is let go: the shards are the truth."""
        if self._compiled:
            return
        self.world = start(self.compile_options.timeout)
        seed_everything(self.seed)
        self.say(f"compiling for {self.world.size} rank{'s' if self.world.size > 1 else ''}, plan {self.plan}")
        compiled = compile_model(self)
        self.model, self.optimizer, self.meter = compiled.model, compiled.optimizer, meter_of(self, compiled)
        self.scheduler = self.make_scheduler(self.optimizer) if self.make_scheduler is not None else None
        self.agreement = Agreement()
        self.batches = self.source.batches(self.model)
        self.scale = scale_for(read_precision(self.precision), self.optimization.loss_scale)
        self.original, self._compiled = None, True
        self.fire("on_setup")

    def _last_step(self) -> int | None:
        """The step at which the run will end, as far as that is known."""
        try:
            epoch = -(-len(self.batches) // self.accumulate)
        except TypeError:  # a stream does not know its length
            return self.max_steps
        if self.max_epochs is None:
            return self.max_steps
        done = self.batches.row // (self.source.rows or 1) // self.accumulate  # steps of this epoch
        last = self.progress.step + (self.max_epochs - self.batches.epoch) * epoch - done
        return last if self.max_steps is None else min(last, self.max_steps)

    def _find_checkpoint(self, write: bool) -> Path | None:
        """The checkpoint to resume from, found before anything is compiled; a folder that holds a run is refused."""
        self.world, meeting = start(self.compile_options.timeout), checkpoint_ranks()
        kept = self.checkpoints or Checkpoints()

        def find() -> Path | None:
            if not meeting.first:
                return None
            for logger in self.loggers:
                logger.check()
            if write:
                self.run.own()
            if self.resume is not None:
                return self.run.find(self.resume, kept.metric, kept.mode)
            if write:
                self.run.check_fresh()
            return None

        return meeting.deal([meeting.together(find)] * meeting.size)

    def _set_up(self, path: Path | None, write: bool) -> None:
        """Compile, load what the run begins with, and open its folder and its logs."""
        self._compile()
        if path is not None:
            load_run(self, path)
        elif self.weights is not None:
            load_weights(self.weights, self.model)
        self.last_step = self._last_step()
        checkpoint_ranks().together(lambda: self._open(write))
        kept = self.checkpoints
        if write and kept is not None:
            self._folder = CheckpointFolder(
                self.run.checkpoints, keep_last=kept.keep_last, keep_best=kept.keep_best, metric=kept.metric,
                mode=kept.mode,
            )  # fmt: skip
            self._saved_step = self.progress.step if path and path.parent == self.run.checkpoints else -1
        self.say(plan_line(self.model.plan, self.run.path / "plan.json" if write else None))
        if path is not None:
            self.say(f"going on from {path}, step {self.progress.step}")
        elif self.resume is not None:
            self.say(f"{self.run.path} has no checkpoint yet: the run begins at its beginning")

    def _open(self, write: bool) -> None:
        """The folder and the logs of the run, on the first rank."""
        if self.world.rank != 0:
            return
        step = self.progress.step
        if write:
            self.run.begin()
            self.run.write_config(self.config, step)
            self.run.write_plan(self.model.plan.to_json(), step)
            self._marks_start = True
            self.run.write_report(report(self.model).html)
        analysis = RunFacts(folder=self.run.path, config=yaml.safe_load(self.config), step=step,
                         steps=self.last_step if write else None)  # fmt: skip
        for logger in self.loggers:
            if write or isinstance(logger, ConsoleLogger):
                logger.start(analysis)
                self._active.append(logger)

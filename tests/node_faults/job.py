"""The run that faults are done to: a Trainer that saves every step. Started by torchrun on every node."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

import shardwright as sw
from shardwright.train import Callback, Checkpoints
from tests.train.lives import Written
from tests.train.runs import parameters, trainer


class Slow(Callback):
    """Time for a fault to happen, and a file that says how far the run is."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder, self.seconds = folder, seconds

    def on_step_end(self, trainer, *_):
        time.sleep(self.seconds)
        if trainer.world.rank == 0:
            (self.folder / "step").write_text(str(trainer.progress.step))


def main(folder: Path, plan: str, steps: int, timeout: float) -> None:
    training = trainer(
        folder, plan=plan, max_steps=steps, resume="last", loggers=[Written(folder / "losses")],
        callbacks=[Slow(folder, 0.3)], checkpoints=Checkpoints(every=1, background=False),
        compile=sw.CompileOptions(timeout=timeout),
    )  # fmt: skip
    training.fit()
    values = parameters(training)  # all ranks gather
    if training.world.rank == 0:
        torch.save(values, folder / "values.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))

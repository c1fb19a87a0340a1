"""`shardwright rehearse`: a plan for many devices, run on this machine, scaled down, and compared with one device."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from rich.console import Console

from ..errors import InputError
from ..options import CompileOptions
from ..rehearse import rehearse
from .arguments import MODEL
from .models import load_model
from .progress import working


def run_rehearse(options: Namespace, console: Console) -> int:
    """0 if the plan's program matches one device, 1 if not."""
    if options.model is None:
        raise InputError(f"rehearsing a plan needs its model: --model {MODEL}")
    if options.plan.endswith(".json") and not Path(options.plan).is_file():
        raise InputError(f"there is no file {options.plan}")
    module, example = load_model(options.model, options.batch, options.seq, meta=True)
    with working("rehearsing"):
        rehearsal = rehearse(
            options.plan, module, example=example, precision=options.precision, steps=options.steps,
            optimizer=options.optimizer,
            compile=CompileOptions(
                outputs=options.outputs or ("scalars" if options.model.startswith("hf:") else "all"),
                directory=options.output, opaque=options.opaque,
            ),
        )  # fmt: skip
    console.print(rehearsal)
    return 0 if rehearsal.passed else 1

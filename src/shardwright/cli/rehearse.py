"""`shardwright rehearse`: a plan for many devices, run on this machine, scaled down, and compared with one device."""

from __future__ import annotations

from pathlib import Path

from jsonargparse import ArgumentParser, Namespace
from rich.console import Console
from rich.status import Status

from ..errors import InputError
from ..options import CompileOptions
from ..precision import NAMED
from ..rehearse import rehearse
from .models import MODEL, load_model


def rehearse_parser() -> ArgumentParser:
    parser = ArgumentParser(
        description="Run a plan for many devices in this process: fewer devices and layers, smaller sizes, but every "
        "split, schedule, storage and recomputation of the plan, and compare it with one device in float64."
    )
    parser.add_argument("plan", help='a plan file, or a plan string such as "dp=64,tp=8"')
    parser.add_argument("--model", help=f"the model of the plan: {MODEL}")
    parser.add_argument("--batch", type=int, help="batch size of the example; default: that of the model's example")
    parser.add_argument("--seq", type=int, default=128, help="sequence length of the example of an hf: model")
    parser.add_argument("--precision", choices=list(NAMED), help="precision of the plan, if the plan does not name it")
    parser.add_argument(
        "--outputs", choices=["all", "scalars"], help="scalars: return only the loss; default for hf: models"
    )
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps to compare")
    parser.add_argument("--optimizer", choices=["sgd", "adamw"], default="sgd", help="the optimizer")
    parser.add_argument("--opaque", choices=["marked", "auto"], default="marked",
                        help="auto: submodules that can't be captured run eagerly")  # fmt: skip
    parser.add_argument("-o", "--output", type=Path, help="where to write the generated code; default: discard it")
    return parser


def run_rehearse(options: Namespace, console: Console) -> int:
    """0 if the plan's program matches one device, 1 if not."""
    if options.model is None:
        raise InputError(f"rehearsing a plan needs its model: --model {MODEL}")
    if options.plan.endswith(".json") and not Path(options.plan).is_file():
        raise InputError(f"there is no file {options.plan}")
    module, example = load_model(options.model, options.batch, options.seq, meta=True)
    with Status("rehearsing", console=Console(stderr=True)):
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

"""The options of all commands. It imports no torch, so that `--help` is quick."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..precision import NAMED
from ..schedule import USUAL, schedule_names
from .parser import CommandParser

MODEL = "FILE.py:FUNCTION or MODULE:FUNCTION, a function that returns (module, example); or hf:CONFIG.json"
COMMANDS = {
    "plan": "make a plan and show it",
    "explain": "show the decisions and the predicted cost of a plan",
    "diff": "compare two plan files",
    "report": "draw a plan file, or two, as an HTML file",
    "simulate": "draw a pipeline schedule and its predicted time",
    "compile": "write the generated program",
    "verify": "compare the program with the original",
    "rehearse": "run a plan for many devices on this machine, scaled down",
    "calibrate": "measure this machine as a cluster",
    "doctor": "check this machine, and each kind of plan on it",
    "checkpoint": "inspect, verify and convert checkpoints",
    "train": "train a model from a config file",
}


def make_parser(version: str = "") -> CommandParser:
    """The parser of all commands; `train` has its own (`train.py`)."""
    parser = CommandParser(
        prog="shardwright",
        description="Compile a PyTorch model for many devices and inspect the result.",
        epilog="`shardwright COMMAND --help` shows the options of a command.",
    )
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=CommandParser, required=True)
    for name, about in COMMANDS.items():
        description = DESCRIPTIONS.get(name, about[0].upper() + about[1:] + ".")
        OPTIONS[name](commands.add_parser(name, help=about, description=description, add_help=name != "train"))
    return parser


DESCRIPTIONS = {
    "plan": "Make a plan for a model, show its predicted cost on one screen, and write it to a file. Ctrl-C stops the "
    "search and takes the best plan so far.",
    "explain": "Show the decisions and the predicted cost of a plan file; with the model also shapes, memory and "
    "collectives; with an op the cost of every other way to split it.",
    "diff": "Show where two plan files differ and what both cost; with the model also the cost of each difference.",
    "report": "Draw a plan: predicted time, mesh, communication, memory over a step, the timeline of every pipeline "
    "rank, modules and ops, generated code; with a second plan what differs. One HTML file, which loads nothing.",
    "simulate": "Draw a pipeline schedule, its bubble, and the microbatches in flight.",
    "compile": "Write the program of a model under a plan, as readable PyTorch code.",
    "verify": "Run the original and the compiled program on one batch and compare them.",
    "rehearse": "Run a plan for many devices in this process: fewer devices and layers, smaller sizes, but every "
    "split, schedule, storage and recomputation of the plan, and compare it with one device in float64.",
    "calibrate": "Measure this machine, or under torchrun these machines, as a cluster.",
    "doctor": "Look this machine up, and check a plan of each kind on ranks started here: parity with one device, and "
    "the time of a step. The output can be pasted into an issue. Exit code 1: a plan failed.",
    "checkpoint": "Inspect and verify checkpoints, and convert them to safetensors and back.",
}


def _plan(parser: CommandParser) -> None:
    _model(parser)
    parser.add_argument("--cluster", help="what to plan for: a name such as 8xA100-80GB, or a cluster file (YAML)")
    parser.add_argument("--memory", help="memory limit of a device, such as 70GiB; default: all")
    _precision(parser)
    parser.add_argument(
        "--optimizer", default="adamw", metavar="KIND",
        help="optimizer whose state is counted: adamw, sgd, momentum, ...",
    )  # fmt: skip
    parser.add_argument(
        "--accumulate", type=int, default=1, metavar="N", help="gradient accumulation: backwards per update"
    )
    parser.add_argument(
        "--inputs", choices=["global", "per_replica"], default="global",
        help="per_replica: each data-parallel replica passes its own samples",
    )  # fmt: skip
    _outputs(parser)
    parser.add_argument("--seconds", type=float, metavar="S", help="time limit of the search")
    parser.add_argument("--full", action="store_true", help="show every op, parameter and collective too")
    parser.add_argument("--constraints", type=Path, metavar="FILE", help="constraints on the plan (YAML)")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="where to write the plan; default: nowhere")


def _explain(parser: CommandParser) -> None:
    parser.add_argument("file", type=Path, help="a plan file")
    parser.add_argument(
        "--op", help='an op as named in the plan: "blocks.0.up / linear", or "blocks.*..." for all layers'
    )
    parser.add_argument("--full", action="store_true", help="show every op and parameter too")
    _known_model(parser)


def _diff(parser: CommandParser) -> None:
    parser.add_argument("a", type=Path, help="a plan file")
    parser.add_argument("b", type=Path, help="another")
    _known_model(parser)


def _report(parser: CommandParser) -> None:
    parser.add_argument("file", type=Path, help="a plan file")
    parser.add_argument("other", type=Path, nargs="?", help="a second plan file, to compare with")
    parser.add_argument("--model", help=f"the model of the plan: {MODEL}")
    _sizes(parser)
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("report.html"), metavar="FILE", help="where to write the report"
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write the predicted step for ui.perfetto.dev too")


def _simulate(parser: CommandParser) -> None:
    parser.add_argument("--schedule", default=USUAL.name, metavar="NAME", help=schedule_names())
    parser.add_argument("--stages", type=int, default=4, metavar="N", help="number of stages")
    parser.add_argument("--microbatches", type=int, default=8, metavar="N", help="number of microbatches")
    for name, usual, about in (
        ("forward", 1.0, "forward time of a stage, per microbatch"),
        ("backward", 1.0, "backward time, without weight gradients"),
        ("weight", 1.0, "time of the weight gradients"),
        ("link", 0.0, "time to send an activation to the next stage"),
    ):
        parser.add_argument(f"--{name}", type=float, default=usual, metavar="T", help=about)
    parser.add_argument("--width", type=int, help="width of the picture; default: that of the terminal")


def _compile(parser: CommandParser) -> None:
    _model(parser)
    parser.add_argument(
        "-o", "--output", type=Path, default=Path(".shardwright"), metavar="DIR", help="the directory to write to"
    )
    parser.add_argument(
        "--entry", choices=["train", "eval"], default="train", help="write the training or the eval program"
    )


def _verify(parser: CommandParser) -> None:
    _model(parser, plan=None)
    parser.add_argument("--dtype", choices=["float64", "float32"], help="dtype of the comparison; default: float64")
    _precision(parser)
    _steps(parser)
    parser.add_argument("--tolerance", type=float, metavar="T", help="default: 1e-10 in float64, 1e-5 in float32")
    parser.add_argument("--eval", action="store_true", help="compare evaluation mode too")
    parser.add_argument("--trace", action="store_true", help="if they differ, find the first op that differs")


def _rehearse(parser: CommandParser) -> None:
    parser.add_argument("plan", help='a plan file, or a plan string such as "dp=64,tp=8"')
    parser.add_argument("--model", help=f"the model of the plan: {MODEL}")
    _sizes(parser)
    _precision(parser, "precision of the plan, if the plan does not name it")
    _outputs(parser)
    _steps(parser)
    _opaque(parser)
    parser.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="where to write the generated code; default: discard it"
    )


def _calibrate(parser: CommandParser) -> None:
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="where to write the cluster (YAML)")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller sizes, in less than a minute")
    parser.add_argument("--ranks", type=int, metavar="N", help="ranks to start; default: one per core")


def _doctor(parser: CommandParser) -> None:
    parser.add_argument("--quick", action="store_true", help="fewer plans, and no times")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="ranks to start for each check; default: 2")
    parser.add_argument("--device", help='of which each rank takes one, such as "cpu"; default: the accelerator')
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def _checkpoint(parser: CommandParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", parser_class=CommandParser, required=True)
    about = "show the contents of a checkpoint"
    shown = actions.add_parser("inspect", help=about, description="Show a checkpoint, or the latest in a folder.")
    shown.add_argument("path", type=Path, help="a checkpoint, or a folder of checkpoints")
    shown.add_argument("--full", action="store_true", help="show optimizer state and all other tensors too")

    about = "convert to safetensors or back"
    turned = actions.add_parser(
        "convert", help=about,
        description="Write the weights of a checkpoint as one safetensors file or a Hugging Face folder, or make a "
        "checkpoint from such weights.",
    )  # fmt: skip
    turned.add_argument("path", type=Path, help="a checkpoint, a safetensors file, or a Hugging Face folder")
    turned.add_argument("--to", type=Path, required=True, help="x.safetensors for a single file, else a folder")
    turned.add_argument(
        "--form", choices=["file", "hf", "checkpoint"], help="format to write; default: chosen by the input and --to"
    )
    turned.add_argument("--dtype", choices=DTYPES, help="dtype of the weights; default: unchanged")
    turned.add_argument(
        "--shard-gb", type=float, default=5.0, metavar="GB", help="maximum size of a file of a Hugging Face folder"
    )
    turned.add_argument(
        "--config", type=Path, metavar="DIR", help="a Hugging Face folder to copy config and tokenizer from"
    )

    about = "check that a checkpoint is complete and undamaged"
    checked = actions.add_parser(
        "verify", help=about, description="Read every byte of a checkpoint and compare it with its digests."
    )
    checked.add_argument("path", type=Path, help="a checkpoint, or a folder of checkpoints to verify all of")


OPTIONS: dict[str, Any] = {
    "plan": _plan, "explain": _explain, "diff": _diff, "report": _report, "simulate": _simulate, "compile": _compile,
    "verify": _verify, "rehearse": _rehearse, "calibrate": _calibrate, "doctor": _doctor, "checkpoint": _checkpoint,
    "train": lambda parser: None,
}  # fmt: skip
DTYPES = ("float32", "bfloat16", "float16", "float64")


# -- options that several commands have ------------------------------------------------


def _model(parser: CommandParser, plan: str | None = "auto") -> None:
    parser.add_argument("model", help=MODEL)
    usual = "" if plan else "; default: dp=2, tp=2, zero3=2 and pp=2, one after the other"
    about = f'"dp=2,tp=2", a plan file, a policy (mine.py:policy), "auto", or "auto,tp=2"{usual}'
    parser.add_argument("--plan", default=plan, help=about)
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="number of ranks for auto and for policies; other plans fix it"
    )
    parser.add_argument(
        "--microbatches", type=int, metavar="N", help="number of microbatches; default: chosen by the plan"
    )
    _opaque(parser)
    _sizes(parser)


def _known_model(parser: CommandParser) -> None:
    parser.add_argument("--model", help=f"the model of the plan: {MODEL}")
    parser.add_argument("--cluster", help="cluster to price on; default: the plan's")
    _sizes(parser)


def _sizes(parser: CommandParser) -> None:
    parser.add_argument("--batch", type=int, metavar="N", help="batch size; default: that of the model's example")
    parser.add_argument("--seq", type=int, default=128, metavar="N", help="sequence length, for an hf: model")


def _precision(parser: CommandParser, about: str = "train in this precision; default: the model's dtypes") -> None:
    parser.add_argument("--precision", choices=list(NAMED), metavar="NAME", help=f"{', '.join(NAMED)}: {about}")


def _outputs(parser: CommandParser) -> None:
    parser.add_argument(
        "--outputs", choices=["all", "scalars"], help="scalars: return only the loss; default for hf: models"
    )


def _steps(parser: CommandParser) -> None:
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="optimizer steps to compare; default: 3")
    parser.add_argument("--optimizer", choices=["sgd", "adamw"], default="sgd", help="the optimizer; default: sgd")


def _opaque(parser: CommandParser) -> None:
    parser.add_argument(
        "--opaque", choices=["marked", "auto"], default="marked",
        help="auto: submodules that can't be captured run eagerly",
    )  # fmt: skip

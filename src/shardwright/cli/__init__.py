"""The command line: plan, explain, diff, simulate, compile, verify, rehearse, calibrate, doctor, checkpoint, train.

    shardwright plan    train.py:make_model --cluster 8xA100-80GB --batch 64 -o plan.json
    shardwright explain plan.json
    shardwright explain plan.json --model train.py:make_model --op "blocks.*.up / linear"
    shardwright diff    plan.json other.json
    shardwright simulate --schedule zb --stages 4 --microbatches 8
    shardwright compile train.py:make_model --plan dp=2,tp=2 -o generated
    shardwright verify  train.py:make_model --plan tp=2
    shardwright rehearse plan.json --model train.py:make_model
    shardwright calibrate -o cluster.yaml
    shardwright doctor
    shardwright checkpoint inspect run/step-001000
    shardwright train config.yaml --model.init_args.n_layer 24

Read this file (all commands), then `train.py`, `checkpoint.py`, `rehearse.py` and `simulate.py` (the larger ones),
`models.py` (the model that a command is about) and `progress.py`.

A model is named by a file (or an importable module) and a function in it that returns the
module and example arguments, or by a Hugging Face config, `hf:config.json`. No command needs
a GPU or other processes. Exit code 0: success, 1: the program differs from the original,
2: invalid arguments or input, 130: interrupted.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from jsonargparse import ArgumentParser, Namespace
from rich.console import Console
from rich.status import Status

from ..calibrate import FULL, QUICK, calibrate, tables
from ..capture import find_opaque
from ..cluster import save
from ..compile import write
from ..errors import InputError, ShardwrightError
from ..ir import Graph
from ..options import CompileOptions, Outputs, PipelineOptions
from ..parallelize import captured_graph, cluster_size, planned, read_request
from ..plan import Plan
from ..plan.request import AutoPlan, PlanRequest, is_policy, read_source, source_size
from ..plan.search_options import SearchOptions
from ..planning import cluster_for, training_of
from ..precision import NAMED, read_precision
from ..report import diff, explain, read_plan
from ..verify import compile_program, first_difference, verify
from ..verify.parity import ranks_of
from .checkpoint import add_checkpoint, run_checkpoint
from .doctor import doctor_parser, run_doctor
from .models import MODEL, load_model, resize_batch
from .progress import SearchProgress
from .rehearse import rehearse_parser, run_rehearse
from .simulate import run_simulate, simulate_parser
from .train import run_train


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    console = Console(width=None if sys.stdout.isatty() else 120)
    if words[:1] == ["train"]:  # its options come from a class signature
        return _guarded("train", lambda: run_train(words[1:]))
    options = make_parser().parse_args(words)
    return _guarded(options.command, lambda: COMMANDS[options.command](options[options.command], console))


def _guarded(command: str, run: Callable[[], int]) -> int:
    try:
        return run()
    except (ShardwrightError, OSError) as error:
        print(f"shardwright {command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        kept = "resume with --resume last" if command == "train" else "and nothing was written"
        print(f"shardwright {command}: interrupted, {kept}", file=sys.stderr)
        return 130


def make_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="shardwright", description="Compile a PyTorch model for many devices and inspect the result."
    )
    commands = parser.add_subcommands(dest="command")
    plan = ArgumentParser(
        description="Make a plan for a model, show its predicted cost on one screen, and write it to a file. "
        "Ctrl-C stops the search and takes the best plan so far."
    )
    _model_arguments(plan)
    _plan_arguments(plan)
    plan.add_argument("--full", action="store_true", help="show every op, parameter and collective too")
    plan.add_argument("--constraints", type=Path, help="constraints on the plan: a YAML file")
    plan.add_argument("-o", "--output", type=Path, help="where to write the plan (JSON); default: only show it")
    commands.add_subcommand("plan", plan, help="make a plan and show it")

    shown = ArgumentParser(
        description="Show the decisions and the predicted cost of a plan file; with the model also shapes, memory and "
        "collectives; with an op the cost of every other way to split it."
    )
    shown.add_argument("file", type=Path, help="a plan file")
    shown.add_argument(
        "--op", help='an op as named in the plan: "blocks.0.up / linear", or "blocks.*..." for all layers'
    )
    shown.add_argument("--full", action="store_true", help="show every op and parameter too")
    _known_model_arguments(shown)
    commands.add_subcommand("explain", shown, help="show the decisions and the predicted cost of a plan")

    compared = ArgumentParser(
        description="Show where two plan files differ and what both cost; with the model also the cost of "
        "each difference."
    )
    compared.add_argument("a", type=Path, help="a plan file")
    compared.add_argument("b", type=Path, help="another")
    _known_model_arguments(compared)
    commands.add_subcommand("diff", compared, help="compare two plan files")

    commands.add_subcommand("simulate", simulate_parser(), help="draw a pipeline schedule and its predicted time")

    compiled = ArgumentParser(description="Write the program of a model under a plan, as readable PyTorch code.")
    _model_arguments(compiled)
    compiled.add_argument("-o", "--output", type=Path, default=Path(".shardwright"), help="the directory to write to")
    compiled.add_argument(
        "--entry", choices=["train", "eval"], default="train", help="write the training or the eval program"
    )
    commands.add_subcommand("compile", compiled, help="write the generated program")

    commands.add_subcommand("verify", _verify_parser(), help="compare the program with the original")
    commands.add_subcommand(
        "rehearse", rehearse_parser(), help="run a plan for many devices on this machine, scaled down"
    )
    measured = ArgumentParser(description="Measure this machine, or under torchrun these machines, as a cluster.")
    measured.add_argument("-o", "--output", type=Path, help="where to write the cluster (YAML); default: only show it")
    measured.add_argument("--quick", action="store_true", help="fewer and smaller sizes, in less than a minute")
    measured.add_argument("--ranks", type=int, help="processes to start; default: one per core")
    commands.add_subcommand("calibrate", measured, help="measure this machine as a cluster")
    commands.add_subcommand("doctor", doctor_parser(), help="check this machine, and each kind of plan on it")
    add_checkpoint(commands)
    commands.add_subcommand("train", ArgumentParser(), help="train a model from a config file; see docs/training.md")
    return parser


def _verify_parser() -> ArgumentParser:
    verified = ArgumentParser(description="Run the original and the compiled program on one batch and compare them.")
    _model_arguments(verified, plan=None)
    verified.add_argument("--dtype", choices=["float64", "float32"], help="dtype of the comparison; default: float64")
    verified.add_argument(
        "--precision", choices=list(NAMED), help="train both in this precision; default: the model's dtypes"
    )
    verified.add_argument("--steps", type=int, default=3, help="optimizer steps to compare")
    verified.add_argument("--optimizer", choices=["sgd", "adamw"], default="sgd", help="the optimizer")
    verified.add_argument("--tolerance", type=float, help="default: 1e-10 in float64, 1e-5 in float32")
    verified.add_argument("--eval", action="store_true", help="compare evaluation mode too")
    verified.add_argument("--trace", action="store_true", help="if they differ, find the first op that differs")
    return verified


def _model_arguments(parser: ArgumentParser, plan: str | None = "auto") -> None:
    parser.add_argument("model", help=MODEL)
    usual = "" if plan else "; default: dp=2, tp=2, zero3=2 and pp=2, one after the other"
    text = f'"dp=2,tp=2", the path of a plan file, a policy (mine.py:policy), "auto", or "auto,tp=2"{usual}'
    parser.add_argument("--plan", type=str if plan else str | None, default=plan, help=text)
    parser.add_argument("--devices", type=int, help="number of devices for auto and for policies; other plans fix it")
    parser.add_argument("--microbatches", type=int, help="number of microbatches; default: chosen by the plan")
    parser.add_argument(
        "--opaque",
        choices=["marked", "auto"],
        default="marked",
        help="auto: submodules that can't be captured run eagerly",
    )
    _size_arguments(parser)


def _plan_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--cluster", help="what to plan for: a name such as 8xA100-80GB, or a cluster file (YAML)")
    parser.add_argument("--memory", help="memory limit of a device, such as 70GiB; default: all")
    parser.add_argument("--precision", choices=list(NAMED), help="train in this precision; default: the model's dtypes")
    parser.add_argument(
        "--optimizer", default="adamw", help="optimizer whose state is counted: adamw, sgd, momentum, ..."
    )
    parser.add_argument("--accumulate", type=int, default=1, help="gradient accumulation: backwards per update")
    parser.add_argument(
        "--inputs",
        choices=["global", "per_replica"],
        default="global",
        help="per_replica: each data-parallel replica passes its own samples",
    )
    parser.add_argument(
        "--outputs", choices=["all", "scalars"], help="scalars: return only the loss; default for hf: models"
    )
    parser.add_argument("--seconds", type=float, help="time limit of the search")


def _known_model_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--model", help=f"the model of the plan: {MODEL}")
    parser.add_argument("--cluster", help="cluster to price on; default: the plan's")
    _size_arguments(parser)


def _size_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--batch", type=int, help="batch size of the example; default: that of the model's example")
    parser.add_argument("--seq", type=int, default=128, help="sequence length of the example of an hf: model")


# -- the commands ----------------------------------------------------------------------


def run_plan(options: Namespace, console: Console) -> int:
    module, example = load_model(options.model, options.batch, options.seq, meta=True)
    outputs: Outputs = options.outputs or ("scalars" if options.model.startswith("hf:") else "all")
    if options.accumulate < 1:
        raise InputError(f"--accumulate {options.accumulate} must be at least 1 (an update after every backward)")
    size = _devices(options)
    with SearchProgress() as watching:
        search = SearchOptions(
            seconds=math.inf if options.seconds is None else options.seconds, microbatches=options.microbatches,
            data_only=options.inputs == "per_replica", progress=watching, stop=watching.stopped,
        )  # fmt: skip
        exact = read_precision(options.precision)
        request = read_request(
            module, read_source(options.plan), cluster=cluster_for(options.cluster or size, size),
            training=training_of(options.optimizer, options.accumulate, exact), memory=options.memory,
            constraints=options.constraints, search=search,
        )  # fmt: skip
        compiled = CompileOptions(outputs=outputs, opaque=options.opaque)
        plan, captured = planned(module, example, request, size, precision=exact, options=compiled)
    console.print(explain(plan, captured.graph) if options.full else explain(plan))
    if options.outputs is None and outputs == "scalars":
        console.print(ONLY_SCALARS, highlight=False)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        plan.save(options.output)
        console.print(f"written to {options.output}", highlight=False, soft_wrap=True)
    return 0


def run_explain(options: Namespace, console: Console) -> int:
    plan = read_plan(options.file)  # report its errors first
    if options.op is not None:
        if options.model is None:
            raise InputError("--op needs the model of the plan: --model FILE.py:FUNCTION")
        with Status("pricing the alternatives", console=Console(stderr=True)):
            explanation = explain(plan, _graph(options, plan), op=options.op, cluster=options.cluster)
        console.print(explanation)
    elif options.model is not None:
        console.print(explain(plan, _graph(options, plan), cluster=options.cluster))
    elif options.cluster is not None:
        raise InputError("--cluster prices the plan anew, which needs its model: --model FILE.py:FUNCTION")
    else:
        console.print(explain(plan, full=options.full))
    return 0


def run_diff(options: Namespace, console: Console) -> int:
    a, b = read_plan(options.a), read_plan(options.b)
    with Status("comparing", console=Console(stderr=True)):
        graph = _graph(options, a) if options.model is not None else None
        difference = diff(a, b, graph, cluster=options.cluster)
    console.print(difference)
    return 0


def _graph(options: Namespace, plan: Plan) -> Graph:
    """The graph of a model in the precision that a plan was made for."""
    module, example = load_model(options.model, options.batch, options.seq, meta=True)
    names = (predicted["for"].get("precision") for predicted in plan.predicted.values())
    return captured_graph(module, example, precision=next((name for name in names if name in NAMED), None)).graph


def run_compile(options: Namespace, console: Console) -> int:
    module, (args, kwargs) = load_model(options.model, options.batch, options.seq, meta=True)
    if module.training != (options.entry == "train"):
        module.train(options.entry == "train")
    request = PlanRequest.read(options.plan, options=SearchOptions(microbatches=options.microbatches))
    compiled = compile_program(find_opaque(module, options.opaque), args, kwargs, request, _devices(options))
    for program, text in zip(compiled.programs, compiled.texts, strict=True):
        path, lines = write(text, options.output, program), len(text.splitlines())
        console.print(f"{path}: {lines} lines for {program.devices} devices", highlight=False, soft_wrap=True)
    return 0


def run_verify(options: Namespace, console: Console) -> int:
    module, example = load_model(options.model, options.batch, options.seq)
    open_size = options.plan is None or source_size(read_source(options.plan)) is None
    size = options.devices if open_size else None
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    if options.trace and options.precision is not None:
        raise InputError("--trace compares ops in float64 or float32; leave out --precision")
    report = verify(
        module, options.plan, example=example, dtype=dtype, precision=options.precision, steps=options.steps,
        optimizer=options.optimizer, tolerance=options.tolerance, size=size, method="threads",
        entries=("train", "eval") if options.eval else ("train",), compile=CompileOptions(opaque=options.opaque),
        pipeline=PipelineOptions(microbatches=options.microbatches),
    )  # fmt: skip
    console.print(report)
    if not report.passed and options.trace:
        plan = options.plan or report.worst.plan or "auto"
        difference = first_difference(module, plan, example=example, dtype=dtype or torch.float64, size=size)
        console.print("the first difference: " if difference else "", end="")
        console.print(str(difference) if difference else AGREES, highlight=False, markup=False)
    return 0 if report.passed else 1


def run_calibrate(options: Namespace, console: Console) -> int:
    if options.ranks is not None and options.ranks < 1:
        raise InputError(f"--ranks {options.ranks} must be at least 1")
    name = options.output.stem if options.output is not None else "measured"
    cluster, world = calibrate(QUICK if options.quick else FULL, options.ranks, name)
    if world.rank != 0:
        return 0
    console.print(tables(cluster))
    if cluster.size == 1 and world.device.type != "cpu":
        console.print(UNDER_TORCHRUN, highlight=False)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        save(cluster, options.output)
        console.print(f"written to {options.output}", highlight=False, soft_wrap=True)
    return 0


ONLY_SCALARS = "the program returns only the loss, as is usual in training; --outputs all returns the logits too"
UNDER_TORCHRUN = (
    "collectives were not measured; to measure them start one process per GPU: "
    "torchrun --no-python --nproc-per-node 8 shardwright calibrate ..."
)
AGREES = "every op matches the original: look at the generated file, or at the sync of parameters"
COMMANDS: dict[str, Callable[[Namespace, Console], int]] = {
    "plan": run_plan,
    "explain": run_explain,
    "diff": run_diff,
    "simulate": run_simulate,
    "compile": run_compile,
    "verify": run_verify,
    "rehearse": run_rehearse,
    "calibrate": run_calibrate,
    "doctor": run_doctor,
    "checkpoint": run_checkpoint,
}


def _devices(options: Namespace) -> int:
    """The number of devices: the plan's, that of --devices, or all of the cluster."""
    source = read_source(options.plan)
    if not isinstance(source, AutoPlan) and not is_policy(source):
        ranks = ranks_of(source)
        if options.devices is not None and options.devices != ranks:
            raise InputError(f"--devices {options.devices} does not fit --plan {options.plan}, which is for {ranks}")
        return ranks
    named = options.get("cluster")
    return options.devices or (cluster_size(named, source) if named is not None else 1)


__all__ = ["load_model", "main", "resize_batch"]

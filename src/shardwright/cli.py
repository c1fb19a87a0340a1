"""The command line: plan, explain, compile, verify, calibrate.

    shardwright plan    train.py:make_model --plan tp=2 -o plan.json
    shardwright explain plan.json --model train.py:make_model
    shardwright compile train.py:make_model --plan dp=2,tp=2 -o generated
    shardwright verify  train.py:make_model --plan tp=2
    shardwright calibrate -o cluster.yaml

A model is named by a file (or an importable module) and a function in it that returns the
module and an example of its arguments; or by a Hugging Face config, `hf:config.json`. None
of these commands needs a GPU or other processes. Exit code 0: fine, 1: the program differs
from the original, 2: something is wrong with what was asked.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentParser, Namespace
from rich.console import Console
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .calibrate import FULL, QUICK, calibrate, tables
from .capture import find_opaque
from .cluster import save
from .compile import write
from .errors import InputError, ShardwrightError
from .parallelize import plan as make_plan
from .report import explain, read_plan
from .runtime.inputs import rows_of
from .verify import compile_program, first_difference, verify
from .verify.parity import arguments_of, ranks_of

MODEL = "FILE.py:FUNCTION or MODULE:FUNCTION, a function that returns (module, example); or hf:CONFIG.json"
Example = tuple[tuple[Any, ...], dict[str, Any]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code."""
    parser = make_parser()
    asked = parser.parse_args(list(argv) if argv is not None else None)
    console = Console(width=None if sys.stdout.isatty() else 120)
    try:
        return COMMANDS[asked.command](asked[asked.command], console)
    except (ShardwrightError, OSError) as error:
        print(f"shardwright {asked.command}: {error}", file=sys.stderr)
        return 2


def make_parser() -> ArgumentParser:
    parser = ArgumentParser(prog="shardwright", description="Compile a PyTorch model for many devices, and look at it.")
    commands = parser.add_subcommands(dest="command")
    plan = ArgumentParser(description="Make a plan for a model, show it, and write it to a file.")
    _model_arguments(plan)
    plan.add_argument("--constraints", type=Path, help="what --plan auto has to keep to: a YAML file")
    plan.add_argument("-o", "--output", type=Path, help="where to write the plan (JSON); without it, it is only shown")
    commands.add_subcommand("plan", plan, help="make a plan and show it")

    shown = ArgumentParser(description="Show what a plan file decides; with the model also what follows from it.")
    shown.add_argument("file", type=Path, help="a plan file")
    shown.add_argument("--model", help=f"the model that it was made for: {MODEL}")
    _size_arguments(shown)
    commands.add_subcommand("explain", shown, help="show what a plan file decides")

    compiled = ArgumentParser(description="Write the program that a plan makes of a model, as PyTorch code to read.")
    _model_arguments(compiled)
    compiled.add_argument("-o", "--output", type=Path, default=Path(".shardwright"), help="the directory to write to")
    compiled.add_argument("--entry", choices=["train", "eval"], default="train", help="the program for which mode")
    commands.add_subcommand("compile", compiled, help="write the generated program")

    verified = ArgumentParser(description="Run the original and the compiled program on one batch and compare them.")
    _model_arguments(verified)
    verified.add_argument("--dtype", choices=["float64", "float32"], default="float64", help="in what to compare")
    verified.add_argument("--steps", type=int, default=3, help="optimizer steps to compare")
    verified.add_argument("--optimizer", choices=["sgd", "adamw"], default="sgd", help="the optimizer")
    verified.add_argument("--tolerance", type=float, help="1e-10 in float64 and 1e-5 in float32, if not given")
    verified.add_argument("--eval", action="store_true", help="compare evaluation mode too")
    verified.add_argument("--trace", action="store_true", help="if they differ, find the first op that does")
    commands.add_subcommand("verify", verified, help="compare the program with the original")

    measured = ArgumentParser(description="Measure this machine, or under torchrun these machines, as a cluster.")
    measured.add_argument("-o", "--output", type=Path, help="where to write the cluster (YAML); else it is only shown")
    measured.add_argument("--quick", action="store_true", help="fewer and smaller sizes, in less than a minute")
    measured.add_argument("--ranks", type=int, help="processes to start; one for each core if not said")
    commands.add_subcommand("calibrate", measured, help="measure this machine as a cluster")
    return parser


def _model_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("model", help=MODEL)
    parser.add_argument("--plan", default="auto", help='"dp=2,tp=2", the path of a plan file, or "auto"')
    parser.add_argument("--devices", type=int, help="how many devices, for --plan auto; else the plan says it")
    parser.add_argument(
        "--opaque", choices=["marked", "auto"], default="marked", help="auto: what can't be captured stays as it is"
    )
    _size_arguments(parser)


def _size_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--batch", type=int, help="rows of the example, if other than the model's own example has")
    parser.add_argument("--seq", type=int, default=128, help="length of the example of an hf: model")


# -- the commands ----------------------------------------------------------------------


def run_plan(asked: Namespace, console: Console) -> int:
    module, (args, kwargs) = load_model(asked.model, asked.batch, asked.seq, meta=True)
    wish = asked.plan
    if asked.constraints is not None:
        wish = make_plan(
            module, example=(args, kwargs), plan=wish, cluster=_devices(asked), constraints=asked.constraints,
            entry="train" if module.training else "eval", opaque=asked.opaque,
        )  # fmt: skip
    made = compile_program(find_opaque(module, asked.opaque), args, kwargs, wish, _devices(asked))
    console.print(explain(made.plan, made.captured.graph))
    if asked.output is not None:
        asked.output.parent.mkdir(parents=True, exist_ok=True)
        made.plan.save(asked.output)
        console.print(f"written to {asked.output}", highlight=False, soft_wrap=True)
    return 0


def run_explain(asked: Namespace, console: Console) -> int:
    if asked.model is None:
        console.print(explain(read_plan(asked.file)))
        return 0
    module, (args, kwargs) = load_model(asked.model, asked.batch, asked.seq, meta=True)
    read_plan(asked.file)  # its faults first
    made = compile_program(module, args, kwargs, asked.file, ranks_of(asked.file))
    console.print(explain(made.plan, made.captured.graph))
    return 0


def run_compile(asked: Namespace, console: Console) -> int:
    module, (args, kwargs) = load_model(asked.model, asked.batch, asked.seq, meta=True)
    if module.training != (asked.entry == "train"):
        module.train(asked.entry == "train")
    made = compile_program(find_opaque(module, asked.opaque), args, kwargs, asked.plan, _devices(asked))
    text = made.text
    path = write(text, asked.output, made.program)
    lines = len(text.splitlines())
    console.print(f"{path}: {lines} lines for {made.plan.mesh.size} devices", highlight=False, soft_wrap=True)
    return 0


def run_verify(asked: Namespace, console: Console) -> int:
    module, example = load_model(asked.model, asked.batch, asked.seq)
    size = asked.devices if asked.plan == "auto" else None
    report = verify(
        module, asked.plan, example=example, dtype=getattr(torch, asked.dtype), steps=asked.steps,
        optimizer=asked.optimizer, tolerance=asked.tolerance, size=size, method="threads",
        entries=("train", "eval") if asked.eval else ("train",), opaque=asked.opaque,
    )  # fmt: skip
    console.print(report)
    if not report.passed and asked.trace:
        found = first_difference(module, asked.plan, example=example, dtype=getattr(torch, asked.dtype), size=size)
        console.print("the first difference: " if found else "", end="")
        console.print(str(found) if found else AGREES, highlight=False, markup=False)
    return 0 if report.passed else 1


def run_calibrate(asked: Namespace, console: Console) -> int:
    if asked.ranks is not None and asked.ranks < 1:
        raise InputError(f"--ranks {asked.ranks} is no number of processes")
    name = asked.output.stem if asked.output is not None else "measured"
    cluster, world = calibrate(QUICK if asked.quick else FULL, asked.ranks, name)
    if world.rank != 0:
        return 0
    console.print(tables(cluster))
    if cluster.size == 1 and world.device.type == "cuda":
        console.print(UNDER_TORCHRUN, highlight=False)
    if asked.output is not None:
        asked.output.parent.mkdir(parents=True, exist_ok=True)
        save(cluster, asked.output)
        console.print(f"written to {asked.output}", highlight=False, soft_wrap=True)
    return 0


UNDER_TORCHRUN = (
    "collectives were not measured; for those start one process a GPU: "
    "torchrun --no-python --nproc-per-node 8 shardwright calibrate ..."
)
AGREES = (
    "op by op the program does what the original does: "
    "look at the generated file, or at how parameters are kept in sync"
)
COMMANDS: dict[str, Callable[[Namespace, Console], int]] = {
    "plan": run_plan,
    "explain": run_explain,
    "compile": run_compile,
    "verify": run_verify,
    "calibrate": run_calibrate,
}


def _devices(asked: Namespace) -> int:
    said = asked.devices or 1 if asked.plan == "auto" else ranks_of(asked.plan)
    if asked.devices is not None and asked.devices != said:
        raise InputError(f"--devices {asked.devices} does not fit --plan {asked.plan}, which is for {said}")
    return said


# -- models ----------------------------------------------------------------------------


def load_model(text: str, batch: int | None, seq: int, *, meta: bool = False) -> tuple[nn.Module, Example]:
    """The module that a name on the command line stands for, and an example of its arguments."""
    if batch is not None and batch < 1:
        raise InputError(f"--batch {batch} is no batch")
    if text.startswith("hf:"):
        return _hugging_face(Path(text.removeprefix("hf:")), batch or 8, seq, meta)
    where, colon, name = text.rpartition(":")
    if not colon or not where or not name:
        raise InputError(f"{text!r} does not name a model; write {MODEL}")
    module = _import_file(Path(where)) if where.endswith(".py") else _import_module(where)
    make = getattr(module, name, None)
    if not callable(make):
        known = [key for key, held in vars(module).items() if callable(held) and not key.startswith("_")]
        raise InputError(f"{where} has no function {name!r}; it has {', '.join(known) or 'none'}")
    made = make()
    found, example = _parts(made, text)
    return found, example if batch is None else with_rows(example, batch)


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise InputError(f"there is no file {path}")
    name = path.stem
    held = sys.modules.get(name)
    if held is not None and Path(getattr(held, "__file__", None) or "").resolve() == path.resolve():
        return held
    if held is not None or not name.isidentifier():
        name = f"shardwright_model_{abs(hash(path.resolve()))}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # generated code finds the model's own functions there
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(str(path.resolve().parent))
    return module


def _import_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise InputError(f"there is no module {name!r} ({error}); for a file write its path, ending in .py") from error


def _parts(made: Any, text: str) -> tuple[nn.Module, Example]:
    """(module, example) from what the user's function returned."""
    if isinstance(made, nn.Module):
        raise InputError(f"{text} returns a module alone; return (module, example), with example a tuple of arguments")
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], nn.Module):
        raise InputError(f"{text} returns a {type(made).__name__}; return (module, example) or (module, args, kwargs)")
    return made[0], arguments_of(made[1] if len(made) == 2 else (tuple(made[1]), dict(made[2])))


def with_rows(example: Example, batch: int) -> Example:
    """The example with another number of rows: its own, over and over."""
    leaves, spec = pytree.tree_flatten(example)
    rows = rows_of([leaf for leaf in leaves if isinstance(leaf, Tensor)])
    if rows is None:
        raise InputError(f"--batch {batch}: the example's tensors have no common first dim; leave --batch out")

    def repeated(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0:
            return leaf
        return leaf.index_select(0, torch.arange(batch, device=leaf.device) % rows)

    made: Example = pytree.tree_unflatten([repeated(leaf) for leaf in leaves], spec)
    return made


def _hugging_face(path: Path, batch: int, seq: int, meta: bool) -> tuple[nn.Module, Example]:
    """A language model from its config, with random weights, and ids to train it on."""
    try:
        import transformers
    except ImportError as error:
        raise InputError("hf: needs the package transformers; install it with pip install transformers") from error
    try:
        data = json.loads(path.read_text())
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict) or "model_type" not in data:
        raise InputError(f"{path} is no Hugging Face config: it has no model_type")
    config = transformers.AutoConfig.for_model(**data)
    named = getattr(transformers, (data.get("architectures") or ["?"])[0], None)
    with torch.device("meta" if meta else "cpu"):
        make: Any = named or transformers.AutoModelForCausalLM.from_config
        module: nn.Module = make(config)
    longest = getattr(config, "max_position_embeddings", None)
    ids = torch.randint(config.vocab_size, (batch, min(seq, longest or seq)))
    return module.train(), ((ids,), {"labels": ids.clone(), "use_cache": False})


if __name__ == "__main__":
    sys.exit(main())

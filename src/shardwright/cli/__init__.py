"""The command line: a plan made, explained, compared and drawn; programs compiled, verified, rehearsed and trained.

    shardwright plan    train.py:make_model --cluster 8xA100-80GB --batch 64 -o plan.json
    shardwright explain plan.json
    shardwright explain plan.json --model train.py:make_model --op "blocks.*.up / linear"
    shardwright diff    plan.json other.json
    shardwright report  plan.json --model train.py:make_model -o report.html
    shardwright simulate --schedule zb --stages 4 --microbatches 8
    shardwright compile train.py:make_model --plan dp=2,tp=2 -o generated
    shardwright verify  train.py:make_model --plan tp=2
    shardwright rehearse plan.json --model train.py:make_model
    shardwright calibrate -o cluster.yaml
    shardwright doctor
    shardwright checkpoint inspect run/step-001000
    shardwright train config.yaml --model.init_args.n_layer 24

Read this file (`main`), `arguments.py` (the options of all commands) and `parser.py`, then the file of a command;
`train.py` is the largest. `models.py` loads the model that a command is about. A command's file is imported when the
command runs: only they import torch.

A model is named by a file (or an importable module) and a function in it that returns the
module and example arguments, or by a Hugging Face config, `hf:config.json`. No command needs
a GPU or other processes. Exit code 0: success, 1: the program differs from the original,
2: invalid arguments or input, 130: interrupted.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from .. import __version__
from ..errors import ShardwrightError
from .arguments import make_parser
from .train_help import asked_help, help_of_train

FILES = {"plan": "plans", "explain": "plans", "diff": "plans", "compile": "programs", "verify": "programs"}
"""Where the function `run_<command>` is, if not in a file of the command's name."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["train"]:  # its options come from a class signature
        if shown := asked_help(words[1:]):
            return _guarded("train", lambda: print(help_of_train(shown)) or 0)
        return _guarded("train", lambda: _command("train")(words[1:]))
    parser = make_parser(f"shardwright {__version__}")
    if not words:
        parser.print_help(sys.stderr)
        return 2
    options = parser.parse_args(words)
    return _guarded(options.command, lambda: _command(options.command)(options, _console()))


def _command(name: str) -> Any:
    module = importlib.import_module(f".{FILES.get(name, name)}", __package__)
    return getattr(module, f"run_{name}")


def _console() -> Any:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 120)


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


__all__ = ["main", "make_parser"]

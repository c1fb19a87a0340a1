"""`shardwright train config.yaml`: a run from a config file, with overrides on the command line.

    shardwright train config.yaml --model.init_args.n_layer 24 --max_steps 1000
    torchrun --nproc-per-node 8 --no-python shardwright train config.yaml --resume last
    shardwright train config.yaml --mode compile

The keys of a file are the arguments of `sw.Trainer`; classes are given as in Lightning's command line, by `class_path`
and `init_args`. Modules next to the file and in the current directory can be imported.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from jsonargparse import ArgumentError, ArgumentParser, Namespace
from torch import distributed as dist
from torch.utils.data import Dataset

from ..errors import InputError, ShardwrightError
from ..train import Trainer
from ..train.config import Keys, check_config, check_overrides, explained, read_config
from ..train.options import MOVED_IN_TRAINER
from ..train.setup import seed_everything

MODES = ("fit", "validate", "compile", "profile")

# The type in a config file of arguments that take any object in Python, and their defaults.
TYPES: dict[str, tuple[Any, Any]] = {
    "train_data": (Dataset, ...),
    "val_data": (Dataset | None, None),
    "plan": (str, "auto"),
    "precision": (str | dict[str, Any] | None, None),
}
DOCUMENTED_ARGUMENT = re.compile(r"^    (\w+): ((?:.|\n        )+)", re.MULTILINE)  # of an argument, in a docstring


def run_train(argv: Sequence[str]) -> int:
    """Read the settings, build the trainer and run it; leave the process group if it was joined for this run."""
    joined = dist.is_initialized()
    try:
        return _run(argv)
    finally:
        if dist.is_initialized() and not joined:
            dist.destroy_process_group()


def _run(argv: Sequence[str]) -> int:
    return run_compile_only(*parse_settings(argv))


def parse_settings(argv: Sequence[str]) -> tuple[Namespace, ArgumentParser]:
    """The settings in files and on the command line. Files name classes, whose modules are imported here."""
    files, overrides = split_files(argv)
    for folder in (*(file.resolve().parent for file in files), Path.cwd()):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    parser = train_parser()
    known = keys_of(Trainer.__init__, "mode")
    configs = [read_config(file) for file in files]
    for config in configs:
        check_config(config, known, MOVED_IN_TRAINER)
    check_overrides(overrides, MOVED_IN_TRAINER)
    try:
        options = parser.parse_args([*(f"--config={file}" for file in files), *overrides])
    except ArgumentError as error:
        raise InputError(explained(str(error), configs, known, overrides)) from error
    return options, parser


def run_compile_only(options: Namespace, parser: ArgumentParser) -> int:
    mode = options.pop("mode")
    options.pop("config", None)
    text = parser.dump(options, skip_unset=False)
    seed_everything(options.seed)
    try:
        trainer = Trainer(**vars(parser.instantiate(options)))  # no other reference to the model
    except ValueError as error:
        if isinstance(error.__cause__, ShardwrightError):  # an options object that refused a value
            raise error.__cause__ from None
        raise
    trainer.config = text
    getattr(trainer, mode)()
    return 0


def split_files(argv: Sequence[str]) -> tuple[list[Path], list[str]]:
    """The config files (leading arguments or after --config), and the rest."""
    files: list[Path] = []
    left = list(argv)
    while left and not left[0].startswith("-"):
        files.append(Path(left.pop(0)))
    overrides: list[str] = []
    while left:
        word = left.pop(0)
        if word == "--config" and left:
            files.append(Path(left.pop(0)))
        elif word.startswith("--config="):
            files.append(Path(word.partition("=")[2]))
        else:
            overrides.append(word)
    for file in files:
        if not file.is_file():
            raise InputError(f"there is no file {file}; the first argument of train is a config file (YAML)")
    return files, overrides


def train_parser() -> ArgumentParser:
    """A parser built from the signature of `sw.Trainer`."""
    parser = ArgumentParser(
        prog="shardwright train",
        description="Train a model from a config file.",
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="config", help="a file of settings (YAML)")
    parser.add_argument("--mode", choices=MODES, default="fit", help="compile: write plan and code without training")
    parser.add_class_arguments(Trainer, skip=set(TYPES))
    for name, (kind, default) in TYPES.items():
        parser.add_argument(f"--{name}", type=kind, **({"required": True} if default is ... else {"default": default}))
    documentation = dict(DOCUMENTED_ARGUMENT.findall(inspect.getdoc(Trainer) or ""))
    for action in parser._actions:
        if action.dest in documentation:
            action.help = " ".join(documentation[action.dest].split())
    return parser


def keys_of(function: Any, *more: str) -> Keys:
    """The keys of a config file: the arguments of a function, and the fields of those that are dataclasses."""
    keys = {**dict.fromkeys(more), **_keys_below(get_type_hints(function))}
    keys.pop("return", None)
    keys["plan"] = None
    return keys


def _keys_below(hints: Mapping[str, Any]) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    for name, hint in hints.items():
        kinds = [kind for kind in (hint, *get_args(hint)) if is_dataclass(kind) and isinstance(kind, type)]
        keys[name] = {key: below for kind in kinds for key, below in _keys_below(get_type_hints(kind)).items()} or None
    return keys

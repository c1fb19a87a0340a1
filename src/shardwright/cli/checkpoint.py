"""`shardwright checkpoint inspect | convert | verify`: inspect checkpoints, and convert them to safetensors."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ..checkpoint import Opened, checkpoint_at, checkpoints_in, convert, open_checkpoint, verify
from ..errors import CheckpointError, InputError
from .progress import working


def run_checkpoint(options: Namespace, console: Console) -> int:
    return _ACTIONS[options.action](options, console)


def run_inspect(options: Namespace, console: Console) -> int:
    opened = open_checkpoint(_find_checkpoint(options.path))
    console.print(_facts(opened))
    console.print(_tensors(opened, options.full))
    return 0


def run_convert(options: Namespace, console: Console) -> int:
    if options.shard_gb <= 0:
        raise InputError(f"--shard-gb {options.shard_gb} must be positive")
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    with working("converting"):
        form = convert(
            options.path, options.to, form=options.form, dtype=dtype, shard_size=int(options.shard_gb * 10**9),
            config=options.config,
        )  # fmt: skip
    description = {"file": "a safetensors file", "hf": "a Hugging Face folder", "checkpoint": "a checkpoint"}[form]
    console.print(f"written to {options.to}, {description}", highlight=False, soft_wrap=True)
    return 0


def run_verify_checkpoint(options: Namespace, console: Console) -> int:
    several = sorted(
        {*checkpoints_in(options.path), *(mark.parent for mark in options.path.glob("step-*/manifest.json"))}
    )
    faults = 0
    for path in several or [_find_checkpoint(options.path)]:
        try:
            with working(f"reading {path}"):
                manifest = verify(path)
        except CheckpointError as error:
            console.print(str(error), highlight=False, markup=False, soft_wrap=True)
            faults += 1
        else:
            console.print(f"{path} is complete: {_bytes(manifest.size)}", highlight=False, soft_wrap=True)
    return 1 if faults else 0


_ACTIONS = {"inspect": run_inspect, "convert": run_convert, "verify": run_verify_checkpoint}


def _find_checkpoint(path: Path) -> Path:
    checkpoint = checkpoint_at(path)
    if checkpoint is None:
        raise InputError(f"{path} is neither a checkpoint nor a folder of checkpoints")
    return checkpoint


def _facts(opened: Opened) -> Table:
    state, manifest = opened.state, opened.manifest
    table = Table(title=str(opened.folder), show_header=False, title_justify="left")
    table.add_row("step", str(manifest.step) if manifest.step is not None else "unknown")
    table.add_row("saved", f"{manifest.when}, by {manifest.world} rank{'s' if manifest.world > 1 else ''}")
    table.add_row("size", f"{_bytes(manifest.size)} in {len(manifest.files)} files")
    for prefix, plan in state["plans"].items():
        table.add_row(f"plan of {prefix[:-1]}" if prefix else "plan", _plan(json.loads(plan)))
    for optimizer in state["optimizers"]:
        counts = ", ".join(f"{len(group['params'])} at lr {group.get('lr', '?')}" for group in optimizer["groups"])
        table.add_row("optimizer", f"{optimizer['kind']}: {counts}")
    if state["schedulers"]:
        table.add_row("schedulers", str(len(state["schedulers"])))
    if manifest.metrics:
        table.add_row("metrics", ", ".join(f"{name} {value:g}" for name, value in manifest.metrics.items()))
    if state["data"] is not None:
        table.add_row("data", json.dumps(state["data"]))
    if state["extra"]:
        table.add_row("extra", ", ".join(state["extra"]))
    table.add_row("versions", ", ".join(f"{name} {optimizer}" for name, optimizer in state["versions"].items()))
    return table


def _plan(plan: Mapping[str, Any]) -> str:
    mesh = ", ".join(f"{name} {size}" for name, size in plan.get("mesh", {}).items())
    return f"{plan.get('policy', '?')} (mesh: {mesh or 'one device'})"


def _tensors(opened: Opened, full: bool) -> Table:
    table = Table("key", "shape", "dtype", "size", "shards")
    others = {key: entry for key, entry in opened.index.entries.items() if not key.startswith("model/")}
    for key, entry in opened.index.entries.items():
        if full or key not in others:
            spec = entry.spec
            name, dtype = key if full else key.removeprefix("model/"), str(spec.dtype).removeprefix("torch.")
            shape = " ".join(map(str, spec.shape)) or "a scalar"
            table.add_row(name, shape, dtype, _bytes(spec.size), str(len(entry.chunks)))
    for key, first in opened.state["tied"].items():
        table.add_row(key, f"tied to {first}", "", "", "")
    if others and not full:
        size = sum(entry.spec.size for entry in others.values())
        table.add_row(f"{len(others)} more: optimizer state and others (--full)", "", "", _bytes(size), "")
    return table


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"

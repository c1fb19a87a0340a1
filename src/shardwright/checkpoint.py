"""Checkpoints: saved under one plan, loaded under another.

A checkpoint is a folder of `torch.distributed.checkpoint` with the original keys. It is
written beside its final name and moved there when it is whole, so that a crash leaves the
old one. Loading runs no code from the file.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as read
from torch.distributed.checkpoint.state_dict_saver import save as write
from torch.optim import Optimizer

from .errors import InputError
from .runtime.state import fill_state, load_optimizer_state_dict, optimizer_state_dict


def save(path: str | Path, model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Write the model, and the optimizer if given, as a checkpoint that any plan can load. All ranks call it."""
    final, draft = Path(path), Path(f"{path}.part")
    if _first():
        shutil.rmtree(draft, ignore_errors=True)
    _meet()
    write(_state(model, optimizer), checkpoint_id=draft, no_dist=not dist.is_initialized())
    _meet()
    if _first():
        old = Path(f"{path}.old")
        if final.exists():
            final.replace(old)
        draft.replace(final)
        shutil.rmtree(old, ignore_errors=True)
    _meet()


def load(path: str | Path, model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Read a checkpoint into a model, and an optimizer, that may be under another plan. All ranks call it."""
    if not (Path(path) / ".metadata").exists():
        raise InputError(f"{path} is not a checkpoint: it has no .metadata; pass the folder that sw.save wrote")
    if optimizer is not None:
        fill_state(optimizer)
    held = _state(model, optimizer)
    read(held, checkpoint_id=path, no_dist=not dist.is_initialized())
    model.load_state_dict(held["model"])
    if optimizer is not None:
        load_optimizer_state_dict(optimizer, held["optimizer"])


def _state(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    held: dict[str, Any] = {"model": model.state_dict()}
    if optimizer is not None:
        held["optimizer"] = optimizer_state_dict(optimizer)
    return held


def _first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()

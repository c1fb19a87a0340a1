"""Checkpoints of a Trainer in the format of `sw.save`: folders that another plan can load.

What Lightning saves besides weights and optimizers (loops, callbacks, schedulers, hyperparameters)
is saved as `extra`. A file that Lightning wrote on one device can be loaded too: its weights into the
shards, and optimizer states if there are any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..checkpoint import load as load_state
from ..checkpoint import save as save_state
from ..checkpoint.encoding import encode
from ..checkpoint.key_owners import KeyOwners
from ..errors import CheckpointError, InputError
from ..runtime.optimizer.adopt import load_whole

Names = Sequence[Sequence[str]]
SHARDED_KEYS = ("state_dict", "optimizer_states")  # what is written in shards


def check_hyperparameters(*holders: Any) -> None:
    """Refuse before training what could not be saved later."""
    for holder in holders:
        for name, value in dict(getattr(holder, "hparams", None) or {}).items():
            try:
                encode(value, name, {})
            except InputError as error:
                raise InputError(
                    f"the hyperparameter {name} of {type(holder).__name__} is a {type(value).__name__}, which a "
                    f"checkpoint can't store without running code on loading; leave it out: "
                    f"self.save_hyperparameters(ignore=[{name!r}])"
                ) from error


def save(path: Path, model: nn.Module, optimizers: Sequence[Optimizer], checkpoint: Mapping[str, Any]) -> None:
    """Write what Lightning collected; weights and optimizers are read from the model."""
    rest = {name: value for name, value in checkpoint.items() if name not in SHARDED_KEYS}
    saved_optimizers = list(optimizers) if "optimizer_states" in checkpoint else None
    save_state(path, model, saved_optimizers, extra={"lightning": rest}, step=checkpoint.get("global_step"))


def names_of(model: nn.Module, optimizers: Sequence[Optimizer]) -> Names:
    """The names of the optimizers' parameters, in order; empty if they are not the model's."""
    known = {id(parameter): key for key, parameter in model.named_parameters()}
    return [
        [known.get(id(parameter), "") for group in optimizer.param_groups for parameter in group["params"]]
        for optimizer in optimizers
    ]


def load(
    path: Path, model: nn.Module, optimizers: Sequence[Optimizer], *, strict: bool, io: Any, names: Names
) -> dict[str, Any]:  # fmt: skip
    """Restore a checkpoint, and return what Lightning saved in it."""
    if path.is_file():
        return _load_file(path, model, optimizers, strict, io, names)
    loaded = load_state(path, model, list(optimizers) or None, strict=strict)
    if "lightning" not in loaded.extra:
        raise CheckpointError(f"{path} was not saved by a Lightning Trainer: load it with sw.load")
    return {"state_dict": {}, "optimizer_states": [], **loaded.extra["lightning"]}


def _load_file(
    path: Path, model: nn.Module, optimizers: Sequence[Optimizer], strict: bool, io: Any, names: Names
) -> dict[str, Any]:  # fmt: skip
    """A file that Lightning wrote on one device: full tensors, of which each rank takes its shards."""
    contents: dict[str, Any] = io.load_checkpoint(path, weights_only=True)
    model.load_state_dict(contents["state_dict"], strict=strict)
    census = KeyOwners(model)
    for optimizer, saved, order in zip(optimizers, contents.get("optimizer_states", ()), names, strict=False):
        load_whole(optimizer, saved, order, census.name_of)
    return contents

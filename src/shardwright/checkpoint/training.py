"""A training state: all that a run needs to go on as if it had not stopped, as tensors and JSON.

    model/<key>                     parameters and persistent buffers
    optimizer/<n>/<key>/<name>      state of the n-th optimizer
    rng/<rank>                      generators of each rank
    extra/<name>/...                whatever the user adds

Everything that is not a tensor is in one JSON: `Said`, put together from what the first rank of each
stage says.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..errors import CheckpointError, InputError, raise_all
from ..runtime.algorithms.random import Randomness
from ..runtime.model.parallel_model import ParallelModel
from ..runtime.optimizer.adopt import Optimizers, several
from ..runtime.parameters.state_values import ShardTensor, shard_like
from . import optimizers
from .encoding import decode, encode, keys_of
from .fit import fit
from .index import Index, read_into
from .key_owners import KeyOwners
from .randomness import generators, set_generators

Schedulers = Any  # a scheduler, several, or None: torch has no type for all of them

Said = dict[str, Any]
"""What is saved besides tensors."""


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """What is saved and loaded together."""

    model: nn.Module
    optimizers: Sequence[Optimizer]
    schedulers: Sequence[Any]
    extra: Mapping[str, Any]

    def collect(self, census: KeyOwners, data: Any) -> tuple[dict[str, Tensor], Said | None]:
        """What this rank holds and, if it speaks for others, what it has to say."""
        tensors = {f"model/{key}": held for key, held in census.tensors().items() if census.writes(key)}
        tensors[f"rng/{census.rank}"] = generators()
        said: Said = {
            "optimizers": [
                optimizers.collect(held, f"optimizer/{number}", census, tensors)
                for number, held in enumerate(self.optimizers)
            ],
            "schedulers": [
                encode(held.state_dict(), f"scheduler/{number}", tensors) for number, held in enumerate(self.schedulers)
            ],
            "extra": {name: encode(_state_of(held), f"extra/{name}", tensors) for name, held in self.extra.items()},
            "data": encode(_state_of(data), "data", tensors),
            "tied": census.tied,
            "random": {prefix: {"seed": held.seed, "step": held.step} for prefix, held in _drawing(self.model).items()},
            "plans": {prefix: part.plan.to_json() for prefix, part in census.compiled.items() if part.plan is not None},
            "versions": versions(),
        }
        return tensors, said if census.speaks else None

    def restore(self, said: Said, index: Index, census: KeyOwners, world: int, *, strict: bool, rng: bool) -> None:
        """Put a saved state in its places. Nothing is changed before everything is known to fit."""
        wanted = census.tensors()
        names = fit(census, index, said["tied"], "model/", strict, "the checkpoint")
        targets = {f"model/{key}": held for key, held in wanted.items() if f"model/{key}" in names}
        self._check(said)
        places = [
            optimizers.Restored(held, saved, census, index)
            for held, saved in zip(self.optimizers, said["optimizers"], strict=False)
        ]
        for place in places:
            targets |= place.targets
        loose = _Loose(index)
        set_later = [self._later(said, loose)]
        if rng and f"rng/{census.rank % world}" in index.entries:
            mine = loose.place(f"rng/{census.rank % world}")
            set_later.append(lambda: set_generators(mine))
        read_into({**targets, **loose.places}, index, names)
        census.filled({key.removeprefix("model/") for key in names})
        for place in places:
            place.set()
        for act in set_later:
            act()
        _set_drawing(self.model, said["random"])

    def _check(self, said: Said) -> None:
        faults = []
        for what, here, there in (
            ("optimizer", len(self.optimizers), len(said["optimizers"])),
            ("scheduler", len(self.schedulers), len(said["schedulers"])),
        ):
            if here > there:
                faults.append(f"{here} {what}(s) are to be loaded, and {there} were saved")
        faults += [f"extra {name!r} was not saved" for name in self.extra if name not in said["extra"]]
        raise_all(CheckpointError, "the checkpoint has not all that is to be loaded:", faults)

    def _later(self, said: Said, loose: _Loose) -> Callable[[], None]:
        """Schedulers and other objects are given their state when all tensors are there."""
        given = list(zip(self.schedulers, said["schedulers"], strict=False))
        given += [(held, said["extra"][name]) for name, held in self.extra.items()]
        for held, saved in given:
            loose.place_all(saved, _pieces(held.state_dict()))

        def act() -> None:
            for held, saved in given:
                held.load_state_dict(decode(saved, loose.places.__getitem__))

        return act


def training_state(
    model: nn.Module, optimizer: Optimizers, schedulers: Schedulers, extra: Mapping[str, Any] | None
) -> TrainingState:
    """What is to be saved or loaded, checked."""
    if schedulers is None:
        held: list[Any] = []
    else:
        held = list(schedulers) if isinstance(schedulers, list | tuple) else [schedulers]
    wrong = [type(one).__name__ for one in held if not hasattr(one, "state_dict")]
    if wrong:
        raise InputError(f"schedulers={', '.join(wrong)}: a scheduler has a state_dict()")
    return TrainingState(model=model, optimizers=several(optimizer), schedulers=held, extra=dict(extra or {}))


def merge_stages(said: Sequence[Said | None], census: KeyOwners) -> Said:
    """What the first rank of each stage said, as one."""
    speaking = [held for held in said if held is not None]
    found = dict(speaking[0])
    found["optimizers"] = [
        optimizers.merge_optimizers([held["optimizers"][number] for held in speaking], census)
        for number in range(len(found["optimizers"]))
    ]
    for other in speaking[1:]:
        found["extra"] = _merged(other["extra"], found["extra"])
    return found


def _merged(under: Any, over: Any) -> Any:
    """Dicts as one; what both have is that of `over`."""
    if not isinstance(under, dict) or not isinstance(over, dict) or "$" in under or "$" in over:
        return over
    return {**under, **over, **{key: _merged(under[key], over[key]) for key in under if key in over}}


def versions() -> dict[str, str]:
    try:
        own = version("shardwright")
    except PackageNotFoundError:
        own = "not installed"
    return {
        "shardwright": own,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }


def _state_of(held: Any) -> Any:
    return held.state_dict() if hasattr(held, "state_dict") else held


# -- tensors that belong to no parameter -----------------------------------------------------------


class _Loose:
    """Places for such tensors: read whole, or in pieces where a piece is there to take them."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self.places: dict[str, Tensor] = {}

    def place(self, key: str) -> Tensor:
        spec = self._index.entries[key].spec
        self.places[key] = torch.empty(spec.shape, dtype=spec.dtype)
        return self.places[key]

    def place_all(self, saved: Any, pieces: Mapping[str, Tensor]) -> None:
        for key in keys_of(saved):
            like = pieces.get(key.partition("/")[2].partition("/")[2])
            if like is not None and tuple(like.shape) == self._index.entries[key].spec.shape:
                self.places[key] = shard_like(like)
            else:
                self.place(key)


def _pieces(state: Any) -> dict[str, Tensor]:
    """The pieces in a state dict, by their path in it."""
    found: dict[str, Tensor] = {}
    encode(state, "", found)
    return {path.removeprefix("/"): held for path, held in found.items() if isinstance(held, DTensor | ShardTensor)}


def read_values(saved: Any, index: Index) -> Any:
    """A saved value, with its tensors whole."""
    loose = _Loose(index)
    loose.place_all(saved, {})
    read_into(loose.places, index)
    return decode(saved, loose.places.__getitem__)


# -- what compiled models draw -------------------------------------------------------------------


def _drawing(model: nn.Module) -> dict[str, Randomness]:
    found = {}
    for path, part in model.named_modules():
        random = part.random if isinstance(part, ParallelModel) else None
        if random is not None:
            found[f"{path}." if path else ""] = random
    return found


def _set_drawing(model: nn.Module, saved: Mapping[str, Mapping[str, int]]) -> None:
    for prefix, random in _drawing(model).items():
        if prefix in saved:
            random.seed, random.step = saved[prefix]["seed"], saved[prefix]["step"]

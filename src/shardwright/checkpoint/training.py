"""A training state: all that a run needs to resume as if it had not stopped, as tensors and JSON.

    model/<key>                     parameters and persistent buffers
    optimizer/<n>/<key>/<name>      state of the n-th optimizer
    rng/<rank>                      generators of each rank
    extra/<name>/...                whatever the user adds

Everything that is not a tensor is in one JSON file, `StateValues`, merged from the values of each stage's first
rank.
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

StateValues = dict[str, Any]
"""What is saved besides tensors."""


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """What is saved and loaded together."""

    model: nn.Module
    optimizers: Sequence[Optimizer]
    schedulers: Sequence[Any]
    extra: Mapping[str, Any]

    def collect(self, census: KeyOwners, data: Any) -> tuple[dict[str, Tensor], StateValues | None]:
        """This rank's tensors and, if it is the first of its mesh, the other values."""
        tensors = {f"model/{key}": value for key, value in census.tensors().items() if census.writes(key)}
        tensors[f"rng/{census.rank}"] = generators()
        metadata: StateValues = {
            "optimizers": [
                optimizers.collect(optimizer, f"optimizer/{number}", census, tensors)
                for number, optimizer in enumerate(self.optimizers)
            ],
            "schedulers": [
                encode(scheduler.state_dict(), f"scheduler/{number}", tensors)
                for number, scheduler in enumerate(self.schedulers)
            ],
            "extra": {name: encode(_state_of(value), f"extra/{name}", tensors) for name, value in self.extra.items()},
            "data": encode(_state_of(data), "data", tensors),
            "tied": census.tied,
            "random": {
                prefix: {"seed": draws.seed, "step": draws.step} for prefix, draws in _drawing(self.model).items()
            },
            "plans": {prefix: part.plan.to_json() for prefix, part in census.compiled.items() if part.plan is not None},
            "versions": versions(),
        }
        return tensors, metadata if census.speaks else None

    def restore(
        self, metadata: StateValues, index: Index, census: KeyOwners, world: int, *, strict: bool, rng: bool
    ) -> None:
        """Restore a saved state. Nothing is changed before everything was checked."""
        wanted = census.tensors()
        names = fit(census, index, metadata["tied"], "model/", strict, "the checkpoint")
        targets = {f"model/{key}": value for key, value in wanted.items() if f"model/{key}" in names}
        self._check(metadata)
        places = [
            optimizers.Restored(optimizer, saved, census, index)
            for optimizer, saved in zip(self.optimizers, metadata["optimizers"], strict=False)
        ]
        for place in places:
            targets |= place.targets
        loose = _Loose(index)
        set_later = [self._later(metadata, loose)]
        if rng and f"rng/{census.rank % world}" in index.entries:
            mine = loose.place(f"rng/{census.rank % world}")
            set_later.append(lambda: set_generators(mine))
        read_into({**targets, **loose.places}, index, names)
        census.filled({key.removeprefix("model/") for key in names})
        for place in places:
            place.set()
        for act in set_later:
            act()
        _set_drawing(self.model, metadata["random"])

    def _check(self, metadata: StateValues) -> None:
        faults = []
        for what, here, there in (
            ("optimizer", len(self.optimizers), len(metadata["optimizers"])),
            ("scheduler", len(self.schedulers), len(metadata["schedulers"])),
        ):
            if here > there:
                faults.append(f"{here} {what}(s) are to be loaded, and {there} were saved")
        faults += [f"extra {name!r} was not saved" for name in self.extra if name not in metadata["extra"]]
        raise_all(CheckpointError, "the checkpoint lacks some of what is to be loaded:", faults)

    def _later(self, metadata: StateValues, loose: _Loose) -> Callable[[], None]:
        """Load schedulers and other objects after all tensors were read."""
        targets = list(zip(self.schedulers, metadata["schedulers"], strict=False))
        targets += [(target, metadata["extra"][name]) for name, target in self.extra.items()]
        for target, saved in targets:
            loose.place_all(saved, _shards_in(target.state_dict()))

        def act() -> None:
            for target, saved in targets:
                state = decode(saved, loose.places.__getitem__)
                try:
                    target.load_state_dict(state)
                except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:  # of another structure
                    raise CheckpointError(
                        f"{type(target).__name__} can't load its state from the checkpoint: {error!r}"
                    ) from error

        return act


def training_state(
    model: nn.Module, optimizer: Optimizers, schedulers: Schedulers, extra: Mapping[str, Any] | None
) -> TrainingState:
    """Check and collect what is saved or loaded."""
    if schedulers is None:
        listed: list[Any] = []
    else:
        listed = list(schedulers) if isinstance(schedulers, list | tuple) else [schedulers]
    wrong = [type(scheduler).__name__ for scheduler in listed if not hasattr(scheduler, "state_dict")]
    if wrong:
        raise InputError(f"schedulers={', '.join(wrong)}: a scheduler has a state_dict()")
    return TrainingState(model=model, optimizers=several(optimizer), schedulers=listed, extra=dict(extra or {}))


def merge_stages(parts: Sequence[StateValues | None], census: KeyOwners) -> StateValues:
    """Merge the values of each stage's first rank."""
    present = [part for part in parts if part is not None]
    merged = dict(present[0])
    merged["optimizers"] = [
        optimizers.merge_optimizers([part["optimizers"][number] for part in present], census)
        for number in range(len(merged["optimizers"]))
    ]
    for other in present[1:]:
        merged["extra"] = _merged(other["extra"], merged["extra"])
    return merged


def _merged(under: Any, over: Any) -> Any:
    """Merge dicts; `over` wins."""
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


def _state_of(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value


# -- tensors that belong to no parameter -----------------------------------------------------------


class _Loose:
    """Targets for such tensors: read in full, or sharded where there is a shard to read into."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self.places: dict[str, Tensor] = {}

    def place(self, key: str) -> Tensor:
        spec = self._index.entries[key].spec
        self.places[key] = torch.empty(spec.shape, dtype=spec.dtype)
        return self.places[key]

    def place_all(self, saved: Any, shards: Mapping[str, Tensor]) -> None:
        for key in keys_of(saved):
            like = shards.get(key.partition("/")[2].partition("/")[2])
            if like is not None and tuple(like.shape) == self._index.entries[key].spec.shape:
                self.places[key] = shard_like(like)
            else:
                self.place(key)


def _shards_in(state: Any) -> dict[str, Tensor]:
    """The shards in a state dict, by path."""
    tensors: dict[str, Tensor] = {}
    encode(state, "", tensors)
    return {
        path.removeprefix("/"): tensor for path, tensor in tensors.items() if isinstance(tensor, DTensor | ShardTensor)
    }


def read_values(saved: Any, index: Index) -> Any:
    """A saved value, with full tensors."""
    loose = _Loose(index)
    loose.place_all(saved, {})
    read_into(loose.places, index)
    return decode(saved, loose.places.__getitem__)


# -- random state of compiled models -------------------------------------------------------------


def _drawing(model: nn.Module) -> dict[str, Randomness]:
    generators_by_prefix = {}
    for path, part in model.named_modules():
        random = part.random if isinstance(part, ParallelModel) else None
        if random is not None:
            generators_by_prefix[f"{path}." if path else ""] = random
    return generators_by_prefix


def _set_drawing(model: nn.Module, saved: Mapping[str, Mapping[str, int]]) -> None:
    for prefix, random in _drawing(model).items():
        if prefix in saved:
            random.seed, random.step = saved[prefix]["seed"], saved[prefix]["step"]

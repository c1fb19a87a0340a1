"""Loading: check everything, then read, then set. No code from a checkpoint is run.

Each rank reads the chunks that overlap with its shards. Digests are checked first, each file by
one of the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import CheckpointError, raise_all
from ..formats import raise_faults, read_json
from ..runtime.optimizer.adopt import Optimizers
from . import disk
from .encoding import keys_of
from .index import INDEX, Index, read_index
from .key_owners import KeyOwners
from .manifest import MANIFEST, Manifest, damage, faults_of, read_manifest
from .ranks import CheckpointRanks, checkpoint_ranks
from .saving import STATE
from .schema import LARGEST, STATE_SCHEMA
from .training import Schedulers, StateValues, read_values, training_state


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a checkpoint has besides the states that were restored."""

    path: Path
    step: int | None
    data: Any
    extra: Mapping[str, Any] = field(repr=False)  # values saved by name that were not loaded into an object
    metrics: Mapping[str, float]
    plans: Mapping[str, str] = field(repr=False)  # by the path of the compiled part; "" is the model
    versions: Mapping[str, str]
    world: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A checkpoint that can be read."""

    folder: Path
    manifest: Manifest
    index: Index
    state: StateValues


def load(
    path: str | Path, model: nn.Module, optimizer: Optimizers = None, *, schedulers: Schedulers = None,
    extra: Mapping[str, Any] | None = None, strict: bool = True, rng: bool = True, check: bool = True,
) -> Loaded:  # fmt: skip
    """Resume from a checkpoint, under the plan that saved it or another. All ranks call it.

    optimizer   one or a list, as saved; need not have state yet
    schedulers  one or a list
    extra       objects with load_state_dict, by the names they were saved under
    strict      the model and the checkpoint must have the same keys
    rng         set the generators of torch, numpy and Python; on another number of ranks r takes that of rank r % n
    check       read every file first, and compare with its digest

    Returns the step, the data's position, and everything else that was saved.
    """
    meeting = checkpoint_ranks()
    meeting.settle()
    state = training_state(model, optimizer, schedulers, extra)
    opened = meeting.together(lambda: open_checkpoint(Path(path), meeting if check else None))
    census = KeyOwners(model)
    world = opened.manifest.world
    meeting.together(lambda: state.restore(opened.state, opened.index, census, world, strict=strict, rng=rng))
    census.renew()
    others = {name: value for name, value in opened.state["extra"].items() if name not in state.extra}
    return Loaded(
        path=opened.folder,
        step=opened.manifest.step,
        data=read_values(opened.state["data"], opened.index),
        extra=read_values(others, opened.index),
        metrics=opened.manifest.metrics,
        plans=opened.state["plans"],
        versions=opened.state["versions"],
        world=world,
    )


def open_checkpoint(path: Path, meeting: CheckpointRanks | None = None) -> Opened:
    """Read a checkpoint without its tensors. `meeting` shares the work of checking digests."""
    folder = disk.find_folder(path, MANIFEST) or path
    manifest = read_manifest(folder)
    mine = [] if meeting is None else list(manifest.files.items())[meeting.rank :: meeting.size]
    small = [(name, digest) for name, digest in manifest.files.items() if name.endswith(".json")]
    faults = faults_of(folder, dict([*mine, *small]).items())
    if faults:
        raise CheckpointError(damage(folder, faults))
    index, state = read_index(folder), _read_state(folder)
    unlisted = sorted({INDEX, STATE, *index.files} - set(manifest.files))
    missing = [f"{name} is not in its manifest, so that nothing tells whether it is damaged" for name in unlisted]
    missing += [f"{STATE} names the tensor {key}, which {INDEX} does not have"
                for key in dict.fromkeys(keys_of(state)) if key not in index.entries]  # fmt: skip
    raise_all(CheckpointError, f"{folder} is not a complete checkpoint:", missing)
    return Opened(folder=folder, manifest=manifest, index=index, state=state)


def _read_state(folder: Path) -> StateValues:
    path = folder / STATE
    state: StateValues = read_json(path, CheckpointError, LARGEST)
    raise_faults(CheckpointError, f"{path} is not a valid state:", STATE_SCHEMA(state))
    return state

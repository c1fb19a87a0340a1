"""Plain weights: one safetensors file with the original keys, or a Hugging Face folder.

    model.safetensors                                         one file
    model-00001-of-00003.safetensors, ...                     several, and
    model.safetensors.index.json                              which key is in which

No rank ever holds the full model. Writing gathers one tensor at a time, which the first rank streams
to disk. Reading takes each rank's shards out of the files.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..errors import CheckpointError, InputError
from ..runtime.model.access import skeleton_of, state_of
from ..runtime.model.parallel_model import ParallelModel
from ..runtime.parameters.full_tensors import true_dtype
from ..runtime.parameters.state_values import ShardTensor
from ..runtime.world import here
from . import disk
from .fit import fit
from .index import HF_INDEX, HF_SINGLE, index_of_weights, read_into
from .key_owners import KeyOwners
from .ranks import checkpoint_ranks
from .tensorfile import Spec, TensorWriter, in_order

Tied = Literal["once", "all"]
SHARD = 5 * 10**9  # bytes of a file, the default of Hugging Face


def save_weights(
    path: str | Path, model: nn.Module, *, dtype: torch.dtype | None = None, shard_size: int = SHARD,
    tied: Tied = "once", without: Sequence[str] = (),
) -> None:  # fmt: skip
    """Write the model's weights as safetensors. All ranks call it.

    path        x.safetensors for one file, else a folder: of a Hugging Face model it gets its config too
    dtype       of floating-point weights; default: unchanged
    shard_size  bytes of one file of a folder at most, unless one tensor is larger
    tied        "once": tied weights are written under the first of their keys, and the header names the others;
                "all": under each of their keys
    without     patterns of keys that are left out, such as "*.lora_*"
    """
    if tied not in ("once", "all"):
        raise InputError(f'tied={tied!r} is unknown; use "once" or "all"')
    meeting, census = checkpoint_ranks(), KeyOwners(model)
    meeting.settle()
    census.check_ready()
    source, specs = _gathering(census, dtype)
    specs = {key: spec for key, spec in specs.items() if not any(fnmatchcase(key, pattern) for pattern in without)}
    aliases = {key: first for key, first in census.tied.items() if first in specs}
    if tied == "all":
        specs |= {key: specs[first] for key, first in aliases.items()}
        source, aliases = source.also(aliases), {}
    target = Path(path)

    def write() -> None:
        write_weights(target, specs, source, aliases, shard_size, write=meeting.first)
        if meeting.first:
            _write_config(target, model)

    with torch.no_grad():
        meeting.together(write)


def full_weights(model: nn.Module, keys: Iterable[str]) -> dict[str, Tensor]:
    """Some full weights of a model, on every rank. All ranks call it, with the same keys; nothing else is gathered."""
    meeting, census = checkpoint_ranks(), KeyOwners(model)
    meeting.settle()
    census.check_ready()
    source, _ = _gathering(census)
    with torch.no_grad():
        return {key: source(census.first[key]).clone() for key in keys}


def _gathering(census: KeyOwners, dtype: torch.dtype | None = None) -> tuple[GatheredTensors, dict[str, Spec]]:
    own = census.tensors()
    specs = {
        key: Spec(dtype=_cast(value, dtype), shape=census.shapes[key]) for key, value in _kinds(census, own).items()
    }
    return GatheredTensors(census, own, specs), specs


def load_weights(path: str | Path, model: nn.Module, *, strict: bool = True, under: str = "") -> None:
    """Fill the model with the weights of a safetensors file or a Hugging Face folder; each rank reads its shards.

    Tied weights may be saved under any of their keys. strict=False allows missing and unexpected keys.
    `under` is the path of a submodule: only it is filled, from files with its own keys.
    """
    meeting, census = checkpoint_ranks(), KeyOwners(model)
    meeting.settle()
    lead = f"{under}." if under else ""

    def read() -> None:
        index, tied = index_of_weights(Path(path))
        index = replace(index, entries={lead + key: entry for key, entry in index.entries.items()})
        tied = {lead + key: lead + first for key, first in tied.items()}
        names = fit(census, index, tied, "", strict, str(path), lead)
        read_into({key: tensor for key, tensor in census.tensors().items() if key in names}, index, names)
        census.filled(names)

    meeting.together(read)
    census.renew()


# -- writing -------------------------------------------------------------------------------------


def write_weights(
    path: Path, specs: Mapping[str, Spec], get: Callable[[str], Tensor], aliases: Mapping[str, str], shard_size: int,
    write: bool = True,
) -> None:  # fmt: skip
    """Stream tensors to one file or to a folder of several. `get` is called in the same order on all ranks."""
    single = path.suffix == ".safetensors"
    shards = [list(specs)] if single else list(_shards(specs, shard_size))
    names = [path.name] if single else _names(len(shards))
    folder = path.parent if single else path
    coming = (get(key) for keys in shards for key in in_order({key: specs[key] for key in keys}))
    try:
        if write:
            folder.mkdir(parents=True, exist_ok=True)
            for keys, name in zip(shards, names, strict=True):
                own = {key: specs[key] for key in keys}
                _write_file(folder / name, own, {key: first for key, first in aliases.items() if first in own}, coming)
            if not single:
                _write_index(folder, specs, shards, names)
    except OSError as error:
        raise CheckpointError(f"{path} could not be written: {error}; existing files are untouched") from error
    finally:
        for _ in coming:  # other ranks wait for this one in every gather
            pass


def _write_file(path: Path, specs: Mapping[str, Spec], tied: Mapping[str, str], coming: Iterator[Tensor]) -> None:
    part = path.with_name(path.name + disk.PART)
    try:
        with TensorWriter(part, specs, {"format": "pt", **tied}) as writer:
            for key in in_order(specs):
                writer.add(key, next(coming))
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    disk.move(part, path)


def _shards(specs: Mapping[str, Spec], size: int) -> Iterator[list[str]]:
    keys: list[str] = []
    left = size
    for key, spec in specs.items():
        if keys and spec.size > left:
            yield keys
            keys, left = [], size
        keys.append(key)
        left -= spec.size
    yield keys


def _names(count: int) -> list[str]:
    if count == 1:
        return [HF_SINGLE]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _write_index(folder: Path, specs: Mapping[str, Spec], shards: Sequence[list[str]], names: Sequence[str]) -> None:
    """The index of a folder; files of an earlier save that it does not list are removed."""
    if len(names) > 1:
        total = sum(spec.size for spec in specs.values())
        where = {key: name for keys, name in zip(shards, names, strict=True) for key in keys}
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2)
        disk.replace_text(folder / HF_INDEX, text + "\n")
    else:
        (folder / HF_INDEX).unlink(missing_ok=True)
    for old in [*folder.glob("model-*-of-*.safetensors"), folder / HF_SINGLE]:
        if old.name not in names:
            old.unlink(missing_ok=True)


def _write_config(path: Path, model: nn.Module) -> None:
    """Write the other files of a Hugging Face folder, if the model knows them."""
    if path.suffix == ".safetensors":
        return
    for name in ("config", "generation_config"):
        config: Any = copy.deepcopy(getattr(model, name, None))
        if hasattr(config, "save_pretrained"):
            if name == "config":
                inner = skeleton_of(model) if isinstance(model, ParallelModel) else model
                config.architectures = [type(inner).__name__]
            config.save_pretrained(path)


# -- one tensor at a time --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _WeightsFormat:
    dtype: torch.dtype


def _kinds(census: KeyOwners, own: Mapping[str, Tensor]) -> dict[str, Tensor | _WeightsFormat]:
    """The kind of every key, in the same order on all ranks; of other ranks' tensors only the dtype."""
    formats: dict[str, Tensor | _WeightsFormat] = {}
    for prefix, part in census.compiled.items():
        holding = state_of(part)
        for _, specs in holding.pp_ranks:
            formats.update({prefix + spec.name: _WeightsFormat(true_dtype(spec)) for spec in specs})
    return {key: own.get(key, formats.get(key, _WeightsFormat(torch.float32))) for key in census.shapes}


def _cast(value: Tensor | _WeightsFormat, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and value.dtype.is_floating_point else value.dtype


class GatheredTensors:
    """Full tensors of a model, gathered one at a time. All ranks must read the same ones in the same order."""

    def __init__(self, census: KeyOwners, own: Mapping[str, Tensor], specs: Mapping[str, Spec]) -> None:
        self._census, self._own, self._specs = census, own, specs
        self._names: dict[str, str] = {}

    def also(self, names: Mapping[str, str]) -> GatheredTensors:
        """The same tensors under additional names."""
        self._names = dict(names)
        return self

    def __call__(self, name: str) -> Tensor:
        key = self._names.get(name, name)
        spec, world = self._specs[key], here()
        tensor = self._own[key] if self._census.writes(key) else None
        if isinstance(tensor, DTensor | ShardTensor):
            tensor = tensor.full_tensor()
        source = self._census.source(key)
        if tensor is None or source not in (None, world.rank):
            tensor = torch.empty(spec.shape, dtype=spec.dtype, device=world.device)
        tensor = tensor.detach().to(spec.dtype).contiguous()
        if source is not None:
            dist.broadcast(tensor, source)
        return tensor

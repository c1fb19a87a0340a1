"""Convert between checkpoints and plain weights, without a model and on one process.

Only one tensor at a time is in memory. A checkpoint made from weights contains the model alone.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import CheckpointError, InputError
from . import disk
from .folder import latest_in
from .index import HF_INDEX, INDEX, Chunk, Index, IndexEntry, index_of_weights
from .loading import open_checkpoint
from .manifest import MANIFEST, Manifest, verify
from .saving import STATE
from .tensorfile import MappedFiles, Spec, TensorWriter, in_order
from .training import versions
from .weights import SHARD, write_weights

Form = Literal["file", "hf", "checkpoint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSource:
    """Weights by their original keys, in any format."""

    index: Index
    keys: Mapping[str, str]  # in the index
    tied: Mapping[str, str]

    def specs(self, dtype: torch.dtype | None) -> dict[str, Spec]:
        specs = {}
        for key, inner in self.keys.items():
            spec = self.index.entries[inner].spec
            cast = dtype is not None and spec.dtype.is_floating_point
            specs[key] = Spec(dtype=dtype if dtype is not None and cast else spec.dtype, shape=spec.shape)
        return specs


def checkpoint_at(path: Path) -> Path | None:
    """The checkpoint at a path: itself, or the latest in a folder of checkpoints."""
    return disk.find_folder(path, MANIFEST) or (latest_in(path) if path.is_dir() else None)


def open_source(path: Path) -> WeightSource:
    """The weights of a checkpoint, checked, or of safetensors files."""
    folder = checkpoint_at(path)
    if folder is None:
        if not path.exists():
            raise InputError(f"{path} does not exist")
        index, tied = index_of_weights(path)
        return WeightSource(index=index, keys={key: key for key in index.entries}, tied=tied)
    verify(folder)
    opened = open_checkpoint(folder)
    keys = {key.removeprefix("model/"): key for key in opened.index.entries if key.startswith("model/")}
    return WeightSource(index=opened.index, keys=keys, tied=opened.state["tied"])


def convert(
    path: str | Path, to: str | Path, *, form: Form | None = None, dtype: torch.dtype | None = None,
    shard_size: int = SHARD, config: str | Path | None = None,
) -> Form:  # fmt: skip
    """Write the weights of a checkpoint as a safetensors file or a Hugging Face folder, or the reverse.

    form    "file", "hf" or "checkpoint"; default: a name ending with .safetensors is a file, a checkpoint
            becomes a Hugging Face folder, and weights become a checkpoint
    config  a Hugging Face folder whose other files (config, tokenizer) are copied
    """
    source, target = open_source(Path(path)), Path(to)
    if form is None:
        form = "hf" if checkpoint_at(Path(path)) is not None else "checkpoint"
        form = "file" if target.suffix == ".safetensors" else form
    if (form == "file") != (target.suffix == ".safetensors"):
        raise InputError(f"{target} can't have form {form!r}: a single file, and only that, is named x.safetensors")
    mapped, specs = MappedFiles(), source.specs(dtype)

    def get(key: str) -> Tensor:
        return source.index.full_tensor(source.keys[key], mapped).to(specs[key].dtype)

    if form == "checkpoint":
        try:
            _write_checkpoint(target, source, specs, get)
        except OSError as error:
            raise CheckpointError(f"{target} could not be written: {error}") from error
    else:
        write_weights(target, specs, get, source.tied, shard_size)
        if form == "hf" and config is not None:
            _copy_others(Path(config), target)
    return form


def _write_checkpoint(
    path: Path, source: WeightSource, specs: Mapping[str, Spec], get: Callable[[str], Tensor]
) -> None:
    builder = disk.begin(path, MANIFEST)
    file = "rank-00000.safetensors"
    named = {f"model/{key}@{','.join('0' for _ in spec.shape)}": key for key, spec in specs.items()}
    with TensorWriter(builder / file, {name: specs[key] for name, key in named.items()}) as writer:
        for name in in_order({name: specs[key] for name, key in named.items()}):
            writer.add(name, get(named[name]))
    entries = {}
    for name, key in named.items():
        shape = specs[key].shape
        chunk = Chunk((0,) * len(shape), shape, file, writer.places[name].start)
        entries[f"model/{key}"] = IndexEntry(spec=specs[key], chunks=(chunk,))
    metadata: dict[str, Any] = {
        "optimizers": [], "schedulers": [], "extra": {}, "data": None, "tied": dict(source.tied), "random": {},
        "plans": {}, "versions": versions(),
    }  # fmt: skip
    files = {file: writer.digest}
    files[INDEX] = disk.write_text(builder / INDEX, Index(folder=builder, entries=entries).to_json())
    files[STATE] = disk.write_text(builder / STATE, json.dumps(metadata))
    Manifest(files=files, world=1, when=datetime.now(UTC).isoformat(timespec="seconds")).write(builder)
    disk.finish(path)


def _copy_others(config: Path, target: Path) -> None:
    folder = config if config.is_dir() else config.parent
    wanted = sorted(folder.iterdir()) if config.is_dir() else [config]
    for file in wanted:
        if file.is_file() and file.name != HF_INDEX and file.suffix in (".json", ".txt", ".model", ".jinja"):
            shutil.copy2(file, target / file.name)

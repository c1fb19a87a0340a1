"""Where each tensor of a checkpoint is stored: which chunks of it are in which file.

`torch.distributed.checkpoint` stores this as a pickle, which runs code when it is loaded; here it
is JSON. `IndexReader` passes it to DCP's planner, which finds the chunks that overlap with a rank's
shards, under any plan. Plain safetensors files get an index with one chunk per tensor, so they are
read in the same way.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ..errors import CheckpointError, raise_all
from ..formats import raise_faults, read_json
from .schema import HF_INDEX_SCHEMA, INDEX_SCHEMA, LARGEST, LARGEST_DIM
from .tensorfile import DTYPES, NAMES, MappedFiles, Spec, TensorOffset, check_extents, read_header

INDEX = "index.json"
HF_INDEX = "model.safetensors.index.json"
HF_SINGLE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of a tensor: its offsets, sizes and file, and where it begins in the file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexEntry:
    """A tensor and its chunks."""

    spec: Spec
    chunks: tuple[Chunk, ...]

    def __post_init__(self) -> None:
        shape = self.spec.shape
        if any(len(chunk.offsets) != len(shape) or len(chunk.sizes) != len(shape) for chunk in self.chunks):
            raise ValueError(f"chunks of another number of dims for a tensor of shape {shape}")
        count = sum(math.prod(chunk.sizes) for chunk in self.chunks)
        inside = all(
            at >= 0 and size >= 0 and at + size <= full
            for chunk in self.chunks
            for at, size, full in zip(chunk.offsets, chunk.sizes, shape, strict=True)
        )
        if count != math.prod(shape) or not inside:
            raise ValueError(f"chunks of {count} elements for a tensor of shape {shape}")
        if math.prod(size for size in shape if size) > LARGEST_DIM:
            raise ValueError(f"the shape {shape}, which is too large")
        if len(self.chunks) > 1 and _overlap(self.chunks):
            raise ValueError(f"overlapping chunks for a tensor of shape {shape}")


def _overlap(chunks: Sequence[Chunk]) -> bool:
    """Whether two chunks have an element in common: a shared cell on the grid of all their edges."""
    boxes = [
        [(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True)]
        for chunk in chunks
        if math.prod(chunk.sizes)
    ]
    edges = [sorted({edge for span in spans for edge in span}) for spans in zip(*boxes, strict=True)]
    if math.prod(map(len, edges)) > max(2**16, len(boxes) * 2 ** (len(edges) + 6)):
        raise ValueError(f"{len(boxes)} chunks that are no parts of a grid")  # the grid would need too much memory
    numbers = [{edge: number for number, edge in enumerate(positions)} for positions in edges]
    cells = torch.zeros([len(positions) for positions in edges], dtype=torch.bool)
    for box in boxes:
        own = cells[tuple(slice(at[low], at[high]) for at, (low, high) in zip(numbers, box, strict=True))]
        if own.any():
            return True
        own.fill_(True)
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """The tensors in a folder of files."""

    folder: Path
    entries: Mapping[str, IndexEntry]

    def to_json(self) -> str:
        tensors = {
            key: {
                "dtype": NAMES[entry.spec.dtype],
                "shape": entry.spec.shape,
                "chunks": [[chunk.offsets, chunk.sizes, chunk.file, chunk.start] for chunk in entry.chunks],
            }
            for key, entry in self.entries.items()
        }
        return json.dumps({"tensors": tensors}, separators=(",", ":"))

    def full_tensor(self, key: str, mapped: MappedFiles) -> Tensor:
        """A full tensor, assembled from its chunks."""
        entry = self.entries[key]
        tensor = torch.empty(entry.spec.shape, dtype=entry.spec.dtype)
        for chunk in entry.chunks:
            target = tensor
            for dim, (at, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                target = target.narrow(dim, at, size)
            target.copy_(self.box(entry, chunk, [0] * len(chunk.sizes), chunk.sizes, mapped))
        return tensor

    def box(
        self, entry: IndexEntry, chunk: Chunk, at: Sequence[int], sizes: Sequence[int], mapped: MappedFiles
    ) -> Tensor:
        place = TensorOffset(spec=Spec(dtype=entry.spec.dtype, shape=chunk.sizes), start=chunk.start)
        return mapped.box(self.folder / chunk.file, place, at, sizes)

    def check_places(self) -> None:
        """Check that every chunk has bytes of its own in its file: shared ones would be read many times over."""
        missing = [name for name in sorted(self.files) if not (self.folder / name).is_file()]
        raise_all(CheckpointError, f"{self.folder} is incomplete:", [f"{name} is missing" for name in missing])
        sizes = {name: (self.folder / name).stat().st_size for name in self.files}
        places = sorted(
            (chunk.file, chunk.start, chunk.start + math.prod(chunk.sizes) * entry.spec.dtype.itemsize, key)
            for key, entry in self.entries.items()
            for chunk in entry.chunks
        )
        check_extents(self.folder, places, sizes)

    @property
    def files(self) -> set[str]:
        return {chunk.file for entry in self.entries.values() for chunk in entry.chunks}


def read_index(folder: Path) -> Index:
    path = folder / INDEX
    content = read_json(path, CheckpointError, LARGEST)
    raise_faults(CheckpointError, f"{path} is not a valid index:", INDEX_SCHEMA(content))
    entries: dict[str, IndexEntry] = {}
    faults = []
    for key, encoded in content["tensors"].items():
        try:
            entries[key] = _entry(encoded)
        except ValueError as error:
            faults.append((("tensors", key), f"has {error}"))
    raise_faults(CheckpointError, f"{path} is not a valid index:", faults)
    index = Index(folder=folder, entries=entries)
    index.check_places()
    return index


def _entry(encoded: Mapping[str, Any]) -> IndexEntry:
    if encoded["dtype"] not in DTYPES:
        raise ValueError(f"the unknown dtype {encoded['dtype']!r}")
    chunks = tuple(
        Chunk(tuple(offsets), tuple(sizes), file, start) for offsets, sizes, file, start in encoded["chunks"]
    )
    return IndexEntry(spec=Spec(dtype=DTYPES[encoded["dtype"]], shape=tuple(encoded["shape"])), chunks=chunks)


# -- plain weights -----------------------------------------------------------------------------


def find_weights(path: Path) -> list[Path] | None:
    """The safetensors files at a path: a file, or a Hugging Face folder. None if there are none."""
    if path.is_file():
        return [path]
    if (path / HF_INDEX).is_file():
        content = read_json(path / HF_INDEX, CheckpointError, LARGEST)
        raise_faults(CheckpointError, f"{path / HF_INDEX} is not a valid index:", HF_INDEX_SCHEMA(content))
        files = sorted(set(content["weight_map"].values()))
        missing = [name for name in files if not (path / name).is_file()]
        if missing:
            raise CheckpointError(f"{path} is incomplete: {', '.join(missing)} is missing")
        return [path / name for name in files]
    return [path / HF_SINGLE] if (path / HF_SINGLE).is_file() else None


def index_of_weights(path: Path) -> tuple[Index, dict[str, str]]:
    """The index of a safetensors file, or of a Hugging Face folder; and the tied keys."""
    files = find_weights(path)
    if files is None:
        raise CheckpointError(
            f"{path} has no weights: neither {HF_SINGLE} nor {HF_INDEX}; pass a safetensors file, or a folder with one"
        )
    entries: dict[str, IndexEntry] = {}
    tied: dict[str, str] = {}
    for file in files:
        places, metadata = read_header(file)
        for key, place in places.items():
            shape = place.spec.shape
            chunk = Chunk((0,) * len(shape), shape, file.name, place.start)
            entries[key] = IndexEntry(spec=place.spec, chunks=(chunk,))
        tied |= {key: first for key, first in metadata.items() if first in places and key not in places}
    return Index(folder=files[0].parent, entries=entries), tied


# -- reading a rank's shards ---------------------------------------------------------------------


class IndexReader(StorageReader):
    """An index for DCP's planner. `names` maps keys to the keys they are saved under."""

    def __init__(self, index: Index, names: Mapping[str, str] | None = None) -> None:
        self.index, self.names = index, dict(names or {})

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        wanted = {key: key for key in self.index.entries} | self.names
        return Metadata({key: _metadata(self.index.entries[saved]) for key, saved in wanted.items()})

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        mapped = MappedFiles()
        for item in plan.items:
            key = item.storage_index.fqn
            if item.type is LoadItemType.BYTE_IO:
                raise CheckpointError(f"{key} is not a tensor; other values are read from the state")
            entry = self.index.entries[self.names.get(key, key)]
            chunk = entry.chunks[item.storage_index.index or 0]  # chosen by the planner
            part = self.index.box(entry, chunk, item.storage_offsets, item.lengths, mapped)
            target = planner.resolve_tensor(item).detach()
            target.copy_(part.reshape(target.shape))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        return None

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        return None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return (Path(checkpoint_id) / INDEX).is_file()


def _metadata(entry: IndexEntry) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=entry.spec.dtype),
        size=torch.Size(entry.spec.shape),
        chunks=[ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in entry.chunks],
    )


@torch.no_grad()
def read_into(targets: Mapping[str, Tensor], index: Index, names: Mapping[str, str] | None = None) -> None:
    """Fill tensors, DTensors and sharded parameters from the index by key. Ranks don't wait for each other."""
    reader = IndexReader(index, names)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(targets), reader.read_metadata())
    reader.read_data(planner.create_local_plan(), planner)


__all__ = [
    "HF_INDEX",
    "HF_SINGLE",
    "INDEX",
    "Chunk",
    "Index",
    "IndexEntry",
    "IndexReader",
    "find_weights",
    "index_of_weights",
    "read_index",
    "read_into",
]

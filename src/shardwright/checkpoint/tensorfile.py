"""Tensors in files of the safetensors format: a length, a header in JSON, then the bytes of the tensors.

    8 bytes   {"w": {"dtype": "F32", "shape": [4, 8], "data_offsets": [0, 128]}, ...}   data

The header comes first, then the tensors one at a time, so that a file can be larger than
memory. Tensors are read in part, from a memory map. Such a file contains no code, and everything in
it is checked before use.
"""

from __future__ import annotations

import itertools
import json
import math
import mmap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy
import torch
from torch import Tensor

from ..errors import CheckpointError
from ..formats import parse_json, raise_faults
from .disk import AtomicFile, Digest
from .schema import HEADER_SCHEMA, METADATA_SCHEMA

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
LONGEST = 100_000_000  # bytes of a header, the limit of the format


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """Shape and dtype of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorOffset:
    """Where the bytes of a tensor begin in a file."""

    spec: Spec
    start: int


def in_order(specs: Mapping[str, Spec]) -> list[str]:
    """The names in file order: wide elements first, so that all are aligned."""
    return sorted(specs, key=lambda name: -specs[name].dtype.itemsize)


class TensorWriter:
    """Writes a file of known tensors, one at a time, in the order of `in_order`."""

    def __init__(self, path: Path, specs: Mapping[str, Spec], metadata: Mapping[str, str] | None = None) -> None:
        self._left = in_order(specs)
        self._specs = specs
        self.places: dict[str, TensorOffset] = {}
        self._header = _header(specs, self._left, metadata)
        at = len(self._header)
        for name in self._left:
            self.places[name] = TensorOffset(spec=specs[name], start=at)
            at += specs[name].size
        self._file = AtomicFile(path)

    def add(self, name: str, tensor: Tensor) -> None:
        if not self._left or self._left[0] != name or Spec(dtype=tensor.dtype, shape=tuple(tensor.shape)) != (
            self._specs[name]
        ):  # fmt: skip
            raise CheckpointError(f"{name} {tuple(tensor.shape)} {tensor.dtype} does not belong in this file")
        self._left.pop(0)
        if tensor.numel():
            flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            self._file.write(flat.numpy().data)

    @property
    def digest(self) -> Digest:
        return self._file.digest

    def __enter__(self) -> TensorWriter:
        try:
            self._file.write(self._header)
        except BaseException as error:
            self._file.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.__exit__(kind, error, trace)
        if error is None and self._left:
            raise CheckpointError(f"{self._file.path} is incomplete: {', '.join(self._left[:4])} were not written")


def _header(specs: Mapping[str, Spec], order: Iterable[str], metadata: Mapping[str, str] | None) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name in order:
        spec = specs[name]
        if spec.dtype not in NAMES:
            raise CheckpointError(f"{name} is of {spec.dtype}, which the safetensors format does not support")
        shape, end = list(spec.shape), at + spec.size
        header[name] = {"dtype": NAMES[spec.dtype], "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_header(path: Path) -> tuple[dict[str, TensorOffset], dict[str, str]]:
    """The tensors of a file, and the metadata of its header."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(LONGEST, size - 8):
            raise CheckpointError(f"{path} is not a safetensors file: its header would have {length} bytes")
        header = parse_json(file.read(length), f"{path} is no safetensors file: its header", CheckpointError)
    metadata = header.pop("__metadata__", {}) if isinstance(header, dict) else {}
    title = f"{path} is not a safetensors file: its header has faults:"
    raise_faults(CheckpointError, title, [*METADATA_SCHEMA(metadata), *HEADER_SCHEMA(header)])
    places: dict[str, TensorOffset] = {}
    faults = []
    for name, entry in header.items():
        try:
            places[name] = _place(entry, 8 + length)
        except ValueError as error:
            faults.append(((name,), f"has {error}"))
    raise_faults(CheckpointError, title, faults)
    extents = sorted((path.name, place.start, place.start + place.spec.size, name) for name, place in places.items())
    check_extents(path.parent, extents, {path.name: size})
    return places, metadata


def _place(entry: Mapping[str, Any], base: int) -> TensorOffset:
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"the unknown dtype {entry['dtype']!r}")
    spec = Spec(dtype=DTYPES[entry["dtype"]], shape=tuple(entry["shape"]))
    start, end = entry["data_offsets"]
    if end - start != spec.size:
        raise ValueError(f"{end - start} bytes for a tensor of {spec.size}")
    return TensorOffset(spec=spec, start=base + start)


def check_extents(folder: Path, extents: Sequence[tuple[str, int, int, str]], sizes: Mapping[str, int]) -> None:
    """Refuse tensors that end after their file, or share bytes. `extents`: file, start, end and key, sorted."""
    for file, _, end, key in extents:
        if end > sizes[file]:
            raise CheckpointError(f"{folder / file} is truncated: {key} is incomplete")
    filled = [extent for extent in extents if extent[2] > extent[1]]
    for (file, _, end, key), (other, start, _, second) in itertools.pairwise(filled):
        if file == other and start < end:
            raise CheckpointError(f"{folder / file} is damaged: {key} and {second} have the same bytes")


class MappedFiles:
    """Memory-mapped files, each opened once."""

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}

    def box(self, path: Path, place: TensorOffset, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """A copy of a box of a tensor; only this box is read."""
        spec = place.spec
        if not math.prod(lengths):
            return torch.empty(tuple(lengths), dtype=spec.dtype)
        count, width = math.prod(spec.shape), spec.dtype.itemsize
        flat = numpy.frombuffer(self._map(path), dtype=f"u{width}", count=count, offset=place.start)
        full = flat.reshape(spec.shape)
        part = full[tuple(slice(at, at + size) for at, size in zip(offsets, lengths, strict=True))]
        return torch.from_numpy(numpy.array(part, order="C")).view(spec.dtype)

    def _map(self, path: Path) -> mmap.mmap:
        if path not in self._maps:
            with path.open("rb") as file:
                self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return self._maps[path]

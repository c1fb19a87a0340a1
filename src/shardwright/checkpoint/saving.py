"""Saving: planned by all ranks together, written by each, renamed when complete.

    every rank      collect      its shards and other values
    together        plan         DCP's planner: each shard is written by one rank, evenly
    every rank      snapshot     a copy of what it will write (only for a save in the background)
    ------------------------------------------------------------ from here on optionally in a thread
    every rank      write        one file of tensors
    first rank      finish       index, state, manifest; then the folder gets its name

The background part communicates twice, on its own process group.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from ..errors import CheckpointError
from ..runtime.optimizer.adopt import Optimizers
from . import disk
from .disk import Digest
from .index import INDEX, Chunk, Index, IndexEntry
from .key_owners import KeyOwners
from .manifest import MANIFEST, Manifest
from .ranks import CheckpointRanks, checkpoint_ranks
from .tensorfile import Spec, TensorWriter, in_order
from .training import Schedulers, StateValues, merge_stages, training_state

STATE = "state.json"


class PendingSave:
    """A save that may still be in progress."""

    def __init__(self, path: Path, thread: threading.Thread | None = None) -> None:
        self.path = path
        self._thread = thread
        self._error: Exception | None = None

    def __repr__(self) -> str:
        return f"PendingSave({str(self.path)!r}, {'done' if self.done else 'being written'})"

    @property
    def done(self) -> bool:
        """Whether writing has ended."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait until the checkpoint is written; raises its error once if it failed."""
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self.path

    def write_beside(self, write: Callable[[], None]) -> None:
        """Write in a thread. The interpreter waits for it before it ends."""

        def run() -> None:
            try:
                write()
            except Exception as error:
                self._error = error

        self._thread = threading.Thread(target=run, name=f"saving {self.path.name}")
        self._thread.start()


def save(
    path: str | Path, model: nn.Module, optimizer: Optimizers = None, *, schedulers: Schedulers = None,
    data: Any = None, extra: Mapping[str, Any] | None = None, step: int | None = None,
    metrics: Mapping[str, float] | None = None, background: bool = False,
) -> PendingSave:  # fmt: skip
    """Write a checkpoint from which a run under any plan, on any number of ranks, can resume. All ranks call it.

    optimizer   one, or a list
    schedulers  one, or a list
    data        position in the data: any dict of numbers, strings and lists, or an object whose state_dict() is one
                (shardwright.data.Loader); that of the first rank
    extra       by name, values, or objects with state_dict and load_state_dict (a scaler, averaged weights)
    step        its step; stored in the manifest together with metrics
    background  return after a snapshot and write in a thread. The next save, or wait() of the
                result, waits for it and raises its error.

    Random generators, the plan and versions are saved too. A checkpoint of the same name is replaced when the
    new one is complete.
    """
    state = training_state(model, optimizer, schedulers, extra)
    return begin(Path(path), state, data=data, step=step, metrics=metrics, background=background)


def begin(
    path: Path, state: Any, *, data: Any, step: int | None, metrics: Mapping[str, float] | None, background: bool,
    after: Callable[[], None] | None = None,
) -> PendingSave:  # fmt: skip
    """Save; `after` is called on the first rank when the folder has its name."""
    meeting = checkpoint_ranks()
    meeting.settle()
    census = KeyOwners(state.model)
    census.check_ready()
    tensors, metadata = meeting.together(lambda: state.collect(census, data))
    writing = _plan(path, meeting, census, tensors, metadata)
    manifest = Manifest(
        files={}, world=meeting.size, when=datetime.now(UTC).isoformat(timespec="seconds"), step=step,
        metrics={name: float(value) for name, value in (metrics or {}).items()},
    )  # fmt: skip
    saving = PendingSave(path)
    if background:
        snapshot = meeting.together(writing.snapshot)
        saving.write_beside(lambda: snapshot.write(meeting, manifest, after))
        meeting.under_way = saving
    else:
        writing.write(meeting, manifest, after)
    return saving


def _plan(
    path: Path, meeting: CheckpointRanks, census: KeyOwners, tensors: dict[str, Tensor], state: StateValues | None
) -> _RankWriter:
    """Which rank writes what: each shard once."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(tensors, is_coordinator=meeting.first)
    every = meeting.gather((planner.create_local_plan(), state))
    metadata, merged, plans = None, None, [SavePlan([])] * meeting.size

    def settle() -> None:
        nonlocal metadata, merged, plans
        if meeting.first:
            plans, metadata = planner.create_global_plan([plan for plan, _ in every])
            merged = merge_stages([state for _, state in every], census)
            disk.begin(path, MANIFEST)

    meeting.together(settle)
    mine = planner.finish_plan(meeting.deal(plans))
    builder = path.with_name(path.name + disk.PART)
    meeting.together(lambda: _check_shared(builder))
    items = [item for item in mine.items if math.prod(_spec(item).shape) or not math.prod(_data(item).size)]
    return _RankWriter(
        path=path,
        rank=meeting.rank,
        items=items,
        tensors=[lambda item=item: planner.resolve_data(item) for item in items],  # type: ignore[misc]
        metadata=metadata,
        state=merged,
    )


def _check_shared(builder: Path) -> None:
    if not builder.is_dir():
        raise CheckpointError(
            f"{builder} was created by the first rank and is missing here: save to a file system that all ranks share"
        )


def _data(item: WriteItem) -> Any:
    if item.tensor_data is None:
        raise CheckpointError(f"{item.index.fqn} is not a tensor")
    return item.tensor_data


def _spec(item: WriteItem) -> Spec:
    data = _data(item)
    return Spec(dtype=data.properties.dtype, shape=tuple(data.chunk.sizes))


@dataclass(frozen=True, kw_only=True)
class _RankWriter:
    """What one rank writes, and on the first rank the metadata of all."""

    path: Path
    rank: int
    items: list[WriteItem]
    tensors: list[Callable[[], Tensor]]
    metadata: Metadata | None
    state: StateValues | None

    def snapshot(self) -> _RankWriter:
        """A copy with tensors in CPU memory."""
        copied = [
            torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor) for tensor in (get() for get in self.tensors)
        ]
        getters: list[Callable[[], Tensor]] = [lambda tensor=tensor: tensor for tensor in copied]  # type: ignore[misc]
        return _RankWriter(
            path=self.path, rank=self.rank, items=self.items, tensors=getters, metadata=self.metadata, state=self.state
        )

    def write(self, meeting: CheckpointRanks, manifest: Manifest, after: Callable[[], None] | None) -> None:
        """Write this rank's file; the first rank then finishes the checkpoint. An error is raised on all ranks."""
        builder = self.path.with_name(self.path.name + disk.PART)
        try:
            file, digest, places = meeting.together(lambda: _explained(builder, lambda: self._write_tensors(builder)))
            every = meeting.gather((file, digest, places))
            meeting.together(lambda: _explained(builder, lambda: self._finish(builder, manifest, every, after)))
        except Exception:
            if meeting.first and builder.exists():
                disk.remove(builder)  # free its disk space
            raise

    def _write_tensors(self, builder: Path) -> tuple[str, Digest, dict[str, list[int]]]:
        file = f"rank-{self.rank:05d}.safetensors"
        named = {f"{item.index.fqn}@{','.join(map(str, _data(item).chunk.offsets))}": item for item in self.items}
        sources = dict(zip(named, self.tensors, strict=True))
        specs = {name: _spec(item) for name, item in named.items()}
        with TensorWriter(builder / file, specs) as writer:
            for name in in_order(specs):
                writer.add(name, sources[name]())
        places = {name: [writer.places[name].start] for name in named}
        return file, writer.digest, places

    def _finish(
        self,
        builder: Path,
        manifest: Manifest,
        every: list[tuple[str, Digest, dict[str, list[int]]]],
        after: Callable[[], None] | None,
    ) -> None:
        if self.metadata is None:
            return
        files = {file: digest for file, digest, _ in every}
        starts = {name: (file, start) for file, _, places in every for name, (start,) in places.items()}
        index = _index(builder, self.metadata, starts)
        files[INDEX] = disk.write_text(builder / INDEX, index.to_json())
        files[STATE] = disk.write_text(builder / STATE, json.dumps(self.state))
        Manifest(
            files=files, world=manifest.world, when=manifest.when, step=manifest.step, metrics=manifest.metrics
        ).write(builder)
        disk.finish(self.path)
        if after is not None:
            after()


def _explained(builder: Path, write: Callable[[], Any]) -> Any:
    try:
        return write()
    except OSError as error:
        raise CheckpointError(
            f"{builder.with_suffix('')} could not be saved: {error.strerror or error} ({error.filename or builder}); "
            "what was there before is untouched"
        ) from error


def _index(folder: Path, metadata: Metadata, starts: Mapping[str, tuple[str, int]]) -> Index:
    entries = {}
    for key, stored in metadata.state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata)
        chunks = []
        for chunk in stored.chunks:
            name = f"{key}@{','.join(map(str, chunk.offsets))}"
            if name in starts:
                chunks.append(Chunk(tuple(chunk.offsets), tuple(chunk.sizes), *starts[name]))
        spec = Spec(dtype=stored.properties.dtype, shape=tuple(stored.size))
        entries[key] = IndexEntry(spec=spec, chunks=tuple(chunks))
    return Index(folder=folder, entries=entries)


__all__ = ["STATE", "PendingSave", "begin", "save"]

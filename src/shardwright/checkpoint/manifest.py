"""The manifest of a checkpoint: its files with their digests. Written last, so a folder with a manifest is complete.

It has a digest of itself, and what one wants to know of many checkpoints without reading them: the
step, and metrics to choose the best by.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..formats import raise_faults, read_json
from . import disk
from .disk import Digest
from .schema import MANIFEST_SCHEMA

MANIFEST = "manifest.json"
FORMAT = "shardwright checkpoint"
VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The files of a checkpoint. `world` is the number of ranks that saved it."""

    files: Mapping[str, Digest]
    world: int
    when: str
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return sum(digest.size for digest in self.files.values())

    def write(self, folder: Path) -> None:
        files = {name: {"bytes": digest.size, "blake2b": digest.blake2b} for name, digest in sorted(self.files.items())}
        content = {
            "format": FORMAT, "version": VERSION, "step": self.step, "metrics": dict(self.metrics),
            "world": self.world, "when": self.when, "files": files,
        }  # fmt: skip
        disk.replace_text(folder / MANIFEST, json.dumps({**content, "digest": _digest(content)}, indent=1) + "\n")


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=32).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(
            f"{folder} is not a complete checkpoint: it has no {MANIFEST}; pass a folder that sw.save wrote"
        )
    content = read_json(path, CheckpointError)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path} is damaged: it is not the manifest of a checkpoint")
    if content.pop("digest", None) != _digest(content):
        raise CheckpointError(f"{path} is damaged: its digest does not match")
    version = content.get("version")
    if isinstance(version, int) and version > VERSION:
        raise CheckpointError(f"{folder} has version {version}; this shardwright reads up to {VERSION}")
    raise_faults(CheckpointError, f"{path} is not a valid manifest:", MANIFEST_SCHEMA(content))
    return Manifest(
        files={
            name: Digest(size=entry["bytes"], blake2b=entry["blake2b"]) for name, entry in content["files"].items()
        },
        world=content["world"], when=content["when"], step=content["step"], metrics=content["metrics"],
    )  # fmt: skip


def faults_of(folder: Path, files: Iterable[tuple[str, Digest]]) -> list[str]:
    """Faults of files, by name."""
    faults = []
    for name, wanted in files:
        path = folder / name
        if not path.is_file():
            faults.append(f"{path} is missing")
        elif (size := path.stat().st_size) != wanted.size:
            faults.append(f"{path} is damaged: it has {size} bytes instead of {wanted.size}")
        elif disk.digest_of(path) != wanted:
            faults.append(f"{path} is damaged: its content does not match its digest")
    return faults


def verify(folder: str | Path) -> Manifest:
    """Read every byte of a checkpoint; an error names all damaged files, and a complete checkpoint next to it."""
    folder = Path(folder)
    manifest = read_manifest(folder)
    faults = faults_of(folder, manifest.files.items())
    if faults:
        raise CheckpointError(damage(folder, faults))
    return manifest


def damage(folder: Path, faults: Iterable[str]) -> str:
    """The message about a damaged checkpoint: its faults, and a complete checkpoint next to it."""
    lines = [f"the checkpoint {folder} is damaged:", *(f"  - {fault}" for fault in faults)]
    other = next((checkpoint for checkpoint in unlisted_files(folder) if _is_whole(checkpoint)), None)
    lines.append(
        f"{other} is complete: load that one" if other is not None else "no other checkpoint next to it is complete"
    )
    return "\n".join(lines)


def unlisted_files(folder: Path) -> list[Path]:
    """The other checkpoints in the same folder, newest first."""
    siblings = [other.parent for other in folder.absolute().parent.glob(f"*/{MANIFEST}")]
    others = [other for other in siblings if other.name != folder.name]
    return sorted(others, key=lambda other: (other / MANIFEST).stat().st_mtime, reverse=True)


def _is_whole(folder: Path) -> bool:
    try:
        return not faults_of(folder, read_manifest(folder).files.items())
    except CheckpointError:
        return False

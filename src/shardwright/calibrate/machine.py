"""The machine that a run is on, measured once and remembered: what `plan="auto"` plans for if no cluster is named.

    all ranks     say where they are: their machine, its processor, their threads
    rank 0        looks whether such a machine was measured before, and tells the others
    all ranks     measure, if it was not
    rank 0        writes the result to the cache, and tells the others

So every rank plans with one description, also where ranks have no common disk. A file of the cache is trusted only if
this user wrote it, it can be read as a cluster, and it says that it is of just this machine, torch and placement of
ranks; else it is measured again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import platform
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist

from ..cluster import Cluster, dump, loads
from ..errors import ClusterError, InputError
from ..formats import OwnFolders
from ..runtime import accelerator
from ..runtime.collectives import objects
from ..runtime.collectives.processes import machine_name
from ..runtime.world import World, cache_folder, shares_memory
from .measuring import measure
from .timing import BRIEF, Effort

VERSION = 2
"""Of what is measured: a file of another version is measured again."""

LARGEST = 2**18  # bytes of a file of the cache
REMEDY = "set SHARDWRIGHT_CACHE to another folder"
UNEQUAL = (
    "the nodes of this run do not have equally many ranks in a row each, so that they are not measured: auto plans "
    "with the catalogue's numbers; start as many ranks on every node, or pass cluster='cluster.yaml'"
)
FOLDERS = OwnFolders(content="a measurement of this machine", remedy=REMEDY)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where a rank runs, as far as it decides how fast it is."""

    node: str  # differs between machines, also between two that are alike
    processor: str
    cores: int  # that this process may use
    memory: int  # GiB of the machine, or of its accelerator
    threads: int  # of torch


def measured_cluster(world: World, effort: Effort = BRIEF) -> Cluster | None:
    """The devices of this run as they were measured here, now or before. All ranks must call it.

    None, on all ranks, if they can't be measured together: ranks that are no processes, or nodes with unequally many.
    """
    if not _are_processes():
        return None
    _check_alike()
    places = objects.all_gather_objects(rank_place(world), "the machines of all ranks")
    ranks = per_node(places)
    if ranks is None:
        if world.rank == 0:
            warnings.warn(UNEQUAL, UserWarning, stacklevel=2)
        return None
    described = describe(places)
    path = cache_path(described)
    known = objects.all_gather_objects(_read(path, described, world) if world.rank == 0 else "", "a cluster file")[0]
    if known:
        return loads(known, "the cache")
    title = f"shardwright measures this machine, once and for a few seconds; the result is kept in {path}"
    measured = replace(measure(world, ranks, effort, title), about=described)
    text = objects.all_gather_objects(dump(measured) if world.rank == 0 else "", "a cluster file")[0]
    if world.rank == 0:
        _write(text, path)
    return loads(text, "the measurement")


def rank_place(world: World) -> RankPlace:
    """Of this rank."""
    return RankPlace(
        node=machine_name(),
        processor=processor_name() if world.device.type == "cpu" else accelerator.name_of(world.device),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory=round(accelerator.memory_of(world.device) / 2**30),
        threads=torch.get_num_threads(),
    )


@functools.cache
def processor_name() -> str:
    """The processor as the system calls it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return model or platform.processor() or platform.machine()


def per_node(places: Sequence[RankPlace]) -> int | None:
    """How many ranks each node has; None if not equally many in a row each."""
    counts = [len(list(ranks)) for _, ranks in groupby(place.node for place in places)]
    alike = len(counts) == len({place.node for place in places}) and len(set(counts)) == 1
    return counts[0] if alike else None


def describe(places: Sequence[RankPlace]) -> str:
    """All that a measurement depends on. Machines are told apart by what they are, not by their names."""
    nodes = [list(ranks) for _, ranks in groupby(places, key=lambda place: place.node)]
    facts = [[{**asdict(place), "node": number} for place in ranks] for number, ranks in enumerate(nodes)]
    backend = str(dist.get_backend()) if dist.is_initialized() else "none"
    return json.dumps(
        {
            "measured by": f"shardwright, version {VERSION} of what is measured",
            "torch": torch.__version__,
            "backend": backend,
            "shared memory": shares_memory(),
            "nodes": [[len(ranks), *_distinct(ranks)] for ranks in facts],
        }
    )


def _distinct(ranks: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """What the ranks of a node are; nearly always they are all alike."""
    plain = [{key: value for key, value in facts.items() if key != "node"} for facts in ranks]
    return [facts for place, facts in enumerate(plain) if facts not in plain[:place]]


def cache_path(described: str) -> Path:
    """The file of a measurement."""
    digest = hashlib.sha256(described.encode()).hexdigest()[:16]
    return cache_folder() / "clusters" / f"{digest}.yaml"


def _check_alike() -> None:
    """Raise on all ranks if some of them do not plan with "auto": they would not measure."""
    remedy = "pass the same arguments to parallelize on every rank"
    settings = {"plan": "auto", "cluster": "auto", "torch": torch.__version__}
    objects.check_equal(settings, "versions and settings", remedy)


def _are_processes() -> bool:
    """Whether the ranks are processes of their own: threads share one interpreter, and fake ranks send nothing."""
    return not dist.is_initialized() or dist.get_backend() not in ("threaded", "fake")


def _read(path: Path, described: str, world: World) -> str:
    """The text of a file of the cache, if it is to be trusted, else nothing."""
    text = FOLDERS.read(path, LARGEST)
    if text is None:
        return ""
    try:
        cluster = loads(text, str(path))
    except ClusterError as error:
        _log.warning("%s is not used and written again: %s", path, error)
        return ""
    return text if cluster.about == described and cluster.size == world.size else ""


def _write(text: str, path: Path) -> None:
    try:
        FOLDERS.write(text, path)
    except (OSError, InputError) as error:
        _log.warning("this machine will be measured again next time, since %s can't be written: %s; %s",
                     path, error, REMEDY)  # fmt: skip

"""The one place where rank, world size, device and process groups come from.

No other module reads the environment, and this one only when a function is called.
`Groups` makes the process groups of a mesh. Every rank makes every group, also those it
is not in, in one sorted order; a rank that made only its own could wait for ever on one
that is busy making another. Groups are kept for as long as the process group they were
split from, so that compiling a model twice does not make them twice.

A group of one has no process group, and everything in `comm` then does nothing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import product
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from shardwright.errors import InputError, LayoutError, RankError
from shardwright.layout import Mesh

from . import accelerator
from .agent import end_with_agent
from .attempt import agree_on_attempt
from .slurm import joined_by_srun

DEFAULT_TIMEOUT = timedelta(minutes=10)
_IN_ONE_PROCESS = ("threaded", "fake")  # backends whose ranks are no processes


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """This process among all of them."""

    rank: int
    size: int
    device: torch.device


def start(timeout: timedelta | float = DEFAULT_TIMEOUT) -> World:
    """Join the other ranks if torchrun or srun started any, and say who this rank is. May be called again."""
    end_with_agent()
    if not dist.is_initialized():
        os.environ.update(joined_by_srun(os.environ))
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        wait = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
        device = accelerator.device_of(_local_rank())
        accelerator.select(device)
        _join(accelerator.backend_for(device.type), wait)
    return here()


def join(store: Store, rank: int, size: int, device: str, timeout: float | None = None) -> None:
    """Join ranks of this machine that meet at a store, each on its device of a type. For launchers (`launch.py`)."""
    accelerator.select(accelerator.device_of(_local_rank(), device))
    wait = DEFAULT_TIMEOUT if timeout is None else timedelta(seconds=timeout)
    dist.init_process_group(accelerator.backend_for(device), store=store, rank=rank, world_size=size, timeout=wait)


def variables_of(rank: int, size: int, host: str, port: int) -> dict[str, str]:
    """What a launcher on one machine tells a rank, as torchrun does: other libraries read it too."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }


def refuse_inside(caller: str) -> None:
    """Raise if this process is a rank already: what starts ranks would start them once on every rank."""
    ours = os.environ | joined_by_srun(os.environ)
    if dist.is_initialized() or "RANK" in ours:
        rank, size = (
            (dist.get_rank(), dist.get_world_size()) if dist.is_initialized()
            else (ours["RANK"], ours.get("WORLD_SIZE", "1"))
        )  # fmt: skip
        raise InputError(
            f"{caller} starts ranks by itself, and this process is rank {rank} of {size} already, started by torchrun, "
            f"srun or {caller}; call the function itself here, or start the script with python"
        )


def _join(backend: str, wait: timedelta) -> None:
    """Join the other ranks of this attempt.

    After a failure torchrun starts all processes again beside the store that the last ones have filled, and torch would
    read the addresses of those that are gone: so every attempt has keys of its own (see `attempt.py`).
    """
    if "TORCHELASTIC_RESTART_COUNT" not in os.environ:
        dist.init_process_group(backend, timeout=wait)
        return
    store, rank, size = next(iter(rendezvous("env://", timeout=wait)))
    store.set_timeout(wait)
    apart = PrefixStore(f"shardwright/attempt-{agree_on_attempt(store, rank, size, wait)}", store)
    dist.init_process_group(backend, store=apart, rank=rank, world_size=size, timeout=wait)


def here() -> World:
    """Who this rank is, without joining anything."""
    if not dist.is_initialized():
        return World(rank=0, size=1, device=_device(alone=True))
    return World(rank=dist.get_rank(), size=dist.get_world_size(), device=_device(alone=False))


def _device(alone: bool) -> torch.device:
    if alone or accelerator.has_backend(accelerator.kind()):
        return accelerator.device_of(_local_rank())
    return torch.device("cpu")


def shares_memory() -> bool:
    """Whether ranks of one machine may communicate over shared memory (see `collectives/process_group.py`)."""
    return os.environ.get("SHARDWRIGHT_SHARED_MEMORY", "1") != "0"


def calibrates() -> bool:
    """Whether `plan="auto"` may measure the machine that it runs on (see `calibrate/machine.py`)."""
    return os.environ.get("SHARDWRIGHT_CALIBRATE", "1") != "0"


def full_tracebacks() -> bool:
    """Whether errors of shardwright are printed with all frames, and with what they came from."""
    return os.environ.get("SHARDWRIGHT_TRACEBACK", "") == "full"


def error_file() -> Path | None:
    """Where torchrun looks for the error of this rank."""
    named = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(named) if named else None


def cache_folder() -> Path:
    """Where measurements of this machine are kept."""
    named = os.environ.get("SHARDWRIGHT_CACHE")
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "shardwright"


def ranks_per_node(size: int) -> int:
    """How many ranks each machine has, as torchrun or srun say; all of them, if they say nothing that divides them."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    return local if size % local == 0 else size


def compare_every() -> int:
    """Every how many calls of a model inputs are compared (see `input_comparison`); 0: in a program's first only."""
    return int(os.environ.get("SHARDWRIGHT_COMPARE_INPUTS", "1"))


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """The ranks that differ only in `axes`, ordered with the first axis slowest, and this rank's place."""

    axes: tuple[str, ...]
    size: int
    index: int
    ranks: tuple[int, ...]
    process_group: dist.ProcessGroup | None = field(default=None, repr=False)


class Moment(Group):
    """A place on a time axis: which of `size` microbatches is running. There is no communication over time."""

    __slots__ = ()

    def __init__(self, size: int, axis: str = "mb") -> None:
        super().__init__(axes=(axis,), size=size, index=0, ranks=())

    def move(self, index: int) -> None:
        """Another microbatch runs from here on."""
        object.__setattr__(self, "index", index)


class Groups:
    """The groups of a mesh: `groups["tp"]`, `groups["dp", "tp"]`. Made by all ranks together."""

    def __init__(self, mesh: Mesh, wanted: Iterable[Sequence[str] | str] = (), *, apart: bool = False) -> None:
        """`apart` makes groups of their own, for communication that may interleave with that of the others."""
        world = here()
        self._apart = apart
        if max(mesh.devices) >= world.size:
            raise RankError(
                f"the mesh {mesh} uses rank {max(mesh.devices)}, and there are {world.size} ranks; "
                f"start the script with torchrun --nproc-per-node {max(mesh.devices) + 1}, or a function of it with "
                f"sw.launch(fn, ranks={max(mesh.devices) + 1})"
            )
        self.mesh = mesh
        self._rank = world.rank
        self._device_type = world.device.type
        self._groups: dict[tuple[str, ...], Group] = {}
        single = {(name,) for name in mesh.names}
        requested = {(item,) if isinstance(item, str) else tuple(item) for item in wanted}
        for axes in sorted(single | requested | {()}):
            self._make(axes)

    def __getitem__(self, axes: str | tuple[str, ...]) -> Group:
        key = (axes,) if isinstance(axes, str) else axes
        if key not in self._groups:
            known = ", ".join(" ".join(item) for item in self._groups if item)
            raise LayoutError(
                f"no group over {' '.join(key)} was made on rank {self._rank}; there are: {known or 'none'}"
            )
        return self._groups[key]

    def device_mesh(self) -> DeviceMesh | None:
        """The same groups as a torch DeviceMesh over the axes longer than one, or None where there is none."""
        axes = [axis for axis in self.mesh.axes if axis.size > 1]
        if not axes or self._rank not in self.mesh.devices:
            return None
        process_groups = [self[axis.name].process_group for axis in axes]
        grid = torch.tensor(self.mesh.devices, dtype=torch.int).view([axis.size for axis in axes])
        groups = [group for group in process_groups if group is not None]
        names = tuple(axis.name for axis in axes)
        return DeviceMesh.from_group(groups, self._device_type, mesh=grid, mesh_dim_names=names)

    def _make(self, axes: tuple[str, ...]) -> None:
        mine = None
        for ranks in members(self.mesh, axes):
            process_group = _process_group(ranks, self._apart) if len(ranks) > 1 else None
            if self._rank in ranks:
                mine = (ranks, process_group)
        if mine is not None:
            ranks, process_group = mine
            self._groups[axes] = Group(
                axes=axes, size=len(ranks), index=ranks.index(self._rank), ranks=ranks, process_group=process_group
            )


def members(mesh: Mesh, axes: Sequence[str]) -> list[tuple[int, ...]]:
    """The sets of ranks that differ only in `axes`, each ordered with the first of `axes` slowest."""
    for name in axes:
        mesh.axis(name)
    others = [name for name in mesh.names if name not in axes]
    place = {tuple(mesh.coordinates(rank).items()): rank for rank in mesh.devices}
    groups = []
    for fixed in product(*(range(mesh.sizes[name]) for name in others)):
        ranks = []
        for moving in product(*(range(mesh.sizes[name]) for name in axes)):
            at = dict(zip((*others, *axes), (*fixed, *moving), strict=True))
            ranks.append(place[tuple((name, at[name]) for name in mesh.names)])
        groups.append(tuple(ranks))
    return groups


# Process groups by the ranks they hold, in order, for each default process group.
_Key = tuple[tuple[int, ...], bool]
_process_groups: WeakKeyDictionary[dist.ProcessGroup, dict[_Key, dist.ProcessGroup | None]] = WeakKeyDictionary()
_process_groups_lock = threading.Lock()


def _process_group(ranks: tuple[int, ...], apart: bool) -> dist.ProcessGroup | None:
    """The process group of these ranks, made if it is new; None on a rank that is not in it."""
    world_group = dist.group.WORLD
    if world_group is None:
        raise RankError("torch.distributed is not initialised; call shardwright.runtime.world.start() first")
    if ranks == tuple(range(dist.get_world_size())) and not apart:
        return world_group
    with _process_groups_lock:
        known = _process_groups.setdefault(world_group, {})
    if (ranks, apart) not in known:
        group = dist.new_group(list(ranks), timeout=timeout_of(world_group), sort_ranks=False)
        known[ranks, apart] = group if dist.get_rank() in ranks else None
    return known[ranks, apart]


def group_of(ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """The process group of some ranks, None on a rank that is not in it. Made by all ranks together."""
    return _process_group(tuple(ranks), apart=False)


def cpu_group(timeout: timedelta | None = None) -> dist.ProcessGroup | None:
    """A group of all ranks for CPU tensors, separate from the others; None where there is one rank.

    It waits as long as the others do, or for `timeout`. Made by all ranks together. Ranks that are threads have one
    group for all.
    """
    world_group = dist.group.WORLD if dist.is_initialized() else None
    if world_group is None or dist.get_world_size() == 1:
        return None
    if any(name in str(dist.get_backend_config()) for name in _IN_ONE_PROCESS):
        return world_group
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout or timeout_of(world_group))
    return group


def pair_groups(pairs: Iterable[tuple[int, int]], device: torch.device) -> dict[tuple[int, int], dist.ProcessGroup]:
    """For each ordered pair of ranks, the group in which the first sends to the second. Made by all ranks together.

    NCCL runs what is in one group one after the other, so that a send would wait for the receive before it: there
    each pair has a group of its own. Gloo has one for all.
    """
    groups: dict[tuple[int, int], dist.ProcessGroup] = {}
    everyone = tuple(range(here().size))
    for pair in sorted(set(pairs)):
        group = _process_group(pair if device.type != "cpu" else everyone, apart=True)
        if group is not None:
            groups[pair] = group
    return groups


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """A subgroup waits as long as its parent: torch would give it half an hour."""
    try:
        backend = group._get_backend(here().device)
    except RuntimeError:  # the threaded group has no backend
        return None
    timeout = getattr(getattr(backend, "options", None), "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None

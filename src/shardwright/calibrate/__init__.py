"""`shardwright calibrate`: measures the machine it runs on, and describes it as a cluster.

Under torchrun the ranks that it started are measured, over all their nodes, on GPUs with NCCL or on CPUs with gloo.
Without torchrun a machine of CPUs is measured with gloo processes started here, and of a GPU only what it
can do alone.

Read `compute.py` and `collectives.py` (what is measured), `timing.py` (how), and `tables.py` (the result).
"""

from __future__ import annotations

import math
import os
import socket
from dataclasses import replace
from statistics import median

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ..cluster import Cluster, Node, NodeGroup
from ..cluster.catalogue import USUAL, inside, usual_network
from ..runtime.collectives import objects
from ..runtime.launch import run_processes
from ..runtime.world import World, start
from .collectives import count_per_node, fit, kinds_in, measure_collectives, measure_meeting, measure_overlap, meshes
from .compute import as_device, is_crowded, measure_edge, measure_ops, series_of, slowest
from .tables import tables
from .timing import FULL, QUICK, Effort

TRIES = 5

__all__ = ["FULL", "QUICK", "Effort", "calibrate", "tables"]


def calibrate(effort: Effort, ranks: int | None = None, name: str = "measured") -> tuple[Cluster, World]:
    """The cluster that this process is on, measured, and who this process is in it.

    `ranks` is how many processes to start where torchrun has started none: one for each core by default.
    """
    ours = not dist.is_initialized()
    world = start()
    try:
        if world.size > 1 or world.device.type != "cpu":
            return replace(measure(effort), name=name), world
        count = ranks or min(os.cpu_count() or 1, 8)
        cluster = measure(effort) if count == 1 else run_processes(count, _rank, effort)[0]
        return replace(cluster, name=name), world
    finally:
        if ours and dist.is_initialized():
            dist.destroy_process_group()


def _rank(rank: int, effort: Effort) -> Cluster:
    return measure(effort)


def measure(effort: Effort) -> Cluster:
    """Measure the ranks that there are, all of them together; every rank gets the result."""
    world = start()
    per_node = count_per_node(objects.all_gather_objects(socket.gethostname(), "names of nodes"))
    shapes = list(meshes(world.size, per_node))
    with _progress(world.rank == 0) as progress:
        total = len(series_of(effort)) + sum(len(kinds_in(ranks)) for ranks, _ in shapes)
        task = progress.add_task("", total=total)

        def advance(what: str) -> None:
            progress.update(task, description=what, advance=1)

        crowded = is_crowded(world.device, per_node)
        series = slowest(
            objects.all_gather_objects(measure_ops(world.device, effort, advance, crowded), "times of ops")
        )
        edge = max(objects.all_gather_objects(measure_edge(world.device, series, effort, crowded), "times of edges"))
        measured = measure_collectives(world, per_node, effort, advance)
        overlap, meeting = math.nan, 0.0
        if world.size > 1:  # both are small differences of large numbers
            overlap = median(measure_overlap(world, effort) for _ in range(TRIES))
            meeting = median(measure_meeting(world, effort) for _ in range(TRIES))
    sharing = per_node if world.device.type == "cpu" else 1
    device = as_device(world.device, series, sharing, edge)
    usual = device.name if device.name in USUAL else "cpu"  # whose links stand for what could not be measured
    node = Node(
        device=device,
        devices=per_node,
        inside=fit("inside", measured, across=False) or inside(USUAL[usual].inside),
        network=fit("network", measured, across=True) or usual_network(usual, per_node),
    )
    return Cluster(
        name="measured",
        groups=(NodeGroup(node=node, nodes=world.size // per_node),),
        measured=measured,
        overlap=overlap,
        meeting=meeting,
        about=_about(world, per_node),
    )


def _about(world: World, per_node: int) -> str:
    backend = f" with {dist.get_backend()}" if world.size > 1 else ""
    return (
        f"measured by shardwright calibrate: torch {torch.__version__}, {world.size // per_node} x {per_node} "
        f"{world.device.type}{backend}, {torch.get_num_threads()} threads a rank"
    )


def _progress(shown: bool) -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:24}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not shown or not console.is_terminal)

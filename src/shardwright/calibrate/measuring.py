"""Measures the ranks that there are, all of them together, as a cluster."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ..cluster import Cluster, Node, NodeGroup
from ..cluster.catalogue import USUAL, inside, usual_network
from ..runtime.collectives import objects
from ..runtime.world import World
from .collectives import Meeting, fit, kinds_in, measure_collectives, measure_meeting, meshes
from .compute import as_device, is_crowded, measure_edge, measure_ops, series_of, slowest
from .timing import Effort


def measure(world: World, per_node: int, effort: Effort, title: str = "") -> Cluster:
    """The cluster of all ranks, of which each node has `per_node`. All ranks must call it."""
    shapes = list(meshes(world.size, per_node))
    with _progress(world.rank == 0, title) as progress:
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
        meeting = measure_meeting(world, effort) if world.size > 1 else Meeting(overlap=math.nan, lost=0.0)
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
        overlap=meeting.overlap,
        meeting=meeting.lost,
        about=_about(world, per_node),
    )


def _about(world: World, per_node: int) -> str:
    backend = f" with {dist.get_backend()}" if world.size > 1 else ""
    return (
        f"measured by shardwright calibrate: torch {torch.__version__}, {world.size // per_node} x {per_node} "
        f"{world.device.type}{backend}, {torch.get_num_threads()} threads a rank"
    )


def _progress(shown: bool, title: str) -> Progress:
    console = Console(stderr=True)
    if shown and title:
        console.print(title, highlight=False, soft_wrap=True)
    columns = (TextColumn("{task.description:24}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not shown or not console.is_terminal)

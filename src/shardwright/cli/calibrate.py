"""`shardwright calibrate`: measure this machine as a cluster."""

from __future__ import annotations

from argparse import Namespace

from rich.console import Console

from ..calibrate import FULL, QUICK, calibrate, tables
from ..cluster import save
from ..errors import InputError
from .progress import working


def run_calibrate(options: Namespace, console: Console) -> int:
    if options.ranks is not None and options.ranks < 1:
        raise InputError(f"--ranks {options.ranks} must be at least 1")
    name = options.output.stem if options.output is not None else "measured"
    with working("measuring this machine" + ("" if options.quick else ", which takes minutes; --quick takes one")):
        cluster, world = calibrate(QUICK if options.quick else FULL, options.ranks, name)
    if world.rank != 0:
        return 0
    console.print(tables(cluster))
    if cluster.size == 1 and world.device.type != "cpu":
        console.print(UNDER_TORCHRUN, highlight=False)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        save(cluster, options.output)
        console.print(f"written to {options.output}", highlight=False, soft_wrap=True)
    return 0


UNDER_TORCHRUN = (
    "collectives were not measured; to measure them start one process per GPU: "
    "torchrun --no-python --nproc-per-node 8 shardwright calibrate ..."
)

"""`shardwright report`: a plan file, or two, as one HTML file."""

from __future__ import annotations

from argparse import Namespace

from rich.console import Console

from ..report import read_plan, report
from .models import graph_for
from .progress import working


def run_report(options: Namespace, console: Console) -> int:
    plan = read_plan(options.file)
    other = None if options.other is None else read_plan(options.other)
    with working("drawing"):
        graph = None if options.model is None else graph_for(options, plan)
        drawn = report(plan, graph, other=other)
    if options.trace is not None:  # which may be refused
        drawn.save_trace(options.trace)
        console.print(f"predicted trace written to {options.trace}", highlight=False, soft_wrap=True)
    drawn.save(options.output)
    console.print(f"written to {options.output}", highlight=False, soft_wrap=True)
    if graph is None:
        console.print("shapes, layouts and costs of ops need the model: --model FILE.py:FUNCTION", highlight=False)
    return 0

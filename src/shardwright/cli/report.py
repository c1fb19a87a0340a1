"""`shardwright report`: a plan file, or two, as one HTML file."""

from __future__ import annotations

from pathlib import Path

from jsonargparse import ArgumentParser, Namespace
from rich.console import Console
from rich.status import Status

from ..report import read_plan, report
from .models import graph_for, known_model_arguments


def report_parser() -> ArgumentParser:
    parser = ArgumentParser(
        description="Draw a plan: predicted time, mesh, communication, memory over a step, the timeline of every "
        "pipeline rank, modules and ops, generated code; with a second plan what differs. One HTML file, which "
        "loads nothing."
    )
    parser.add_argument("file", type=Path, help="a plan file")
    parser.add_argument("other", type=Path, nargs="?", help="a second plan file, to compare with")
    known_model_arguments(parser)
    parser.add_argument("-o", "--output", type=Path, default=Path("report.html"), help="where to write the report")
    parser.add_argument("--trace", type=Path, help="write the predicted step for ui.perfetto.dev too, as JSON")
    return parser


def run_report(options: Namespace, console: Console) -> int:
    plan = read_plan(options.file)
    other = None if options.other is None else read_plan(options.other)
    with Status("drawing", console=Console(stderr=True)):
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

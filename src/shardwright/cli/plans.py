"""`shardwright plan`, `explain` and `diff`: make plans, show them, compare them."""

from __future__ import annotations

import math
from argparse import Namespace

from rich.console import Console

from ..errors import InputError
from ..options import CompileOptions, Outputs
from ..parallelize import planned, read_request
from ..plan.request import read_source
from ..plan.search_options import SearchOptions
from ..planning import cluster_for, training_of
from ..precision import read_precision
from ..report import diff, explain, read_plan
from .models import count_devices, graph_for, load_model
from .progress import SearchProgress, working


def run_plan(options: Namespace, console: Console) -> int:
    module, example = load_model(options.model, options.batch, options.seq, meta=True)
    outputs: Outputs = options.outputs or ("scalars" if options.model.startswith("hf:") else "all")
    if options.accumulate < 1:
        raise InputError(f"--accumulate {options.accumulate} must be at least 1 (an update after every backward)")
    size = count_devices(options)
    with SearchProgress() as watching:
        search = SearchOptions(
            seconds=math.inf if options.seconds is None else options.seconds, microbatches=options.microbatches,
            data_only=options.inputs == "per_replica", progress=watching, stop=watching.stopped,
        )  # fmt: skip
        exact = read_precision(options.precision)
        request = read_request(
            module, read_source(options.plan), cluster=cluster_for(options.cluster or size, size),
            training=training_of(options.optimizer, options.accumulate, exact), memory=options.memory,
            constraints=options.constraints, search=search,
        )  # fmt: skip
        compiled = CompileOptions(outputs=outputs, opaque=options.opaque)
        plan, captured = planned(module, example, request, size, precision=exact, options=compiled)
    console.print(explain(plan, captured.graph) if options.full else explain(plan))
    if options.outputs is None and outputs == "scalars":
        console.print(ONLY_SCALARS, highlight=False)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        plan.save(options.output)
        console.print(f"written to {options.output}", highlight=False, soft_wrap=True)
    return 0


def run_explain(options: Namespace, console: Console) -> int:
    plan = read_plan(options.file)  # report its errors first
    if options.op is not None:
        if options.model is None:
            raise InputError("--op needs the model of the plan: --model FILE.py:FUNCTION")
        with working("pricing the alternatives"):
            explanation = explain(plan, graph_for(options, plan), op=options.op, cluster=options.cluster)
        console.print(explanation)
    elif options.model is not None:
        console.print(explain(plan, graph_for(options, plan), cluster=options.cluster))
    elif options.cluster is not None:
        raise InputError("--cluster prices the plan anew, which needs its model: --model FILE.py:FUNCTION")
    else:
        console.print(explain(plan, full=options.full))
    return 0


def run_diff(options: Namespace, console: Console) -> int:
    a, b = read_plan(options.a), read_plan(options.b)
    with working("comparing"):
        graph = graph_for(options, a) if options.model is not None else None
        difference = diff(a, b, graph, cluster=options.cluster)
    console.print(difference)
    return 0


ONLY_SCALARS = "the program returns only the loss, as is usual in training; --outputs all returns the logits too"

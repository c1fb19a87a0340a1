"""`shardwright compile` and `verify`: write the program of a model, and compare it with the original."""

from __future__ import annotations

from argparse import Namespace

import torch
from rich.console import Console

from ..capture import find_opaque
from ..compile import write
from ..errors import InputError
from ..options import CompileOptions, PipelineOptions
from ..plan.request import PlanRequest, read_source, source_size
from ..plan.search_options import SearchOptions
from ..verify import compile_program, first_difference, verify
from .models import count_devices, load_model
from .progress import working


def run_compile(options: Namespace, console: Console) -> int:
    module, (args, kwargs) = load_model(options.model, options.batch, options.seq, meta=True)
    if module.training != (options.entry == "train"):
        module.train(options.entry == "train")
    request = PlanRequest.read(options.plan, options=SearchOptions(microbatches=options.microbatches))
    with working("compiling"):
        compiled = compile_program(find_opaque(module, options.opaque), args, kwargs, request, count_devices(options))
    for program, text in zip(compiled.programs, compiled.texts, strict=True):
        path, lines = write(text, options.output, program), len(text.splitlines())
        console.print(f"{path}: {lines} lines for {program.devices} devices", highlight=False, soft_wrap=True)
    return 0


def run_verify(options: Namespace, console: Console) -> int:
    module, example = load_model(options.model, options.batch, options.seq)
    open_size = options.plan is None or source_size(read_source(options.plan)) is None
    size = options.ranks if open_size else None
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    if options.trace and options.precision is not None:
        raise InputError("--trace compares ops in float64 or float32; leave out --precision")
    with working("running the original and the program"):
        report = verify(
            module, options.plan, example=example, dtype=dtype, precision=options.precision, steps=options.steps,
            optimizer=options.optimizer, tolerance=options.tolerance, ranks=size, method="threads",
            entries=("train", "eval") if options.eval else ("train",), compile=CompileOptions(opaque=options.opaque),
            pipeline=PipelineOptions(microbatches=options.microbatches),
        )  # fmt: skip
    console.print(report)
    if not report.passed and options.trace:
        plan = options.plan or report.worst.plan or "auto"
        difference = first_difference(module, plan, example=example, dtype=dtype or torch.float64, ranks=size)
        console.print("the first difference: " if difference else "", end="")
        console.print(str(difference) if difference else AGREES, highlight=False, markup=False)
    return 0 if report.passed else 1


AGREES = "every op matches the original: look at the generated file, or at the sync of parameters"

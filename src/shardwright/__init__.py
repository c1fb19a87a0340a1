"""Compile a PyTorch model written for one device into a program that trains on many."""

from .capture import experts, opaque
from .checkpoint import load, save
from .options import CompileOptions, PipelineOptions
from .parallelize import parallelize, plan
from .register import register_op
from .rehearse import rehearse
from .report import diff, explain, report
from .runtime.launch import launch
from .train import Trainer
from .verify import verify

__all__ = [
    "CompileOptions",
    "PipelineOptions",
    "Trainer",
    "diff",
    "experts",
    "explain",
    "launch",
    "load",
    "opaque",
    "parallelize",
    "plan",
    "register_op",
    "rehearse",
    "report",
    "save",
    "verify",
]

"""A graph and a plan become the program that all ranks of a mesh run, as a list of passes.

Read `passes.py` (the list), `program.py` (what a pass takes and returns), `place.py` (the first pass: layouts and
reshards), `local.py` (ops as a rank calls them), `tidy.py` and `overlap.py` (shorter and faster programs), then
`pipeline.py` and `prologue.py` (programs of stages). `text.py` prints a program.
"""

from .overlap import reshard_kind
from .passes import PASSES, lower
from .pipeline import ModelOutput, PipelinePrograms, StageTransfer, lower_pipeline
from .program import LoweredProgram, PrologueValue, Size, SizeFactor
from .text import show

__all__ = [
           "PASSES",
           "LoweredProgram",
           "ModelOutput",
           "PipelinePrograms",
           "PrologueValue",
           "Size",
           "SizeFactor",
           "StageTransfer",
           "lower",
           "lower_pipeline",
           "reshard_kind",
           "show",
]  # fmt: skip

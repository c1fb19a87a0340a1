"""What each rank does: a graph and a plan become the program that all ranks of a mesh run."""

from .overlap import reshard_kind
from .passes import PASSES, lower
from .pipeline import ModelOutput, PipelinePrograms, StageTransfer, lower_pipeline
from .program import LoweredProgram, PrologueValue, Size, SizeFactor

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
]  # fmt: skip

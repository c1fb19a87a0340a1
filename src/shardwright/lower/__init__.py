"""What each rank does: a graph and a plan become the program that all ranks of a mesh run."""

from .overlap import reshard_kind
from .passes import PASSES, run, transform
from .place import PlacementTask, Placer
from .program import LoweredProgram, PrologueValue, Size, SizeFactor

__all__ = [
           "PASSES",
           "LoweredProgram",
           "PlacementTask",
           "Placer",
           "PrologueValue",
           "Size",
           "SizeFactor",
           "reshard_kind",
           "run",
           "transform",
]  # fmt: skip

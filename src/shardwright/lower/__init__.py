"""A graph, and a choice for each of its ops, become the program that all ranks of a mesh run, as a list of passes.

Read `passes.py` (the list), `program.py` (what a pass takes and returns), `place.py` (the first pass: layouts and
reshards), `local.py` (ops as a rank calls them), `tidy.py` and `overlap.py` (shorter and faster programs), then
`prologue.py` (what all microbatches need). `text.py` prints a program. The programs of a plan: `plan/lowering.py`.
"""

from .overlap import reshard_kind
from .passes import PASSES, run, transform
from .place import PlacementTask, Placer
from .program import LoweredProgram, PrologueValue, Size, SizeFactor
from .text import show

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
           "show",
           "transform",
]  # fmt: skip

"""What each rank does: a graph and a plan become the program that all ranks of a mesh run."""

from .overlap import converter_of
from .passes import PASSES, lower
from .pipeline import Exit, Passage, Pipelined, lower_pipeline
from .program import Early, Factor, Holding, Program, Size

__all__ = ["PASSES", "Early", "Exit", "Factor", "Holding", "Passage", "Pipelined", "Program", "Size", "converter_of",
           "lower", "lower_pipeline"]  # fmt: skip

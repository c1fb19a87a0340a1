"""What each rank does: a graph and a plan become the program that all ranks of a mesh run."""

from .overlap import converter_of
from .passes import PASSES, lower
from .program import Factor, Holding, Program, Size

__all__ = ["PASSES", "Factor", "Holding", "Program", "Size", "converter_of", "lower"]

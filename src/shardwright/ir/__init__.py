"""What is computed: values, ops and graphs at global shapes, without torch.

Read `graph.py` (the types), `check.py` (what a graph must satisfy), `text.py` (a graph as text), `paths.py` (module
paths).
"""

from .check import check
from .graph import Argument, Buffer, Dtype, Graph, Input, Op, Output, Parameter, Slot, SourceLine, Value
from .mask import MaskStructure
from .text import show

__all__ = [
    "Argument",
    "Buffer",
    "Dtype",
    "Graph",
    "Input",
    "MaskStructure",
    "Op",
    "Output",
    "Parameter",
    "Slot",
    "SourceLine",
    "Value",
    "check",
    "show",
]

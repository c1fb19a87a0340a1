"""What is computed: values, ops and graphs at global shape, without torch."""

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

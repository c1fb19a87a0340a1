"""Whether the compiled program does what the original does, and if not, where it leaves it."""

from .debug import ComparedValue, ValueTrace, first_difference, trace
from .measure import Report, Row
from .parity import verify
from .program import Compilation, compile_program

__all__ = [
    "ComparedValue",
    "Compilation",
    "Report",
    "Row",
    "ValueTrace",
    "compile_program",
    "first_difference",
    "trace",
    "verify",
]

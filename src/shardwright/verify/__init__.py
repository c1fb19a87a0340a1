"""Whether the compiled program does what the original does, and if not, where it leaves it."""

from .debug import Seen, Trace, first_difference, trace
from .measure import Report, Row
from .parity import verify
from .program import Compilation, compile_program

__all__ = ["Compilation", "Report", "Row", "Seen", "Trace", "compile_program", "first_difference", "trace", "verify"]

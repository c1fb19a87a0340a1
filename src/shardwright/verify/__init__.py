"""Does the compiled program compute what the original computes, and if not, which op is the first to differ?

Read `parity.py` (`verify`), `run.py` (the training steps both sides do), `original.py` and `compiled.py` (the two
sides), `measure.py` (tolerances and the report), `ranks.py` (ranks as threads or processes), then `debug.py`, which
compares op by op.
"""

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

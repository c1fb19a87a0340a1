"""Run a plan for many devices for real, scaled down, in one process, before the devices exist.

Read `rehearsal.py` (the flow), `small.py` (search for a small plan with the same program), `stages.py`, `layers.py` and
`sizes.py` (what shrinks), `shrink.py` and `arguments.py` (the small graph), `result.py` (the report).
"""

from .rehearsal import rehearse
from .result import Rehearsal

__all__ = ["Rehearsal", "rehearse"]

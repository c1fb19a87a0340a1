"""Plans for people to read: one plan explained, two plans compared.

`screen.py` and `pipeline.py` show the predicted cost on one screen, from the plan file alone. `explain.py` adds tables
of every decision, `communication.py` counts collectives, `why.py` prices the alternatives of an op, `difference.py`
compares two plans, all on the terms of `conditions.py`. `visual/` is the report in HTML.
"""

from .difference import Difference, diff
from .explain import Explanation, explain
from .plans import read_plan
from .visual import VisualReport, report
from .why import Why

__all__ = ["Difference", "Explanation", "VisualReport", "Why", "diff", "explain", "read_plan", "report"]

"""The visual report: a plan, or two, as one HTML file.

`page.py` writes the file, with the scripts and the style in `assets/`. `contents.py` collects what it shows:
`numbers.py` from the plan file alone; with the model's graph `phases.py` (what runs in forward and backward),
`timeline.py`, `memory.py`, `tree.py` (modules and ops) and `code.py`. `interning.py` keeps the data small. `trace.py`
writes the timeline for Perfetto.
"""

from .page import VisualReport, report

__all__ = ["VisualReport", "report"]

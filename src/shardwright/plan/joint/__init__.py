"""The joint planner: flat plans and pipelines, searched together.

Read `planner.py` (the decision between them), `search.py` and `candidates.py` (the loop), `blocks.py` and `ranks.py`
(where stages may begin, and their devices), `timed.py`, `fronts.py` and `stage.py` (the cost of a stage), `cuts.py`
(boundaries of stages), `bounds.py` (lower bounds), then `trial.py` and `refine.py` (the best candidates, exactly).
"""

from .planner import JointResult, find_plan
from .predict import note_of, pipeline_summary, predicted

__all__ = ["JointResult", "find_plan", "note_of", "pipeline_summary", "predicted"]

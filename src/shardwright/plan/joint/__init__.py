"""The joint planner: flat plans and pipelines, searched together.

`planner.py` is the whole of it in order; read it first, then `search.py`, the loop over pipelines. A pipeline is made
of pipeline ranks (`ranks.py`), cut into stages (`stage_cuts.py`). Tables for microbatches (`microbatch_tables.py`) are
solved at some prices of memory (`pareto_front.py`), which gives the cost of any stage (`stage_costs.py`). Pipelines
come in the order of their bounds (`bounds.py`, `candidates.py`); the best are solved exactly (`solved_stages.py`), and
`predict.py` says what the plan costs. `chunked_search.py` does all of it again with chunked losses, where memory is
short.
"""

from .chunked_search import find_best_plan
from .planner import JointResult, find_plan
from .predict import note_of, pipeline_summary, predicted

__all__ = ["JointResult", "find_best_plan", "find_plan", "note_of", "pipeline_summary", "predicted"]

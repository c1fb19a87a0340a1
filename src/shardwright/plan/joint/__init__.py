"""The joint planner: flat plans and pipelines, searched together.

`planner.py` is the whole of it in order; read it first, then `search.py`, the loop over pipelines. A pipeline is made
of pipeline ranks (`ranks.py`), cut into stages (`stage_cuts.py`). Tables for microbatches (`microbatch_tables.py`) are
solved at some prices of memory (`pareto_front.py`), which gives the cost of any stage (`stage_costs.py`). Pipelines
come in the order of their bounds (`bounds.py`, `candidates.py`); the best are solved exactly (`solved_stages.py`), and
`predict.py` compares it with others. `price_stages.py` prices any plan with stages or
microbatches. `chunked_search.py` does all of it again with chunked losses, where memory is
short.
"""

from .chunked_search import find_best_plan
from .pipeline_price import PipelinePrice
from .planner import JointResult, find_plan
from .predict import UNBOUNDED, note_of, pipeline_summary, predicted
from .price_stages import price_pipeline, price_plan
from .stage_whatif import stage_alternatives

__all__ = [
    "UNBOUNDED",
    "JointResult",
    "PipelinePrice",
    "find_best_plan",
    "find_plan",
    "note_of",
    "pipeline_summary",
    "predicted",
    "price_pipeline",
    "price_plan",
    "stage_alternatives",
]

"""The joint planner: flat plans and pipelines, searched together."""

from .planner import JointResult, find_plan
from .predict import beside, note_of, predicted

__all__ = ["JointResult", "beside", "find_plan", "note_of", "predicted"]

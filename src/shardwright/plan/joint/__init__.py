"""The joint planner: flat plans and pipelines, searched together."""

from .planner import JointResult, find_plan
from .predict import note_of, pipeline_summary, predicted

__all__ = ["JointResult", "find_plan", "note_of", "pipeline_summary", "predicted"]

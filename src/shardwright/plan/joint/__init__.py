"""The joint planner: flat plans and pipelines, searched together."""

from .planner import Outcome, find
from .predict import beside, note_of, predicted

__all__ = ["Outcome", "beside", "find", "note_of", "predicted"]

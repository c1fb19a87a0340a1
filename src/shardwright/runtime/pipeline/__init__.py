"""Pipelines: segments on meshes, run by a list of steps, inside an ordinary training loop."""

from .loop import Loop, Running
from .parts import Crossing, How, Leaving, Pipeline, Placed
from .ties import Ties

__all__ = ["Crossing", "How", "Leaving", "Loop", "Pipeline", "Placed", "Running", "Ties"]

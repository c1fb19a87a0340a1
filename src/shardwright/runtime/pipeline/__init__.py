"""Pipelines: stages on meshes, run by a schedule, inside an ordinary training loop.

Read `spec.py` (the data), `autograd.py` (a call of the model as one autograd function), `executor.py` (runs a rank's
steps), `script.py` (which messages go with each step), `routes.py` and `transport.py` (who sends what to whom, and
how), `outputs.py`, `standins.py` and `ties.py` (outputs and gradients).
"""

from .autograd import PipelineLoop, RunningPipeline
from .spec import How, PipelineOutput, PipelineSpec, PlacedStage, StageCrossing
from .ties import TiedGradients

__all__ = [
    "How",
    "PipelineLoop",
    "PipelineOutput",
    "PipelineSpec",
    "PlacedStage",
    "RunningPipeline",
    "StageCrossing",
    "TiedGradients",
]

"""Pipelines: stages on meshes, run by a schedule, inside an ordinary training loop."""

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

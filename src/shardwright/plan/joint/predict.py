"""What a plan file says about a pipeline that was searched: what it costs (`price_stages`), and the runners-up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...cluster import Cluster
from ...cost import TrainingSetup
from ...rules import Analysis
from ..auto import SearchResult
from ..price import short
from .candidates import PipelineTrial
from .planner import JointResult
from .price_stages import price_pipeline

UNBOUNDED = 1e12
"""The seconds of a bound where no pipeline was possible: JSON has no infinity."""

NEXT = 6
"""Runners-up that a plan file names."""


def predicted(outcome: JointResult, cluster: Cluster, training: TrainingSetup, analysis: Analysis) -> dict[str, Any]:
    """The prediction for a plan that is a pipeline, and how it compares with others."""
    assert outcome.pipeline is not None
    result, flat = outcome.pipeline, outcome.flat
    trial, solved = result.trial, result.solved
    priced = price_pipeline(analysis, cluster, training, outcome.plan, limit=min(result.rooms), memory=result.memory)
    prediction = priced.as_json()
    bound = min(outcome.bound, priced.seconds)
    prediction |= {"bound": short(bound), "gap": short(priced.seconds / bound - 1.0 if bound > 0 else 0.0)}
    prediction["stopped"] = result.piped.stopped
    prediction["pipeline"] |= {
        "flat": _flat(flat, priced.seconds),
        "others": [
            {"text": describe_trial(other, solved.names), "seconds": short(other.seconds)}
            for other in _distinct(result.piped.others, trial)
        ],
        "tried": result.piped.tried,
        "pruned": result.piped.pruned,
    }
    return prediction


def pipeline_summary(outcome: JointResult) -> dict[str, Any]:
    """What a flat plan says about the pipelines that were tried; its gap is to the bound of flat plans."""
    piped, flat = outcome.piped, outcome.flat
    if piped is None or flat is None:
        return {}
    best = piped.best
    names = {} if best is None else {best.pp_ranks[0].names[1]: "tp"}
    return {
        "pipelines": {
            "best": None if best is None else {"text": describe_trial(best, names), "seconds": short(best.seconds)},
            "bound": short(min(piped.bound, UNBOUNDED)),
            "tried": piped.tried,
            "pruned": piped.pruned,
            "stopped": piped.stopped,
        }
    }


def note_of(outcome: JointResult) -> str:
    """How the best flat plan and the best pipeline compare, as text."""
    flat, result, piped = outcome.flat, outcome.pipeline, outcome.piped
    if result is not None:
        if flat is None:
            return "no plan without a pipeline fits"
        gain = flat.best.time / result.trial.seconds - 1.0
        return f"the best plan without a pipeline ({flat.plan.mesh}) takes {_ms(flat.best.time)}, {gain:.1%} more"
    if piped is None or flat is None:
        return ""
    if piped.best is not None and piped.best.seconds >= flat.best.time:
        more = piped.best.seconds / flat.best.time - 1.0
        best = piped.best
        return (
            f"the best pipeline that was tried ({describe_trial(best, {})}) takes {_ms(best.seconds)}, {more:.1%} more"
        )
    return f"of {piped.tried + piped.pruned} pipelines none is faster"


def describe_trial(trial: PipelineTrial, names: dict[str, str]) -> str:
    """A pipeline as text: "4 stages of 8 (dp=4 x tp=2), 16 microbatches, 1f1b"."""
    return trial.describe({trial.pp_ranks[0].names[1]: "tp", **names})


def _flat(flat: SearchResult | None, seconds: float) -> dict[str, Any] | None:
    if flat is None:
        return None
    return {
        "mesh": str(flat.plan.mesh),
        "seconds": short(flat.best.time),
        "ratio": short(flat.best.time / seconds),
    }


def _distinct(others: Sequence[PipelineTrial], best: PipelineTrial) -> list[PipelineTrial]:
    """The fastest of those that differ from the best, and from each other, in more than the schedule."""
    distinct: dict[tuple[object, ...], PipelineTrial] = {}
    for trial in others:
        distinct.setdefault((trial.pp_ranks, trial.microbatches, trial.schedule), trial)
    return [trial for trial in distinct.values() if trial.seconds >= best.seconds][:NEXT]


def _ms(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


__all__ = ["UNBOUNDED", "describe_trial", "note_of", "pipeline_summary", "predicted"]

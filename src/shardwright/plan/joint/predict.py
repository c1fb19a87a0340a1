"""What a plan file says about a pipeline: the predicted step time and where it goes, the stages, the runners-up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...cluster import Cluster
from ...cost import TrainingSetup
from ...ir import Graph
from ...memory import MemoryPeak
from ..auto import SearchResult
from ..digest import stored_bytes
from .candidates import PipelineTrial
from .planner import JointResult, PipelineResult
from .solved_stages import SolvedPipeline, layers_of_part

NEXT = 6
"""Runners-up that a plan file names."""

KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers", "inputs")


def predicted(outcome: JointResult, cluster: Cluster, training: TrainingSetup, graph: Graph) -> dict[str, Any]:
    """The prediction for a plan that is a pipeline."""
    assert outcome.pipeline is not None
    result, flat = outcome.pipeline, outcome.flat
    trial, solved = result.trial, result.solved
    worst = max(range(len(trial.pp_ranks)), key=lambda pp_rank: result.memory[pp_rank].peak / result.room(pp_rank))
    peak = result.memory[worst]
    return {
        "for": made_for(cluster, training, graph),
        "seconds": _short(trial.seconds),
        "bound": _short(outcome.bound),
        "gap": _short(outcome.gap),
        "stopped": result.piped.stopped,
        "compute": _short(_mean(trial, "compute")),
        "blocking": _short(_mean(trial, "waited")),
        "exposed": _short(trial.seconds - _mean(trial, "compute") - _mean(trial, "waited") - trial.once),
        "update": _short(trial.once),
        "stored": {how: int(size) for how, size in stored_bytes(graph, outcome.plan.storage).items()},
        "pipeline": {
            "bubble": _short(trial.bubble),
            "balance": _short(trial.balance),
            "messages": _short(trial.microbatches * max(trial.links, default=0.0)),
            "stages": [_stage(result, number) for number in range(len(trial.parts))],
            "flat": _flat(flat, trial),
            "others": [
                {"text": describe_trial(other, solved.names), "seconds": _short(other.seconds)}
                for other in _distinct(result.piped.others, trial)
            ],
            "tried": result.piped.tried,
            "pruned": result.piped.pruned,
        },
        "memory": {"peak": int(peak.peak), **{kind: int(getattr(peak, kind)) for kind in KINDS}},
        "at": {"phase": peak.at[1], "op": peak.at[0]},
        "limit": int(result.room(worst)),
    }


def made_for(cluster: Cluster, training: TrainingSetup, graph: Graph) -> dict[str, Any]:
    large = any(output.value is not None and graph.values[output.value].shape for output in graph.outputs)
    return {
        "cluster": str(cluster),
        "batch": graph.batch,
        "optimizer": training.optimizer,
        "compute": training.compute,
        "reduce": training.reduce,
        "masters": training.masters,
        "precision": training.precision_name,
        "accumulate": training.accumulate,
        "replica_axes": [],
        "outputs": "all" if large else "scalars",
    }


def pipeline_summary(outcome: JointResult) -> dict[str, Any]:
    """What a flat plan says about the pipelines that were tried."""
    piped, flat = outcome.piped, outcome.flat
    if piped is None or flat is None:
        return {}
    best = piped.best
    names = {} if best is None else {best.pp_ranks[0].names[1]: "tp"}
    return {
        "bound": _short(outcome.bound),
        "gap": _short(outcome.gap),
        "pipelines": {
            "best": None if best is None else {"text": describe_trial(best, names), "seconds": _short(best.seconds)},
            "bound": _short(min(piped.bound, 1e12)),
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


def _stage(result: PipelineResult, number: int) -> dict[str, Any]:
    solved, trial, part = result.solved, result.trial, result.trial.parts[number]
    devices = solved.pp_rank(number).devices
    return {
        "devices": f"{devices[0]}-{devices[-1]}" if len(devices) > 1 else str(devices[0]),
        "mesh": str(solved.mesh(number)),
        "layers": layers_of_part(solved.parts[number]),
        "recompute": len(solved.recompute(number)),
        "forward": _short(part.forward),
        "backward": _short(part.backward),
        "weight": _short(part.weight),
        "blocking": _short(part.waited),
        "once": _short(part.once),
        "enters": _short(trial.links[number - 1]) if number else 0.0,
        "memory": int(result.memory[trial.holders[number]].peak),
    }


def _flat(flat: SearchResult | None, trial: PipelineTrial) -> dict[str, Any] | None:
    if flat is None:
        return None
    return {
        "mesh": str(flat.plan.mesh),
        "seconds": _short(flat.best.time),
        "ratio": _short(flat.best.time / trial.seconds),
    }


def _distinct(others: Sequence[PipelineTrial], best: PipelineTrial) -> list[PipelineTrial]:
    """The fastest of those that differ from the best, and from each other, in more than the schedule."""
    distinct: dict[tuple[object, ...], PipelineTrial] = {}
    for trial in others:
        distinct.setdefault((trial.pp_ranks, trial.microbatches, trial.schedule), trial)
    return [trial for trial in distinct.values() if trial.seconds >= best.seconds][:NEXT]


def _mean(trial: PipelineTrial, what: str) -> float:
    """Mean seconds of a step that a pipeline rank computes, or waits for communication inside a stage."""
    total = sum(trial.busy) if what == "compute" else 0.0
    waited = sum(part.waited for part in trial.parts)
    return trial.microbatches * (total - waited if what == "compute" else waited) / len(trial.pp_ranks)


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _ms(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


__all__ = ["MemoryPeak", "SolvedPipeline", "describe_trial", "note_of", "pipeline_summary", "predicted"]

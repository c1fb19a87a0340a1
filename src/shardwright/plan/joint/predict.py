"""What a plan file says of a pipeline: the time of a step and where it goes, the stages, what almost won."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...cluster import Cluster
from ...cost import MemoryPeak, TrainingSetup
from ...ir import Graph
from ..auto import SearchResult
from ..digest import stored_bytes
from .planner import JointResult, PipelineResult
from .solved import SolvedPipeline, layers_of_part
from .trial import PipelineTrial

NEXT = 6
"""Other pipelines that a plan file names."""

KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers", "inputs")


def predicted(outcome: JointResult, cluster: Cluster, training: TrainingSetup, graph: Graph) -> dict[str, Any]:
    """Of a plan that is a pipeline."""
    assert outcome.pipeline is not None
    found, flat = outcome.pipeline, outcome.flat
    trial, made = found.trial, found.made
    worst = max(range(len(trial.pp_ranks)), key=lambda pp_rank: found.memory[pp_rank].peak / found.room(pp_rank))
    held = found.memory[worst]
    return {
        "for": made_for(cluster, training, graph),
        "seconds": _short(trial.seconds),
        "estimate": _short(min(found.piped.bound, trial.seconds)),  # of the best that was looked at; no proof
        "stopped": found.piped.stopped,
        "compute": _short(_mean(trial, "compute")),
        "waited": _short(_mean(trial, "waited")),
        "exposed": _short(trial.seconds - _mean(trial, "compute") - _mean(trial, "waited") - trial.once),
        "update": _short(trial.once),
        "stored": {how: int(size) for how, size in stored_bytes(graph, outcome.plan.storage).items()},
        "pipeline": {
            "bubble": _short(trial.bubble),
            "balance": _short(trial.balance),
            "messages": _short(trial.microbatches * max(trial.links, default=0.0)),
            "stages": [_stage(found, number) for number in range(len(trial.parts))],
            "flat": _flat(flat, trial),
            "others": [
                {"said": describe_trial(other, made.names), "seconds": _short(other.seconds)}
                for other in _distinct(found.piped.others, trial)
            ],
            "looked": found.piped.looked,
            "left": found.piped.left,
        },
        "memory": {"peak": int(held.peak), **{kind: int(getattr(held, kind)) for kind in KINDS}},
        "at": {"phase": held.at[1], "op": held.at[0]},
        "limit": int(found.room(worst)),
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
        "rows": [],
        "outputs": "all" if large else "scalars",
    }


def beside(outcome: JointResult) -> dict[str, Any]:
    """What a flat plan says of the pipelines that were looked at."""
    piped, flat = outcome.piped, outcome.flat
    if piped is None or flat is None:
        return {}
    best = piped.best
    names = {} if best is None else {best.pp_ranks[0].names[1]: "tp"}
    return {
        "pipelines": {
            "best": None if best is None else {"said": describe_trial(best, names), "seconds": _short(best.seconds)},
            "estimate": _short(min(piped.bound, 1e12)),
            "looked": piped.looked,
            "left": piped.left,
            "stopped": piped.stopped,
        }
    }


def note_of(outcome: JointResult) -> str:
    """How the two kinds of plans compare, in words."""
    flat, found, piped = outcome.flat, outcome.pipeline, outcome.piped
    if found is not None:
        if flat is None:
            return "without a pipeline nothing was found that fits"
        gain = flat.best.time / found.trial.seconds - 1.0
        return f"the best plan without a pipeline ({flat.plan.mesh}) takes {_ms(flat.best.time)}, {gain:.1%} more"
    if piped is None or flat is None:
        return ""
    if piped.best is not None and piped.best.seconds >= flat.best.time:
        more = piped.best.seconds / flat.best.time - 1.0
        best = piped.best
        return (
            f"the best pipeline that was tried ({describe_trial(best, {})}) takes {_ms(best.seconds)}, {more:.1%} more"
        )
    return f"of {piped.looked + piped.left} pipelines none is faster"


def describe_trial(trial: PipelineTrial, names: dict[str, str]) -> str:
    """A pipeline in words: "4 stages of 8 (dp=4 x tp=2), 16 microbatches, 1f1b"."""
    return trial.said({trial.pp_ranks[0].names[1]: "tp", **names})


def _stage(found: PipelineResult, number: int) -> dict[str, Any]:
    made, trial, part = found.made, found.trial, found.trial.parts[number]
    devices = made.pp_rank(number).devices
    return {
        "devices": f"{devices[0]}-{devices[-1]}" if len(devices) > 1 else str(devices[0]),
        "mesh": str(made.mesh(number)),
        "layers": layers_of_part(made.parts[number]),
        "recompute": len(made.recompute(number)),
        "forward": _short(part.forward),
        "backward": _short(part.backward),
        "weight": _short(part.weight),
        "waited": _short(part.waited),
        "once": _short(part.once),
        "enters": _short(trial.links[number - 1]) if number else 0.0,
        "memory": int(found.memory[trial.holders[number]].peak),
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
    found: dict[tuple[object, ...], PipelineTrial] = {}
    for trial in others:
        found.setdefault((trial.pp_ranks, trial.microbatches, trial.schedule), trial)
    return [trial for trial in found.values() if trial.seconds >= best.seconds][:NEXT]


def _mean(trial: PipelineTrial, what: str) -> float:
    """Seconds of a step that a seat computes, or waits for communication inside of a stage, on average."""
    total = sum(trial.busy) if what == "compute" else 0.0
    waited = sum(part.waited for part in trial.parts)
    return trial.microbatches * (total - waited if what == "compute" else waited) / len(trial.pp_ranks)


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _ms(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


__all__ = ["MemoryPeak", "SolvedPipeline", "beside", "describe_trial", "note_of", "predicted"]

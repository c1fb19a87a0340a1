"""Memory over a step as curves: of every op where all ranks run one program, else of every step of the schedule."""

from __future__ import annotations

from typing import Any

from ...memory import MemoryOverStep, MemoryPeak, rank_memory_over_step
from ...plan.joint.pipeline_price import PipelinePrice
from ...schedule import SimulatedRun
from .interning import Interned

PHASES = ("forward", "backward", "update")


def memory_curve(memory: MemoryOverStep, names: Interned) -> dict[str, Any]:
    """The worst moment of every op, in bytes."""
    samples = memory.samples
    return {
        "by": "op",
        "ranks": [{
            "name": "every rank", **_constant(memory.peak), "peak": int(memory.peak.peak),
            "phases": [PHASES.index(sample.phase) for sample in samples],
            "names": [names.number(sample.step) for sample in samples],
            "activations": [int(sample.activations) for sample in samples],
            "gradients": [int(sample.gradients) for sample in samples],
            "buffers": [int(sample.buffers) for sample in samples],
        }],
    }  # fmt: skip


def _constant(peak: MemoryPeak) -> dict[str, int]:
    """What is there all the time."""
    return {"parameters": int(peak.parameters), "optimizer": int(peak.optimizer), "inputs": int(peak.inputs)}


def pipeline_curves(price: PipelinePrice, run: SimulatedRun, names: Interned) -> dict[str, Any]:
    """For each pipeline rank, what the steps of its schedule need, and the update."""
    ranks = []
    for number, peak in enumerate(price.memory):
        samples = rank_memory_over_step(run.schedule, number, price.simulated)
        fixed = peak.parameters + peak.optimizer + peak.inputs + peak.gradients
        ranks.append({
            "name": f"pipeline rank {number}", **_constant(peak), "peak": int(peak.peak),
            "phases": [*(0 if sample.step.kind in "PF" else 1 for sample in samples), 2],
            "names": [*(names.number(str(sample.step)) for sample in samples), names.number("optimizer.step")],
            "activations": [*(int(sample.activations) for sample in samples), 0],
            "gradients": [int(peak.gradients)] * (len(samples) + 1),
            "buffers": [*(int(sample.buffers) for sample in samples), max(0, int(peak.update - fixed))],
        })  # fmt: skip
    return {"by": "step of the schedule", "ranks": ranks}

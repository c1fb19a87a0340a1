"""Translate a plan of the original model to the float64 copy that is verified.

A plan belongs to a graph. The graph of the promoted copy has other dtypes and lacks the
casts between floats, hence another fingerprint; every other op has the same name in both,
except that the remaining casts are renumbered.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..ir import Graph, Op
from ..plan import Plan
from ..plan.pipeline import parts_like
from ..plan.request import PlanFile
from ..plan.stages import OpSequence
from ..rules import analyse

CAST = "aten._to_copy.default"


def read(source: Plan | PlanFile, graph: Graph) -> Plan:
    """Read the plan; refuse it if it was not made for this graph."""
    known = source if isinstance(source, Plan) else source.load(graph)
    known.check_against(graph)
    return known


@dataclass(frozen=True, kw_only=True)
class PlanOfOriginal:
    """A plan of the original model, read for the copy that is verified."""

    plan: Plan
    graph: Graph

    def load(self, graph: Graph) -> Plan:
        return rebind(self.plan, self.graph, graph)


def rebind(plan: Plan, old: Graph, new: Graph) -> Plan:
    """The plan of `old` for the promoted graph `new`."""
    known = plan.choices(old.entry)
    names = {op.name: op.name for op in new.ops if op.target != CAST and op.name in old.by_name}
    names.update(_match_casts(old, new))
    choices = {name: known.get(before, {}) for name, before in names.items()}
    stages = plan.entries[old.entry]
    if len(stages) == 1:
        parts: tuple[tuple[str, ...], ...] = (tuple(choices),)
    else:
        storage_options = {name: number for number, stage in enumerate(stages) for name in stage.choices}
        parts = parts_like(
            OpSequence(analyse(new)), {name: storage_options[before] for name, before in names.items()}, len(stages)
        )
    planned = tuple(
        replace(stage, choices={name: choices.get(name, {}) for name in part})
        for stage, part in zip(stages, parts, strict=True)
    )
    return replace(plan, entries={new.entry: planned}, fingerprints={new.entry: new.fingerprint})


def _match_casts(old: Graph, new: Graph) -> dict[str, str]:
    """For each cast of the promoted graph its original, in the order of their module."""
    matches: dict[str, str] = {}
    for stem in {_stem(op) for op in new.ops if op.target == CAST}:
        after = [op.name for op in new.ops if op.target == CAST and _stem(op) == stem]
        before = [op.name for op in old.ops if op.target == CAST and _stem(op) == stem and not _dropped(op, old)]
        if len(after) == len(before):
            matches.update(zip(after, before, strict=True))
    return matches


def _stem(op: Op) -> str:
    return op.name.split(" / ")[0] if " / " in op.name else ""


def _dropped(op: Op, graph: Graph) -> bool:
    """Whether promotion drops a cast: one from float to float."""
    return graph.values[op.inputs[0]].floating and graph.values[op.outputs[0]].floating

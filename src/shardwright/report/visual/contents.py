"""All that a report shows of one plan, as data: from the plan file alone, and with the model's graph the rest.

Every number is one that `sw.explain` shows or adds up to: those of the plan file, the tables that priced it
(`price_plan`), the memory simulation, the simulated schedule, the lowered programs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...ir import Graph
from ...lower import LoweredProgram
from ...memory import memory_over_step
from ...plan import Plan
from ...plan.joint import price_plan
from ...plan.joint.pipeline_price import PipelinePrice
from ...plan.lowering import lower, lower_pipeline
from ...plan.price import PlanPrice
from ...probe import probing
from ...rules import Analysis, analyse
from ..conditions import made_for, spelled_out
from ..explain import MeasuredSteps
from .code import code_of
from .interning import Interned, LayoutTable
from .memory import memory_curve, pipeline_curves
from .numbers import nodes_of, plan_numbers
from .phases import phases_of
from .timeline import drawn_run, flat_timeline, pipeline_timeline, with_details
from .tree import TreeBuilder, choices_tree

WITHOUT_MODEL = (
    "Made from the plan file alone. With the model (--model FILE.py:FUNCTION, or a graph) the report also has each "
    "op's shapes, layouts and cost, memory over the step, what runs inside of forward and backward, and the source "
    "beside the generated code."
)


def plan_contents(plan: Plan, entry: str, measured: MeasuredSteps | None = None) -> dict[str, Any]:
    """What the plan file has."""
    contents = {**plan_numbers(plan, entry, measured), "nodes": nodes_of(plan), "missing": WITHOUT_MODEL}
    predicted = plan.predicted.get(entry)
    if predicted is not None and "pipeline" in predicted:
        contents["timeline"] = pipeline_timeline(plan, entry, drawn_run(plan, entry))
    storage = {key: ", ".join(f"{stored.title} over {axis}" for axis in stored.axes) or stored.title
               for key, stored in plan.storage.items()}  # fmt: skip
    return {**contents, "tree": choices_tree(plan.choices(entry), storage)}


def model_contents(plan: Plan, graph: Graph, measured: MeasuredSteps | None = None) -> dict[str, Any]:
    """What the plan file has, and what follows from the model."""
    spelled, graph = spelled_out(plan, graph)
    contents = {**plan_numbers(plan, graph.entry, measured), "nodes": nodes_of(plan)}
    return {**contents, **ModelContents.read(spelled, graph).as_json()}


@dataclass(frozen=True, kw_only=True)
class ModelContents:
    """A plan with its programs and its price."""

    plan: Plan
    graph: Graph
    programs: tuple[LoweredProgram, ...]
    price: PlanPrice | PipelinePrice
    overlap: float

    @staticmethod
    def read(plan: Plan, graph: Graph) -> ModelContents:
        analysis: Analysis = analyse(graph, probing())
        conditions = made_for(plan, graph.entry, None, None)
        price = price_plan(
            analysis, conditions.cluster, conditions.training, plan, replica_axes=conditions.replica_axes,
            limit=conditions.limit,
        )  # fmt: skip
        staged = plan.is_pipeline
        programs = lower_pipeline(graph, plan, analysis).programs if staged else (lower(graph, plan, analysis),)
        return ModelContents(plan=plan, graph=graph, programs=programs, price=price, overlap=conditions.cluster.overlap)

    def as_json(self) -> dict[str, Any]:
        plan, entry = self.plan, self.graph.entry
        names, layouts, sources = Interned(), LayoutTable(), Interned()
        builder = TreeBuilder(plan, self.graph, layouts, sources)
        for number, (program, stage) in enumerate(zip(self.programs, plan.entries[entry], strict=True)):
            builder.add(program, stage.choices, number)
        price = self.price
        tables = [stage.priced for stage in price.stages] if isinstance(price, PipelinePrice) else [price.priced]
        details = [phases_of(priced, self.graph, self.overlap) for priced in tables]
        if isinstance(price, PipelinePrice):
            run = drawn_run(plan, entry)
            timeline, memory = pipeline_timeline(plan, entry, run), pipeline_curves(price, run, names)
        else:
            timeline = flat_timeline(details[0], price.training.accumulate)
            lowered = price.priced.tables.program(plan.choices(entry), plan.storage, plan.entries[entry][0].recompute)
            traits = price.priced.tables.moves.traits
            memory = memory_curve(memory_over_step(lowered, price.training, traits), names)
        for priced in tables:
            builder.price(priced, 1.0 / (price.pp_ranks if isinstance(price, PipelinePrice) else 1))
        timeline = with_details(timeline, details, names)
        tree, rows = builder.finish(names)
        return {
            "timeline": timeline, "curves": memory, "tree": tree, "names": names.items, "rowOf": rows,
            "layouts": layouts.items, "inputs": builder.inputs.items, "texts": builder.texts.items,
            "sources": sources.items,
            "code": code_of(self.graph, self.programs),
        }  # fmt: skip

"""Emitted text of the zoo, made once a session."""

from __future__ import annotations

from functools import lru_cache

from shardwright.emit import emit
from shardwright.lower import LoweredProgram
from shardwright.plan import build_plan, parse_plan_string
from shardwright.plan.lowering import lower, lower_pipeline
from shardwright.plan.pipeline import build_pipeline
from shardwright.rules import analyse
from tests.plan.graphs import analysis_of, deep_gpt, graph_of


@lru_cache
def text_of(plan: str, name: str = "gpt", batch: int = 4) -> str:
    return emit(lowered(plan, name, batch)).text


def lowered(plan: str, name: str = "gpt", batch: int = 4) -> LoweredProgram:
    graph, analysis = graph_of(name, batch), analysis_of(name, batch)
    return lower(graph, build_plan(graph, parse_plan_string(plan), analysis), analysis)


@lru_cache
def pipeline_texts(plan: str, microbatches: int, name: str = "gpt", batch: int = 4) -> tuple[str, ...]:
    """The file of each stage."""
    graph, analysis = graph_of(name, batch), analysis_of(name, batch)
    drawn = build_pipeline(graph, parse_plan_string(plan), analysis, "", microbatches)
    return tuple(emit(program).text for program in lower_pipeline(graph, drawn, analysis).programs)


def deep_text(plan: str, layers: int) -> str:
    graph = deep_gpt(layers)
    analysis = analyse(graph)
    return emit(lower(graph, build_plan(graph, parse_plan_string(plan), analysis), analysis)).text

"""Graphs of the zoo, captured once a session."""

from __future__ import annotations

from functools import lru_cache

import torch

from shardwright.capture import capture
from shardwright.compile import copy_to_meta
from shardwright.ir import Graph
from shardwright.rules import Analysis, analyse
from tests.models.transformer import Transformer, TransformerConfig
from tests.models.zoo import ZOO


@lru_cache
def graph_of(name: str, batch: int = 4) -> Graph:
    case = ZOO[name](batch=batch)
    return capture(copy_to_meta(case.module), case.args, case.kwargs).graph


@lru_cache
def analysis_of(name: str, batch: int = 4) -> Analysis:
    return analyse(graph_of(name, batch))


@lru_cache
def deep_gpt(layers: int) -> Graph:
    """A GPT of many layers; nothing is allocated."""
    with torch.device("meta"):
        module = Transformer(TransformerConfig(vocab=64, seq=12, d=32, n_layer=layers))
        idx = torch.zeros(4, 12, dtype=torch.long)
    return capture(module, (idx, idx.clone()), {}).graph

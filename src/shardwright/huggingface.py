"""Models of transformers that are too large for one rank: made without values, each rank reads its part.

    model = empty_model("folder")                     # parameters on meta
    model, optimizer = sw.parallelize(model, optimizer, example=batch)
    load_weights("folder", model)                     # shardwright.checkpoint: every rank its shards

Needs the package `transformers`. See docs/huggingface.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

try:
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
except ImportError as error:
    raise ImportError('sw.empty_model needs transformers: pip install "shardwright[hf]"') from error


def empty_model(source: str | Path | PreTrainedConfig, kind: Any = AutoModelForCausalLM, **options: Any) -> Any:
    """The model that a folder or a config describes, with its parameters on meta and its buffers with values.

    kind        a model class, or one of the Auto classes
    options     further arguments of the config (dtype="bfloat16", attn_implementation="sdpa")
    """
    config = source if isinstance(source, PreTrainedConfig) else AutoConfig.from_pretrained(source)
    with empty_parameters():
        return kind._from_config(config, **options) if hasattr(kind, "_from_config") else kind.from_config(
            config, **options
        )  # fmt: skip


@contextmanager
def empty_parameters() -> Iterator[None]:
    """Within this, parameters of modules are made on meta. Buffers are made as ever, since no file has all of them."""
    register = nn.Module.register_parameter

    def register_empty(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_empty  # type: ignore[method-assign]
    try:
        with torch.no_grad():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


__all__ = ["empty_model", "empty_parameters"]

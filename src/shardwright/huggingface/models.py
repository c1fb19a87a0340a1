"""Models without values, that each rank fills with its part, and ordinary models again, with all of them.

    model = empty_model("folder")                     # parameters on meta
    model, optimizer = sw.parallelize(model, optimizer, example=batch)
    load_weights("folder", model)                     # shardwright.checkpoint: every rank its shards

    ordinary = without_values(model)                  # before parallelize: a copy with parameters on meta
    fill(ordinary, compiled.full_state_dict())        # then: generate, merge adapters, save_pretrained
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig


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


def without_values(model: nn.Module) -> Any:
    """A copy of a model with its parameters on meta and its buffers with values: no memory to speak of."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    return copy.deepcopy(model, memo)


def fill(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give a model from `without_values` its values, without copying them."""
    trained = {key: parameter.requires_grad for key, parameter in model.named_parameters(remove_duplicate=False)}
    tied: dict[int, nn.Parameter] = {}
    for key, parameter in list(model.named_parameters(remove_duplicate=False)):
        if id(parameter) not in tied:
            tied[id(parameter)] = nn.Parameter(values[key], requires_grad=trained[key])
        path, _, name = key.rpartition(".")
        model.get_submodule(path)._parameters[name] = tied[id(parameter)]
    for key, buffer in model.named_buffers():
        if key in values:
            buffer.copy_(values[key])

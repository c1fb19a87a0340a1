"""Models without values, that each rank fills with its part, and ordinary models again, with all of them.

    model = empty_model("folder")                     # parameters on meta
    model, optimizer = sw.parallelize(model, optimizer, example=batch)
    load_weights("folder", model)                     # shardwright.checkpoint: every rank its shards

    ordinary = without_values(model)                  # before parallelize: a copy with parameters on meta
    save_adapters("folder", ordinary, compiled)       # of PEFT, without gathering anything else
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

try:
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
except ImportError as error:
    raise ImportError('sw.empty_model needs transformers: pip install "shardwright[hf]"') from error

from ..checkpoint import full_weights
from ..runtime.world import here


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


def save_adapters(path: str | Path, ordinary: Any, compiled: nn.Module) -> None:
    """`save_pretrained` of a PEFT model, which writes the adapters alone. All ranks call it.

    ordinary   the PEFT model from `without_values`, whose names say what belongs to its adapters
    compiled   the compiled model, which has their values: they are gathered, and nothing else is
    """
    keys = _adapter_keys(ordinary)
    if keys is None:  # what is saved is computed from the parameters, as prompts are
        ordinary = without_values(ordinary)
        fill(ordinary, compiled.full_state_dict())  # type: ignore[operator]
    values = None if keys is None else full_weights(compiled, keys)
    if here().rank == 0:
        ordinary.save_pretrained(str(path), state_dict=values)


def _adapter_keys(ordinary: Any) -> list[str] | None:
    """The keys whose values PEFT saves; None if it saves anything else."""
    from peft import get_peft_model_state_dict

    if any(config.is_prompt_learning for config in ordinary.peft_config.values()):
        return None
    state = ordinary.state_dict()
    keys = {id(value): key for key, value in state.items()}
    saved: list[str | None] = []
    for name in ordinary.peft_config:
        part = get_peft_model_state_dict(ordinary, state_dict=state, adapter_name=name)
        saved += [keys.get(id(value)) for value in part.values()]
    return None if None in saved else sorted({key for key in saved if key is not None})

"""What may go into `sw.parallelize`: an ordinary module, and optimizers of its parameters.

Wrappers of other libraries come off where nothing is lost by it (torch.compile), and are refused where the module
inside can't know what they did (DDP, FSDP, accelerate). All faults are reported at once. Nothing here changes
what it looks at.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .errors import InputError, raise_all
from .runtime.model.overrides import structure_faults
from .runtime.model.wrappers import Unwrappable, wrapper_of
from .runtime.parameters.replaced import ReplacedParameter
from .runtime.parameters.sharded import ShardedParameter

SHOWN = 6  # names in a message


def unwrapped(model: nn.Module) -> nn.Module:
    """The module to compile: the model itself, or what torch.compile was put around. What can't be compiled raises."""
    if not isinstance(model, nn.Module):
        raise InputError(f"the model is a {type(model).__name__}; pass an nn.Module, with its parameters in it")
    inner = getattr(model, "_orig_mod", None)
    if isinstance(inner, nn.Module) and wrapper_of(model) is not None:
        warnings.warn(
            "the model went through torch.compile, which is dropped: the module inside of it is compiled instead, and "
            "keys of state dicts have no _orig_mod. in front. Pass that module to hear no more of this",
            stacklevel=4,  # the user's line: this function, the public one, and what refuses moved keywords around it
        )
        model = inner
    faults = [*structure_faults(model)] or [*_module_faults(model), *_tensor_faults(model)]
    raise_all(InputError, f"{type(model).__name__} can't be compiled as it is:", faults)
    return model


def _module_faults(model: nn.Module) -> Iterator[str]:
    for path, module in model.named_modules():
        name = f"{path or 'the model'} is a {type(module).__name__}"
        wrapper = wrapper_of(module)
        if isinstance(module, Unwrappable):
            yield f"{path or 'the model'} is compiled already; pass the original, or a copy of it made before"
        elif wrapper is not None:
            yield f"{name}: {wrapper[1]}; pass the module inside of it"
        elif hasattr(module, "_hf_hook") or getattr(module, "_is_accelerate_prepared", False):
            yield f"{name} that accelerate has prepared or placed; leave it out of accelerator.prepare and device_map"
        elif type(module).__module__.startswith("torch.ao.nn.quantized"):
            yield f"{name}, which is quantized, and has no parameters to train; parallelize before it is converted"


def _tensor_faults(model: nn.Module) -> Iterator[str]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    stale = (tensor.fault() for _, tensor in tensors if isinstance(tensor, ReplacedParameter))
    yield from (fault for fault in [next(filter(None, stale), None)] if fault is not None)  # one stands for all
    for path, tensor in tensors:
        if nn.parameter.is_lazy(tensor):
            yield f"{path} has no shape yet, since it is lazy; call the model once, then make the optimizer"
        elif isinstance(tensor, ShardedParameter | DTensor):
            yield f"{path} is a {type(tensor).__name__}, a part of a tensor; pass a model with whole parameters"
        elif tensor.layout != torch.strided:
            yield f"{path} is sparse ({tensor.layout}); keep it dense"
        elif is_traceable_wrapper_subclass(tensor) or not _behaves_plainly(tensor):
            yield f"{path} is a {type(tensor).__name__}, which has ops of its own; use plain parameters"


def _behaves_plainly(tensor: Tensor) -> bool:
    """Whether torch's functions do to a tensor what they do to all."""
    plain = {_function_of(kind) for kind in (Tensor, nn.Parameter, ReplacedParameter)}
    return _function_of(type(tensor)) in plain


def _function_of(kind: Any) -> Any:
    return getattr(kind.__torch_function__, "__func__", kind.__torch_function__)


# -- optimizers --------------------------------------------------------------------------------


def check_optimizers(model: nn.Module, optimizers: Sequence[Any], per_replica: bool) -> None:
    """Whether each optimizer trains the model. What none of them trains, and what is not the model's, is said."""
    names = {id(parameter): key for key, parameter in model.named_parameters()}
    reached: set[int] = set()
    for optimizer in optimizers:
        own = _parameters_of(optimizer)
        reached |= own.keys()
        _check_shared(own, names, type(optimizer).__name__)
        strange = [tuple(parameter.shape) for number, parameter in own.items() if number not in names]
        if strange and per_replica:
            raise InputError(
                f"{type(optimizer).__name__} has {len(strange)} parameters that are not the model's (shapes "
                f'{strange[:SHOWN]}), and with inputs="per_replica" their gradients are those of one replica; put '
                'what they belong to into the model, or pass inputs="global"'
            )
    left = [
        key for key, parameter in model.named_parameters() if parameter.requires_grad and id(parameter) not in reached
    ]
    if optimizers and left:
        more = f" and {len(left) - SHOWN} more" if len(left) > SHOWN else ""
        warnings.warn(
            f"no optimizer that was passed trains {', '.join(left[:SHOWN])}{more}. If another one does, pass all of "
            "them, as a list: sw.parallelize(model, [first, second]); if none shall, set requires_grad = False",
            stacklevel=4,  # the user's line: this function, the public one, and what refuses moved keywords around it
        )


def _parameters_of(optimizer: Any) -> dict[int, Any]:
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, Optimizer):
        raise InputError(f"{type(optimizer).__name__} is around a {type(inner).__name__}; pass that (.optimizer)")
    kind = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise InputError(f"the optimizer is a {kind}; pass a torch.optim.Optimizer, or a list of them")
    if kind == "ZeroRedundancyOptimizer":
        raise InputError(f'{kind} shards state by itself; pass an ordinary optimizer and plan="zero1=N"')
    return {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}


def _check_shared(own: dict[int, Any], names: dict[int, str], kind: str) -> None:
    if own and not own.keys() & names.keys():
        compiled = any(isinstance(parameter, ShardedParameter) for parameter in own.values())
        why = "it was passed to parallelize before" if compiled else "it was made of another model, or of a copy"
        raise InputError(
            f"{kind} has no parameter of the model, so that it would train nothing: {why}; make it of the parameters "
            f"of the model that is passed, {kind}(model.parameters(), ...)"
        )

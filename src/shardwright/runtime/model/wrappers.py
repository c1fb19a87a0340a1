"""What other libraries wrap around a module, and a module that refuses to be wrapped.

A compiled model holds shards, a process group per axis and programs for its calls. A wrapper that takes it for an
ordinary module breaks it silently: DDP broadcasts rank 0's shards over those of the others, FSDP shards them again,
a copy or a pickle shares what can't be shared. A module can't see who wraps it, so each wrapper is caught where it
has to pass:


    wrapper                                    where it is caught
    ----------------------------------------   ------------------------------------------------------------------
    DDP, DataParallel, torch.compile,          torch calls a hook whenever a module is added to another
    accelerate, DeepSpeed, around it or
    around a module that contains it
    FSDP                                       marks every module that it manages before it flattens parameters
    fully_shard, replicate                     torch records what was applied in the module, and checks it first
    copy.deepcopy, pickle, module.compile()    methods of the module
    accelerator.prepare of it or its           accelerate asks first whether they are prepared
    optimizer, on one process too
    a call from compiled code                  torch has a frame callback then
    half(), to(device), ...                    `_apply`, which they all call
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY

from shardwright.errors import InputError

from ..parameters.local_ops import INSTEAD
from ..parameters.sharded import ShardedParameter

WRAPPERS = {
    ("torch", "DistributedDataParallel"): 'use plan="dp=N" instead',
    ("torch", "FullyShardedDataParallel"): 'use plan="zero3=N" instead',
    ("torch", "FSDPModule"): 'it is wrapped by fully_shard; use plan="zero3=N" instead',
    ("torch", "DataParallel"): 'use plan="dp=N" instead, with a process per device',
    ("torch", "OptimizedModule"): "it comes from torch.compile; call module.compile() instead, or leave it out",
    ("torch", "ScriptModule"): "it comes from torch.jit, which keeps no Python to compile; pass the original module",
    ("deepspeed", "DeepSpeedEngine"): "use a plan that shards state: zero1, zero2, zero3",
}
"""(package, class) of wrappers, with what to do instead."""


def wrapper_of(module: object) -> tuple[str, str] | None:
    """The class of a wrapper and what to do instead, if a module is one."""
    for kind in type(module).__mro__:
        remedy = WRAPPERS.get((kind.__module__.partition(".")[0], kind.__name__))
        if remedy is not None:
            return kind.__name__, remedy
    return None


class _NeverPrepared:
    """What accelerate finds as `_is_accelerate_prepared` of a model or an optimizer, and asks before it prepares it."""

    def __bool__(self) -> NoReturn:
        raise InputError(
            "accelerator.prepare can't take a compiled model or its optimizer: sw.parallelize has put the model on its "
            "devices and keeps its ranks in sync, and a scheduler that accelerate prepares makes a step for every "
            "rank. Leave the model, the optimizer and the scheduler out of accelerator.prepare (docs/huggingface.md)"
        )


def refuse_prepare(optimizers: Sequence[Any]) -> None:
    """Have accelerate find that these optimizers can't be prepared."""
    for optimizer in optimizers:
        optimizer._is_accelerate_prepared = _NeverPrepared()


class Unwrappable(nn.Module):
    """A module that refuses to be wrapped, copied, pickled and cast, each with a remedy."""

    _is_accelerate_prepared: Any = _NeverPrepared()

    def __init__(self) -> None:
        super().__init__()
        _watch_registration()
        self.__dict__[STATE_KEY] = _NoOtherAPI()
        self.__dict__[REGISTRY_KEY] = {"fully_shard": None}  # so that `replicate` of an outer module leaves this alone

    @property
    def _is_fsdp_managed_module(self) -> bool:
        return False

    @_is_fsdp_managed_module.setter
    def _is_fsdp_managed_module(self, value: bool) -> None:
        _refuse_around("FullyShardedDataParallel", WRAPPERS["torch", "FullyShardedDataParallel"])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if get_eval_frame_callback() is not None:  # called from code compiled by torch.compile
            _refuse_around("torch.compile", "torch.compiler.disable a function that makes the call")
        return super().__call__(*args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse_around("torch.compile", "leave it out")

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise InputError(
            "a compiled model can't be copied: its shards are tied to process groups and programs. For an EMA of "
            "the weights use shardwright.ema.EMA(model); to keep the best so far, "
            "copy.deepcopy(model.state_dict()); for a second model, copy the original before parallelize"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise InputError(f"a compiled model can't be pickled: this rank has its own part of it. {INSTEAD}")

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Programs are compiled for the dtypes of the parameters, and shards are on the device of their rank."""
        compiled = any(isinstance(parameter, ShardedParameter) for parameter in self.parameters())
        for dtype, device in {(tensor.dtype, tensor.device) for tensor in (*self.parameters(), *self.buffers())}:
            now = fn(torch.empty(0, dtype=dtype, device=device))
            if now.dtype != dtype and compiled:
                raise InputError(
                    f"the model is compiled for parameters in {dtype}, and was cast to {now.dtype}; cast it before "
                    "parallelize, or pass precision= to it (docs/precision.md)"
                )
            if now.device != device and compiled:
                raise InputError(
                    f"the compiled model is on {device}, the device of this rank, and can't be moved to {now.device}; "
                    "leave that out"
                )
        if compiled:  # everything is there already
            return self
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]


class _NoOtherAPI(dict[Any, Any]):
    """Torch's registry of `fully_shard`, `replicate` and the like in a module, which it checks before applying one."""

    def __contains__(self, api: Any) -> NoReturn:
        _refuse_around(api.__name__, 'use plan="zero3=N" or "dp=N" instead')


@functools.cache
def _watch_registration() -> None:
    """Check whenever a module is added to another, from the first compiled model on."""
    nn.modules.module.register_module_module_registration_hook(_look)


def _look(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    wrapper = wrapper_of(parent)
    if wrapper is not None and child is not None and any(isinstance(part, Unwrappable) for part in child.modules()):
        _refuse_around(*wrapper)


def _refuse_around(wrapper: str, remedy: str) -> NoReturn:
    raise InputError(
        f"{wrapper} can't be put around a compiled model or a module with compiled parts: ranks hold shards, which "
        f"sw.parallelize keeps in sync already ({remedy}). Leave it out, and with accelerate leave the model and its "
        "optimizer out of accelerator.prepare"
    )

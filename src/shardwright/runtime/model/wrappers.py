"""What other libraries put around a module, and a module that none of it may be put around.

A compiled model holds pieces, a process group for each axis and programs for its calls. A wrapper that takes it for an
ordinary module breaks it in silence: DDP broadcasts rank 0's pieces over those of the others, FSDP cuts pieces again,
a copy or a pickle shares what can't be shared. A module can't see who wraps it, so each way is met where it must
come by:

    way                                        where it is met
    ----------------------------------------   ------------------------------------------------------------------
    DDP, DataParallel, torch.compile,          torch tells, by a hook, whenever a module becomes a part of another
    accelerate, DeepSpeed, around it or
    around a module that has it as a part
    FSDP                                       marks every module that it manages before it flattens parameters
    fully_shard, replicate                     torch keeps what was applied in the module, and looks there before
    copy.deepcopy, pickle, module.compile()    methods of the module
    a call from what torch.compile made        torch has a callback for frames then
    half(), to(device), ...                    `_apply`, which they all come down to
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY

from shardwright.errors import InputError

from ..parameters.local_ops import INSTEAD
from ..parameters.sharded import ShardedParameter

WRAPPERS = {
    ("torch", "DistributedDataParallel"): 'plan="dp=N" is what it does',
    ("torch", "FullyShardedDataParallel"): 'plan="zero3=N" is what it does',
    ("torch", "FSDPModule"): 'fully_shard made it; plan="zero3=N" is what it does',
    ("torch", "DataParallel"): 'plan="dp=N" is what it does, with a process for each device',
    ("torch", "OptimizedModule"): "torch.compile made it; call module.compile() instead, or leave it out",
    ("torch", "ScriptModule"): "torch.jit made it, and keeps no Python to compile; pass the module that it is made of",
    ("deepspeed", "DeepSpeedEngine"): "the plan says how state is sharded: zero1, zero2, zero3",
}
"""(package, class) of modules around modules, with what to do instead."""


def wrapper_of(module: object) -> tuple[str, str] | None:
    """The class of a wrapper and what to do instead, if a module is one."""
    for kind in type(module).__mro__:
        remedy = WRAPPERS.get((kind.__module__.partition(".")[0], kind.__name__))
        if remedy is not None:
            return kind.__name__, remedy
    return None


class Unwrappable(nn.Module):
    """A module that refuses to be wrapped, copied, pickled and cast, each with the way to get what was wanted."""

    def __init__(self) -> None:
        super().__init__()
        _watch_registration()
        self.__dict__[STATE_KEY] = _NoOtherAPI()
        self.__dict__[REGISTRY_KEY] = {"fully_shard": None}  # so that `replicate` of what is around leaves this alone

    @property
    def _is_fsdp_managed_module(self) -> bool:
        return False

    @_is_fsdp_managed_module.setter
    def _is_fsdp_managed_module(self, value: bool) -> None:
        _refuse_around("FullyShardedDataParallel", WRAPPERS["torch", "FullyShardedDataParallel"])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if get_eval_frame_callback() is not None:  # something that torch.compile made calls this
            _refuse_around("torch.compile", "torch.compiler.disable a function that makes the call")
        return super().__call__(*args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse_around("torch.compile", "leave it out")

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise InputError(
            "a compiled model can't be copied: its pieces are tied to process groups and programs. For an average of "
            "the weights use shardwright.ema.EMA(model); to keep the best so far, "
            "copy.deepcopy(model.state_dict()); for a second model, copy the original before parallelize"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise InputError(f"a compiled model can't be pickled: this rank has its own part of it. {INSTEAD}")

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Programs are made for the dtypes of the parameters, and pieces are on the device of their rank."""
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
        if compiled:  # all of it is there already
            return self
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]


class _NoOtherAPI(dict[Any, Any]):
    """What torch keeps of `fully_shard`, `replicate` and their like in a module, and looks into before applying one."""

    def __contains__(self, api: Any) -> NoReturn:
        _refuse_around(api.__name__, 'plan="zero3=N" or "dp=N" is what it does')


@functools.cache
def _watch_registration() -> None:
    """Look whenever a module becomes a part of another, from the first compiled model on."""
    nn.modules.module.register_module_module_registration_hook(_look)


def _look(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    wrapper = wrapper_of(parent)
    if wrapper is not None and child is not None and any(isinstance(part, Unwrappable) for part in child.modules()):
        _refuse_around(*wrapper)


def _refuse_around(wrapper: str, remedy: str) -> NoReturn:
    raise InputError(
        f"{wrapper} can't be put around a compiled model or a module with compiled parts: ranks hold pieces, which "
        f"sw.parallelize keeps in step already ({remedy}). Leave it out, and with accelerate leave the model and its "
        "optimizer out of accelerator.prepare"
    )

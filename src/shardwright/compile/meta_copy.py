"""A model without its values: what captures are made of, and what is kept of the user's modules.

copy_to_meta   a copy on meta
thaw           the parameters that are planned for as trained
signature      what a model is made of, to see whether it was changed since
carry          takes an attribute that the user has changed into the skeleton
mask_facts     the values of buffers, which the skeleton has none of, for masks that they hold
fixed_buffers  guards of those that a program goes by
calling        the same module, whose call is one of its methods
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

from ..capture import CapturedGraph, MaskFacts, check_hooks, copy_module, rebind
from ..errors import CaptureError
from ..frozen_values import ABSENT, freeze
from ..runtime.model.fixed_buffers import FixedBuffer
from ..runtime.model.guards import SLOTS
from ..runtime.model.pinned import HOOKS
from ..runtime.model.specialization import ModelCall, RankState
from ..runtime.parameters.sharded import Untouched


def copy_to_meta(module: nn.Module) -> nn.Module:
    """A copy of a module in which parameters and buffers are on meta: what capture needs, and no memory."""
    check_hooks(module)
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        with Untouched():  # of an original that is compiled for the second time
            empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    for part in module.modules():
        for value in vars(part).values():
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:  # computed before forward: weight_norm
                memo[id(value)] = torch.empty_like(value, device="meta")
    return copy_module(module, memo)


def thaw(skeleton: nn.Module, module: nn.Module, trainable: set[int]) -> set[int]:
    """Have gradients for all that was to be trained at any time (`trainable`, by ids): it may be frozen and thawed."""
    trainable |= {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
    for parameter, like in zip(module.parameters(), skeleton.parameters(), strict=True):
        like.requires_grad_(id(parameter) in trainable)
    return trainable


def mask_facts(original: nn.Module | None, call: ModelCall) -> MaskFacts:
    """The values of buffers, as all ranks have them: those of a pipeline's stages are apart once it runs."""
    if original is not None:
        return MaskFacts(buffers=dict(original.named_buffers(remove_duplicate=False)), unpadded=call.unpadded)
    if call.state is None or call.plan is None or call.plan.is_pipeline:
        return MaskFacts(unpadded=call.unpadded)
    return MaskFacts(buffers=call.state.buffers, unpadded=call.unpadded)


def fixed_buffers(state: RankState, captured: CapturedGraph) -> list[FixedBuffer]:
    return [FixedBuffer(key, state.buffers.get) for key in captured.fixed_buffers]


def signature(module: nn.Module, alive: dict[int, Any]) -> list[Hashable]:
    """What a model consists of: submodules, parameters, buffers, hooks and attributes, but not its modes and values.

    `alive` keeps what is known by its id.
    """
    parts: list[Hashable] = []
    for path, part in module.named_modules():
        own = vars(part)
        alive[id(part)] = part
        parts += [path, id(part), id(type(part))]
        for slot in (*SLOTS, *HOOKS):
            for name, inner in own[slot].items():
                alive[id(inner)] = inner
                cast = (inner.dtype, inner.shape) if isinstance(inner, torch.Tensor) else None  # which stays one object
                parts += [slot, name, id(inner), cast]
        rest = {name: inner for name, inner in own.items() if name not in _BARE}
        parts.append(freeze(rest, alive))
    return parts


_BARE = frozenset(vars(nn.Module()))


def carry(skeleton: nn.Module, shown: nn.Module, path: str, name: str, value: Any) -> None:
    """Have an attribute of what the user sees in the skeleton. What it reaches of the one, it reaches of the other."""
    target = vars(skeleton.get_submodule(path))
    if value is ABSENT:
        target.pop(name, None)
        return
    pairs = zip(shown.modules(), skeleton.modules(), strict=False)
    target[name] = rebind(value, {id(seen): part for seen, part in pairs})


_INSIDE = "_shardwright_inside"


def calling(module: nn.Module, method: str) -> nn.Module:
    """A module that shares all it has with another and whose call is a method of it.

    In the method `self(x)` is forward, once: calling the model several times is a loop, which would be unrolled.
    """
    if not method:
        return module
    original = type(module)
    usual = vars(module).get("forward")  # which someone may have replaced

    @functools.wraps(getattr(original, method))
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls = vars(self).get(_INSIDE, 0)
        vars(self)[_INSIDE] = calls + 1
        if calls == 1:
            return usual(*args, **kwargs) if usual is not None else original.forward(self, *args, **kwargs)
        if calls > 1:
            raise CaptureError(f"{method} calls submodules and then the model several times, which would be unrolled")
        try:
            return getattr(self, method)(*args, **kwargs)
        finally:
            vars(self).pop(_INSIDE)

    kind = type(original.__name__, (original,), {"__module__": original.__module__, "forward": forward})
    shell: nn.Module = object.__new__(kind)
    vars(shell).update(vars(module))
    vars(shell).pop("forward", None)
    return shell


def _same(before: Any, after: Any) -> bool:
    """Whether an attribute is what it was. A trace puts lists and dicts back as copies with the same in them."""
    if before is after or type(before) is not type(after):
        return before is after
    if isinstance(before, list | tuple):
        return len(before) == len(after) and all(map(_same, before, after))
    if isinstance(before, dict):
        return list(before) == list(after) and all(_same(before[key], after[key]) for key in before)
    return False


def check_effects(called: nn.Module, skeleton: nn.Module, method: str, captured: CapturedGraph) -> None:
    """Refuse a method that does something besides returning tensors: as a program it would not."""
    if not method:
        return
    name = f"{type(skeleton).__name__}.{method}"
    before, after = vars(skeleton), vars(called)
    own = {key for key in {**before, **after} if not _same(before.get(key, ABSENT), after.get(key, ABSENT))}
    changed = sorted({*own, *captured.left})
    if changed:
        raise CaptureError(
            f"{name} sets {', '.join(f'self.{key}' for key in changed)}, which a program can't; return it instead"
        )
    if all(output.value is None for output in captured.graph.outputs):
        raise CaptureError(
            f"{name} computes with parameters and returns no tensor, so that as a program it would do nothing. What "
            "changes the model has to be done before sw.parallelize; values are loaded with load_state_dict"
        )

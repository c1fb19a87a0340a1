"""The submodules, parameters, buffers and hooks of a compiled model: fixed in its programs.

They can't be changed under a program. Changing one is refused at once, with a remedy, instead of being ignored. A
buffer may be assigned as long as shape and dtype stay: its values are copied.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_all

from shardwright.errors import InputError

from ..parameters.other_stages import HeldElsewhere, expect_all, expect_here

REMEDY = "change the model before sw.parallelize"
ADDED = "_shardwright_hooked"  # of the root module: the dicts of hooks that were added to
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Pinned(dict[str, Any]):
    """A dict of a module's submodules, parameters or buffers that refuses changes."""

    def __init__(self, what: str, path: str, parts: dict[str, Any], absent: frozenset[str] | None = None) -> None:
        super().__init__(parts)
        self._what, self._path = what, path
        gone = [name for name, part in parts.items() if part is None and absent is not None and name not in absent]
        self.elsewhere = {name: f"{path}.{name}" if path else name for name in gone}

    def __getitem__(self, name: str) -> Any:
        if name in self.elsewhere:  # attribute lookup finds it; iteration finds None
            return HeldElsewhere(self.elsewhere[name])
        return super().__getitem__(name)

    def put(self, name: str, value: Any) -> None:
        """Set an item nevertheless: the caller knows that no program reads it."""
        super().__setitem__(name, value)

    def _refuse(self, name: str, done: str) -> NoReturn:
        key = f"{self._path}.{name}" if self._path else name
        how = ", or load values with load_state_dict" if self._what == "parameter" else ""
        if done == "replaced" and how:
            how += "; wrappers such as fully_shard or accelerator.prepare can't wrap a compiled model"
        raise InputError(
            f"the {self._what} {key} can't be {done} in a parallelized model: its programs were compiled for what "
            f"was there; {REMEDY}{how}"
        )

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self:
            self._refuse(name, "added")
        if self[name] is not value:
            self._refuse(name, "replaced")

    def __delitem__(self, name: str) -> None:
        self._refuse(name, "removed")

    def pop(self, name: str, *default: Any) -> Any:
        if name in self or not default:
            self._refuse(name, "removed")
        return default[0]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def setdefault(self, name: str, default: Any = None) -> Any:
        if name not in self:
            self._refuse(name, "added")
        return self[name]

    def clear(self) -> None:
        for name in self:
            self._refuse(name, "removed")

    def popitem(self) -> tuple[str, Any]:
        self._refuse(next(iter(self), ""), "removed")

    def __reduce__(self) -> Any:
        return dict, (dict(self),)  # a copy is free


class PinnedBuffers(Pinned):
    """Buffers, whose values may be assigned. `absent` are those that are None in the original."""

    def __init__(self, path: str, parts: dict[str, Any], absent: frozenset[str]) -> None:
        super().__init__("buffer", path, parts, absent)
        self._absent = absent

    @torch.no_grad()
    def __setitem__(self, name: str, value: Any) -> None:
        known = self.get(name)
        if isinstance(known, Tensor) and isinstance(value, Tensor):
            if (known.shape, known.dtype) != (value.shape, value.dtype):
                self._refuse(name, f"replaced by a tensor of shape {tuple(value.shape)} and {value.dtype}")
            if value is not known:
                known.copy_(value)
        elif known is not None or name not in self or name in self._absent:
            super().__setitem__(name, value)
        # else another rank of the pipeline has it, and sets it there


class PinnedHooks(OrderedDict[int, Any]):
    """The hooks of a module in a compiled model: none of them is called. `added` lists the dicts that got one.

    A hook that is removed before the next call (as a model summary does) is harmless, so only the call refuses it.
    """

    def __init__(self, path: str, kind: str, added: list[PinnedHooks]) -> None:
        super().__init__()
        self._path, self._kind, self._added = path, kind, added

    def __setitem__(self, key: int, hook: Any) -> None:
        super().__setitem__(key, hook)
        self._added.append(self)

    def check(self, harmless: tuple[str, ...]) -> None:
        """Refuse a call while there is a hook, except those of packages that only observe."""
        for hook in self.values():
            if (getattr(hook, "__module__", None) or "").startswith(harmless):
                continue
            raise InputError(
                f"{getattr(hook, '__qualname__', hook)} was added as a {self._kind} of {self._path}; a parallelized "
                "model never calls it: its program has the ops of submodules, not their calls; "
                f"{REMEDY}, return what it observes from forward, or leave the submodule out with "
                "CompileOptions(parts=[...])"
            )

    def __reduce__(self) -> Any:
        return OrderedDict, ()


def pin(module: nn.Module, path: str, absent: frozenset[str], added: list[PinnedHooks]) -> None:
    """Pin the contents of a module. `absent` are the parameters and buffers that are None in the original."""
    slots: Any = vars(module)
    slots["_parameters"] = Pinned("parameter", path, module._parameters, absent)
    slots["_modules"] = Pinned("submodule", path, module._modules)
    slots["_buffers"] = PinnedBuffers(path, module._buffers, absent)
    for name in HOOKS if path else ():  # hooks of the root module run around its call
        slots[name] = PinnedHooks(path, name.strip("_").removesuffix("s").replace("_", " "), added)
    if path:
        module.register_state_dict_pre_hook(expect_all)  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(expect_here)  # type: ignore[no-untyped-call]


def check_global_hooks(harmless: tuple[str, ...]) -> None:
    """Refuse a call while there is a global module hook, except those of packages that only observe."""
    for name in HOOKS:
        for hook in getattr(of_all, f"_global{name}").values():
            where = str(getattr(hook, "__module__", None) or type(hook).__module__)
            if not where.startswith(("torch.", "shardwright.", *harmless)):
                kind = name.strip("_").removesuffix("s").replace("_", " ")
                raise InputError(
                    f"{getattr(hook, '__qualname__', hook)} was added as a {kind} of all modules, but submodules of a "
                    "parallelized model are never called: its program has their ops; remove it "
                    "(handle.remove()) before the call, or return what it observes from forward"
                )


def check_hooks(module: nn.Module, harmless: tuple[str, ...]) -> None:
    """Refuse a call of a compiled model with a hook on a submodule."""
    added: list[PinnedHooks] = vars(module).get(ADDED, [])
    for hooks in added:
        hooks.check(harmless)
    added.clear()

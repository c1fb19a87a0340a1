"""What the user's class defines under a name that the compiled model has as well.

    name                                          what becomes of it
    -------------------------------------------   ----------------------------------------------------------------
    plan, total, no_sync: a name of ours          refused: `model.plan` could mean either
    parameters, named_modules: what a module has  refused: the compiler has to see all of it
    zero_grad, requires_grad_, apply, ...         the user's runs, on the module that holds the shards (view.py)
    train, eval                                   the same, and the modes that they leave are those of programs
    state_dict, load_state_dict, their hooks      refused when they are called: ours has shards and calls none
    to, half, ...                                 ours, which refuse to cast (wrappers.py)

The names are read off the classes, so that a new method of the compiled model can't hide one of the user's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from torch import nn

from shardwright.errors import InputError, raise_all

STRUCTURE = (
    "parameters", "named_parameters", "buffers", "named_buffers", "modules", "named_modules", "children",
    "named_children",
)  # fmt: skip
_STATE: dict[str, tuple[str, ...]] = {
    "save": ("state_dict", "_save_to_state_dict", "get_extra_state", "_state_dict_hooks", "_state_dict_pre_hooks"),
    "load": (
        "load_state_dict", "_load_from_state_dict", "set_extra_state", "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
    ),
}  # fmt: skip
_INSTEAD = {
    "save": "use sw.save, or model.full_state_dict() and load it into an uncompiled model, whose state_dict is yours",
    "load": "load the values before sw.parallelize, use sw.load, or do to their keys and values what it does",
}


def check_names(compiled: nn.Module, original: nn.Module) -> None:
    """Refuse a model whose names the compiled one would hide."""
    kind = type(original).__name__
    usual = dir(nn.Module())  # at this moment: libraries add methods to nn.Module
    public = {name for name in {*dir(type(compiled)), *vars(compiled)}.difference(usual) if not name.startswith("_")}
    faults = [
        f"{kind}.{name} would be hidden by model.{name} of the compiled model; give it another name, or make {kind} a "
        "submodule of a module and pass that"
        for name in sorted(public.intersection(dir(original)))
    ]
    raise_all(InputError, f"{kind} can't be compiled as it is:", faults)


def structure_faults(module: nn.Module, path: str = "") -> Iterator[str]:
    """Modules that say of themselves what they consist of: the compiler has to see all of it."""
    for name in STRUCTURE:
        if overrides(type(module), name):
            yield (
                f"{path or 'the model'} ({type(module).__name__}) overrides {name}(), but the compiler has to see all "
                f"that nn.Module.{name}() returns; give it another name, such as trainable_{name}"
            )
    for name, child in module._modules.items():
        if child is not None:
            yield from structure_faults(child, f"{path}.{name}" if path else name)


def overridden(view: type[nn.Module], original: type[nn.Module]) -> Iterator[str]:
    """The methods of nn.Module that the user's class defines anew and the view's does not."""
    for name, method in vars(nn.Module).items():
        casts = "_apply" in getattr(getattr(method, "__code__", None), "co_names", ())
        if name.startswith("_") or not callable(method) or casts:
            continue
        if getattr(view, name) is method and overrides(original, name):
            yield name


def check_state(module: nn.Module, direction: Literal["save", "load"]) -> None:
    """Refuse a state dict of a compiled model that would pass over what the user's classes and hooks do to it."""
    for path, part in module.named_modules():
        for name in _STATE[direction]:
            if overrides(type(part), name) or any(map(_is_of_user, vars(part).get(name, {}).values())):
                what = f"{path or 'the model'} ({type(part).__name__}) has {name} of its own"
                raise InputError(f"{what}, which a compiled model does not call; {_INSTEAD[direction]}")


def overrides(kind: type, name: str) -> bool:
    """Whether a class of the user's defines a name, and not torch's that it derives from."""
    definer = next((base for base in kind.__mro__ if name in vars(base)), object)
    return definer is not object and not _is_known(definer.__module__)


def _is_of_user(hook: Any) -> bool:
    function = getattr(hook, "hook", hook)  # torch wraps those that take the module
    return not _is_known(str(getattr(function, "__module__", None) or type(function).__module__))


def _is_known(module: str) -> bool:
    return module.partition(".")[0] in ("torch", "shardwright")

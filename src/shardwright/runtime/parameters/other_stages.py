"""What a rank does not have of a model: parameters of other pipeline stages, and other ranks' parts of its own.

model.head.weight               stands for the parameter, and says where it is as soon as something is done with it
model.head.state_dict()         would lack it, and is refused
model.head.load_state_dict(..)  can't cut whole tensors, which that of the whole model can, and is refused
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from shardwright.errors import InputError


class HeldElsewhere:
    """A parameter or buffer of a pipeline that other ranks hold."""

    def __init__(self, key: str) -> None:
        self._key = key

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise InputError(
            f"{self._key} is a part of another stage of the pipeline, and not on this rank; go through "
            "model.parameters(), which are those of this rank's stages, get all of them with model.full_state_dict(), "
            "which all ranks must call, set them with model.load_state_dict, or use a plan without pp"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_key":
            super().__setattr__(name, value)
        elif name != "requires_grad" and not (name == "grad" and value is None):  # its ranks do the same to it
            self._refuse()

    def requires_grad_(self, requires_grad: bool = True) -> HeldElsewhere:
        """Nothing to do here: the ranks that hold it run the same line."""
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> NoReturn:
        every = torch.utils._pytree.tree_leaves((args, kwargs))
        next(x for x in every if isinstance(x, HeldElsewhere))._refuse()

    def __repr__(self) -> str:
        return f"{self._key}, held by another rank"


for _name in "add sub mul truediv pow matmul mod floordiv".split():
    for _prefix in ("", "r", "i"):
        setattr(HeldElsewhere, f"__{_prefix}{_name}__", HeldElsewhere._refuse)
for _name in "neg abs getitem setitem len iter float int bool lt le gt ge".split():
    setattr(HeldElsewhere, f"__{_name}__", HeldElsewhere._refuse)


def lacking(module: nn.Module) -> list[str]:
    """The parameters and buffers in a part of a model that other ranks hold."""
    slots = [slot for part in module.modules() for slot in (part._parameters, part._buffers)]
    return [key for slot in slots for key in getattr(slot, "elsewhere", {}).values()]


def expect_all(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Refuse the state dict of a part of a model that has keys on other ranks."""
    missing = lacking(module) if not prefix else []
    if missing:
        raise InputError(
            f"{', '.join(missing)}: other ranks of the pipeline hold this, so that the state dict of the submodule "
            "would lack it here; take it out of model.full_state_dict(), which all ranks must call (rank=0 for one of "
            "them), or save all with sw.save(path, model, optimizer)"
        )


def expect_here(module: nn.Module, values: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Refuse to load whole tensors into a part of a model where a rank has shards of them, or none."""
    if prefix:
        return
    here: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    apart = [key for key, tensor in here.items() if key in values and values[key].shape != tensor.shape]
    full_sized = [key for key in apart if tuple(values[key].shape) == getattr(_spec_of(here[key]), "shape", None)]
    missing = lacking(module)
    if full_sized or missing:
        raise InputError(
            f"{', '.join(missing + full_sized)}: ranks hold shards of it, and a submodule can't tell how to shard it; "
            "load it with the whole model: model.load_state_dict({'path.of.the.submodule.' + key: value ...}, "
            "strict=False)"
        )


def _spec_of(tensor: Tensor) -> Any:
    return getattr(tensor, "spec", None)

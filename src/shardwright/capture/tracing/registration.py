"""Buffers and parameters that a forward registers while it is traced.

A program reads those that the model has when it is compiled. One that the first call makes (`if self.mask is None:
self.register_buffer(...)`) is no part of it: the program would make it anew at every call, of that call's data.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from shardwright.errors import CaptureError


@contextmanager
def nothing_registered(module: nn.Module) -> Iterator[None]:
    """Raise at the end if a part of the module has got a buffer or a parameter that it had not."""
    own, thread = {id(part): path for path, part in module.named_modules()}, threading.get_ident()
    added: list[str] = []

    def look(part: nn.Module, name: str, value: Tensor | None) -> None:
        new = value is not None and part._buffers.get(name) is None and part._parameters.get(name) is None
        if new and id(part) in own and thread == threading.get_ident():
            added.append(f"{own[id(part)]}.{name}".lstrip("."))

    handles = (
        nn.modules.module.register_module_buffer_registration_hook(look),
        nn.modules.module.register_module_parameter_registration_hook(look),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    if added:
        raise CaptureError(
            f"forward registers {', '.join(dict.fromkeys(added))} in its first call, which a program can't do; "
            "register it in __init__, or call the model once before parallelize"
        )

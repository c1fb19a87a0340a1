"""Arguments that are neither tensors nor numbers: a dtype, a slice, a range.

`torch.export` knows numbers and strings only. These are values too: immutable, and equal or not at the next call,
which then compiles anew. While a model is traced a word stands for each, and the module is called with what it
stands for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

_WORD = "shardwright argument"


def is_fixed(value: Any) -> bool:
    """Whether a value can't change; a device only where a trace is, since code may read it."""
    if isinstance(value, torch.device):
        return value.type == "cpu"
    return isinstance(value, torch.dtype | torch.layout | torch.memory_format | slice | range)


@contextmanager
def fixing(module: nn.Module, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """Arguments with words in the places of fixed values, which the module is called with all the same."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    fixed = {f"{_WORD} {at}": leaf for at, leaf in enumerate(leaves) if is_fixed(leaf)}
    if not fixed:
        yield args, kwargs
        return
    placeholders = [f"{_WORD} {at}" if is_fixed(leaf) else leaf for at, leaf in enumerate(leaves)]

    def put_back(_module: nn.Module, positional: Any, named: Any) -> Any:
        return pytree.tree_map(
            lambda leaf: fixed.get(leaf, leaf) if isinstance(leaf, str) else leaf, (positional, named)
        )

    hook = module.register_forward_pre_hook(put_back, with_kwargs=True, prepend=True)
    try:
        yield pytree.tree_unflatten(placeholders, spec)
    finally:
        hook.remove()

"""Whether gradients were on, noted on every node as it is traced.

`torch.export` keeps `torch.no_grad()` as a region, but loses it where it lies inside of an autocast
region, and with it the user's wish that nothing be trained there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.fx import traceback
from torch.overrides import TorchFunctionMode

NO_GRAD = "shardwright_no_grad"


class _GradMode(TorchFunctionMode):
    """Writes what `no_grad` and its kin say into the metadata of the nodes that follow."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch._C._set_grad_enabled:
            traceback.current_meta["custom"] = {**traceback.current_meta.get("custom", {}), NO_GRAD: not args[0]}
        return result


@contextmanager
def noting_grad_mode() -> Iterator[None]:
    """Within this, nodes of a trace know whether gradients are on."""
    with traceback.preserve_node_meta(), _GradMode():
        yield


def grad_is_off(node: fx.Node, region: bool) -> bool:
    """Whether a node was traced without gradients; `region` is what the regions around it say."""
    return bool(node.meta.get("custom", {}).get(NO_GRAD, region))

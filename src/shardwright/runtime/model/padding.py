"""Whether a batch has padding: looked at once a call, and answered alike on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..collectives import process_group
from ..faults import flight_recorder
from .specialization import Specialization


def is_unpadded(entry: Specialization, args: Sequence[Any], kwargs: Mapping[str, Any], alike: bool) -> bool:
    """Whether all inputs that tell of padding say that there is none; `alike`: all ranks are given the same ones.

    Where ranks have samples of their own, they run the program with a mask if any of them has padding.
    """
    tensors = entry.flatten(args, kwargs)
    looked_at = [(tensors[at], number) for at, number in entry.padding]
    unpadded = all(not tensor.is_meta and bool((tensor == number).all()) for tensor, number in looked_at)
    if alike or not dist.is_initialized() or dist.get_world_size() == 1:
        return unpadded
    answer = torch.tensor([unpadded], dtype=torch.int64, device=looked_at[0][0].device)
    flight_recorder.enter("all_reduce", None, "whether a batch has padding")
    process_group.all_reduce(answer, None, "min").wait()
    return bool(answer)

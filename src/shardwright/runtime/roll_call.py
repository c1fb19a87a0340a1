"""What every rank has to say, known to all: small things, in the order of ranks. All ranks must call it."""

from __future__ import annotations

import hashlib
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from . import journal
from .faults import told
from .world import here

T = TypeVar("T")


@told
def numbers(mine: int, what: str) -> list[int]:
    """The number of every rank; `what` it is, for a rank that waits."""
    world = here()
    if world.size == 1:
        return [mine]
    own = torch.tensor([mine], dtype=torch.int64, device=world.device)
    every = torch.empty(world.size, dtype=torch.int64, device=world.device)
    journal.enter("all_gather", None, what)
    dist.all_gather_single(every, own)
    return [int(held) for held in every.tolist()]


@told
def objects(mine: T, what: str) -> list[T]:
    """The object of every rank."""
    world = here()
    if world.size == 1:
        return [mine]
    every: list[Any] = [None] * world.size
    journal.enter("all_gather", None, what)
    dist.all_gather_object(every, mine)
    return every


def number_of(text: str) -> int:
    """A number that two texts share only if they are the same."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")

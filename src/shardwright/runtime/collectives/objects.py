"""All-gathers of small Python objects and numbers, in the order of ranks. All ranks must call them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardwright.errors import DriftError, raise_all

from ..faults import flight_recorder
from ..faults.watch import report_failure
from ..world import here
from . import process_group

T = TypeVar("T")


@report_failure
def all_gather_numbers(mine: int, what: str) -> list[int]:
    """The number of every rank; `what` describes it in hang reports."""
    world = here()
    if world.size == 1:
        return [mine]
    own = torch.tensor([mine], dtype=torch.int64, device=world.device)
    every = torch.empty(world.size, dtype=torch.int64, device=world.device)
    flight_recorder.enter("all_gather", None, what)
    process_group.all_gather(every, own, None).wait()
    return [int(number) for number in every.tolist()]


@report_failure
def all_gather_objects(mine: T, what: str) -> list[T]:
    """The object of every rank."""
    world = here()
    if world.size == 1:
        return [mine]
    every: list[Any] = [None] * world.size
    flight_recorder.enter("all_gather", None, what)
    dist.all_gather_object(every, mine)
    return every


@report_failure
def check_equal(mine: Mapping[str, str], what: str, remedy: str) -> None:
    """Raise on every rank if some have other facts than rank 0: which facts, and on which ranks."""
    same = set(
        all_gather_numbers(text_digest(json.dumps(dict(mine), sort_keys=True)), f"a hash of {what} of every rank")
    )
    if len(same) == 1:
        return
    every = all_gather_objects(dict(mine), what)
    faults = []
    for name in dict.fromkeys(name for facts in every for name in facts):
        by_value: dict[str, list[int]] = {}
        for rank, facts in enumerate(every):
            by_value.setdefault(facts.get(name, "missing"), []).append(rank)
        if len(by_value) > 1:
            differing = ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in by_value.items())
            faults.append(f"{name}: {differing}")
    raise_all(DriftError, f"the ranks have different {what}{flight_recorder.called_at()}; {remedy}:", faults)


def _ranks(ranks: Sequence[int]) -> str:
    some = ", ".join(map(str, ranks[:4]))
    return f"rank{'s' if len(ranks) > 1 else ''} {some}{f' and {len(ranks) - 4} more' if len(ranks) > 4 else ''}"


def text_digest(text: str) -> int:
    """A number that two texts share only if they are the same."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")

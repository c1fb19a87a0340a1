"""One name for an attempt of a run, agreed on by all of its ranks.

After a failure torchrun starts all processes again beside the store that the last ones have filled. What it tells them
about the attempt is not equal on all nodes: every agent counts the restarts of its own. So the ranks agree through the
store itself, in which keys of attempts before may still be:

    rank r                                     rank 0
    hello/r = its nonce           ───────►     reads it, maybe that of a process that is gone
    waits for welcome/nonce       ◄───────     welcome/nonce = the name, again for each new nonce
    joined/name/r = its nonce     ───────►     waits for all, as often as it takes
    waits for go/name             ◄───────     go/name = the nonces of all

No key that a rank waits for was there before, since it contains a nonce or a name of this attempt; and of two processes
that take themselves for one rank, one is refused.
"""

from __future__ import annotations

import json
import time
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from shardwright.errors import RankError

RETRY = timedelta(seconds=0.2)  # until rank 0 looks for processes that have come since


def agree_on_attempt(store: Any, rank: int, size: int, wait: timedelta) -> str:
    """The name of this attempt. All ranks must call it."""
    store = PrefixStore("shardwright/attempts", store)
    try:
        return _lead(store, size, wait) if rank == 0 else _follow(store, rank, wait)
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise RankError(
            f"rank {rank} of {size} could not meet the others through the store within {wait.total_seconds():.0f} s; "
            f"see that all ranks are started, and that they reach MASTER_ADDR and MASTER_PORT ({error})"
        ) from error


def _lead(store: Any, size: int, wait: timedelta) -> str:
    name, until = uuid.uuid4().hex, time.monotonic() + wait.total_seconds()
    others = range(1, size)
    hello, joined = [f"hello/{rank}" for rank in others], [f"joined/{name}/{rank}" for rank in others]
    store.wait(hello, wait)
    welcomed: set[bytes] = set()
    while True:
        nonces = store.multi_get(hello)
        for nonce in set(nonces) - welcomed:
            store.set(f"welcome/{nonce.decode()}", name)
        welcomed.update(nonces)
        try:
            store.wait(joined, RETRY)
        except dist.DistStoreError:
            if time.monotonic() > until:
                raise
            continue
        present = store.multi_get(joined)
        if present == store.multi_get(hello):
            store.set(f"go/{name}", json.dumps([nonce.decode() for nonce in present]))
            return name


def _follow(store: Any, rank: int, wait: timedelta) -> str:
    nonce = uuid.uuid4().hex
    store.set(f"hello/{rank}", nonce)
    store.wait([f"welcome/{nonce}"], wait)
    name: str = store.get(f"welcome/{nonce}").decode()
    store.set(f"joined/{name}/{rank}", nonce)
    store.wait([f"go/{name}"], wait)
    if json.loads(store.get(f"go/{name}"))[rank - 1] != nonce:
        raise RankError(f"another process has joined as rank {rank}; see that no process of an earlier start is left")
    return name

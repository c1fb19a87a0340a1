"""The name of an attempt: equal on all ranks, and never that of an attempt before."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from shardwright.errors import RankError
from shardwright.runtime.attempt import agree_on_attempt
from shardwright.runtime.faults.bounded_store import BoundedStore, LostStoreError

WAIT = timedelta(seconds=60)


@pytest.fixture
def server():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def client(server, wait=WAIT):
    return dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=wait)


def attempt(server, size, delays=None):
    """All ranks of an attempt, some of which come late."""

    def join(rank):
        time.sleep((delays or {}).get(rank, 0.0))
        return agree_on_attempt(client(server), rank, size, WAIT)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(join, range(size)))


def test_every_attempt_has_a_name_of_its_own_that_all_ranks_know(server):
    names = []
    for size, delays in ((4, {}), (4, {2: 0.6}), (3, {0: 0.6}), (4, {1: 0.3, 3: 0.6})):
        agreed = attempt(server, size, delays)
        assert len(set(agreed)) == 1
        names.append(agreed[0])
    assert len(set(names)) == len(names)


def test_what_an_attempt_before_left_half_done_is_not_taken_for_this_one(server):
    """Ranks that came to a rendezvous that never was complete have left their keys."""
    short = timedelta(seconds=1)
    for rank in (1, 2):
        with pytest.raises(RankError, match=rf"rank {rank} of 3 could not meet the others .* within 1 s"):
            agree_on_attempt(client(server), rank, 3, short)
    with pytest.raises(RankError, match="rank 0 of 3"):  # it finds only what they left
        agree_on_attempt(client(server), 0, 3, short)
    assert len(set(attempt(server, 3, {1: 0.5}))) == 1


def test_of_two_processes_with_one_rank_one_is_refused(server):
    """Such as an orphan of an earlier start that still waits."""
    outcomes = []

    def join(rank):
        try:
            outcomes.append((rank, agree_on_attempt(client(server), rank, 2, timedelta(seconds=5))))
        except RankError as error:
            outcomes.append((rank, error))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in (1, 1, 0)]
    for thread in threads:
        thread.start()
        time.sleep(0.5)
    for thread in threads:
        thread.join()
    joined = [outcome for _, outcome in outcomes if isinstance(outcome, str)]
    assert len(joined) == 2 and len(set(joined)) == 1
    assert [rank for rank, outcome in outcomes if isinstance(outcome, RankError)] == [1]


class Silent:
    """A store whose connection is cut off: no operation ends."""

    def __init__(self) -> None:
        self.called = threading.Event()

    def __getattr__(self, name):
        def wait(*arguments):
            self.called.set()
            time.sleep(60)

        return wait


@pytest.mark.parametrize(
    "ask",
    [
        lambda store: store.check(["a"]), lambda store: store.get("a"), lambda store: store.set("a", "b"),
        lambda store: store.multi_get(["a"]), lambda store: store.compare_set("a", "", "b"),
    ],
)  # fmt: skip
def test_no_operation_of_a_store_waits_for_longer_than_its_deadline(ask):
    store = BoundedStore(Silent(), 0.3)
    for _ in range(2):
        with pytest.raises(LostStoreError, match="has not answered for 0 s"):
            ask(store)


def test_a_store_that_is_given_up_is_given_up_for_all_threads():
    silent = Silent()
    store, errors = BoundedStore(silent, 0.5), []

    def ask():
        try:
            store.check(["a"])
        except LostStoreError as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(errors) == 3 and time.monotonic() - start < 10


def test_a_bounded_store_says_what_the_store_says(server):
    store = BoundedStore(PrefixStore("x", client(server)), 30)
    store.set("a", "1")
    assert store.check(["a"]) and not store.check(["b"])
    assert store.get("a") == b"1" and store.multi_get(["a", "a"]) == [b"1", b"1"]
    assert store.compare_set("a", "1", "2") == b"2" and store.compare_set("b", "", "3") == b"3"
    store.close()

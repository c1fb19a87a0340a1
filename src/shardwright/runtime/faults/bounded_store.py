"""A store whose every operation has a deadline.

A client of a TCPStore waits for an answer without end if the connection is cut off and nobody closes it: a cable that
is pulled, a firewall, a machine that is down. Whoever handles an error must not wait there. Operations run in a thread
of the store's own; one that is late is given up, and with it the store.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from shardwright.errors import RankError


class LostStoreError(RankError, RuntimeError):
    """The store does not answer, or its connection is closed."""


class BoundedStore:
    """The operations of a store that error handling needs, each within `seconds`."""

    def __init__(self, store: Any, seconds: float) -> None:
        self._store, self._seconds = store, seconds
        self._lost = ""
        self._turn = threading.Lock()  # of the main thread and the watch thread
        self._orders: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="shardwright-store", daemon=True).start()

    def set(self, key: str, value: str) -> None:
        self._ask(lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        return bytes(self._ask(lambda: self._store.get(key)))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return list(self._ask(lambda: self._store.multi_get(list(keys))))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask(lambda: self._store.check(list(keys))))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return bytes(self._ask(lambda: self._store.compare_set(key, expected, desired)))

    def close(self) -> None:
        """End the thread, unless it waits for an answer that does not come."""
        self._orders.put(None)

    def _ask(self, operation: Callable[[], Any]) -> Any:
        if not self._turn.acquire(timeout=self._seconds):
            raise LostStoreError(self._lost or self._late())
        try:
            if self._lost:
                raise LostStoreError(self._lost)
            self._orders.put(operation)
            try:
                result, error = self._answers.get(timeout=self._seconds)
            except queue.Empty:
                self._lost = self._late()
                raise LostStoreError(self._lost) from None
        finally:
            self._turn.release()
        if error is not None:
            self._lost = f"the store of the process group is gone: its host, rank 0 or torchrun, was lost ({error})"
            raise LostStoreError(self._lost) from error
        return result

    def _late(self) -> str:
        return (
            f"the store of the process group has not answered for {self._seconds:.0f} s: its host, rank 0 or torchrun, "
            "is not reachable from here; its machine is down, or the network between them"
        )

    def _serve(self) -> None:
        while (operation := self._orders.get()) is not None:
            try:
                self._answers.put((operation(), None))
            except Exception as error:
                self._answers.put((None, error))

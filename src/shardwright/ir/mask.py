"""What the mask of an attention op means, where capture has proved it (`capture/masks`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskStructure:
    """Which keys a query sees. Query q and key k are counted from 0; all conditions hold at once.

    before      q - before <= k                a sliding window (None: any key before it)
    after       k <= q + after                 0 is causal (None: any key after it)
    prefix      or else k < prefix             keys that every query sees, whatever `after` says
    documents   d[q] == d[k]                   the value d of the graph, such as document ids
    padding     p[k] is true, for all of them  the boolean values p of the graph; "~p" if it says the opposite
    """

    before: int | None = None
    after: int | None = None
    prefix: int = 0
    documents: str | None = None
    padding: tuple[str, ...] = ()

    @property
    def is_full(self) -> bool:
        """Whether every query sees every key."""
        return self == MaskStructure()

    @property
    def is_causal(self) -> bool:
        """Whether a query sees the keys up to its own place, and nothing else is said."""
        return self == MaskStructure(after=0)

    def pairs(self, queries: int, keys: int) -> int:
        """How many pairs of a query and a key see each other by their positions; documents and padding are data."""
        return _pairs(queries, keys, self.before, self.after, self.prefix)

    def sees_in_every_row(self, queries: int, keys: int) -> bool:
        """Whether each query sees a key, whatever the data is. A document has at least the query itself."""
        if self.padding:
            return False
        if self.documents is not None:
            return queries <= keys and (self.before or 0) >= 0 and (self.after or 0) >= 0
        return _smallest_reach(queries, keys, self.before, self.after, self.prefix) > 0

    def renamed(self, names: Mapping[str, str]) -> MaskStructure:
        """With other names of the values that it speaks of."""

        def rename(name: str) -> str:
            return f"~{rename(name[1:])}" if name.startswith("~") else names.get(name, name)

        documents = None if self.documents is None else rename(self.documents)
        return replace(self, documents=documents, padding=tuple(map(rename, self.padding)))

    def __str__(self) -> str:
        parts = []
        if self.after is not None:
            parts.append("causal" if self.after == 0 else f"causal with an offset of {self.after}")
        if self.prefix:
            parts.append(f"a prefix of {self.prefix}")
        if self.before is not None:
            parts.append(f"a window of {self.before + 1}")
        if self.documents is not None:
            parts.append(f"documents by {self.documents}")
        if self.padding:
            parts.append(f"padded keys by {', '.join(self.padding)}")
        return ", ".join(parts) or "full"


@lru_cache(maxsize=1024)
def _pairs(queries: int, keys: int, before: int | None, after: int | None, prefix: int) -> int:
    return sum(max(0, _reach(query, keys, before, after, prefix)) for query in range(queries))


@lru_cache(maxsize=1024)
def _smallest_reach(queries: int, keys: int, before: int | None, after: int | None, prefix: int) -> int:
    return min((_reach(query, keys, before, after, prefix) for query in range(queries)), default=0)


def _reach(query: int, keys: int, before: int | None, after: int | None, prefix: int) -> int:
    """How many keys are in the reach of a query; below 0 for none."""
    stop = keys if after is None else min(keys, max(query + after + 1, prefix))
    return stop - (0 if before is None else max(0, query - before))

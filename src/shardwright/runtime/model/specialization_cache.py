"""The specializations of a model: as many as fit, of which the one unused for longest makes room for a new one.

Every shape, mode and attribute value makes a specialization of its own, so a run whose shapes keep changing would
fill memory with programs that nobody calls again. Ranks call the same programs in the same order, so they drop the
same ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from .specialization import Specialization


class SpecializationCache(Mapping[Any, Specialization]):
    """Specializations by kind of call, in the order of their last use; several kinds may have the same one."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._by_key: dict[Any, Specialization] = {}
        self._has_warned = False
        self.newest: Specialization | None = None

    def __getitem__(self, key: Any) -> Specialization:
        return self._by_key[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._by_key)

    def __len__(self) -> int:
        return len(self._by_key)

    def use(self, key: Any) -> Specialization:
        """The specialization of a kind of call, which is now the last one used."""
        self._by_key[key] = self._by_key.pop(key)
        return self._by_key[key]

    def add(self, key: Any, specialization: Specialization) -> None:
        """Keep a specialization, and drop those that there is no room for."""
        self._by_key[key] = self.newest = specialization
        while len({id(kept) for kept in self._by_key.values()}) > self._size:
            oldest = next(iter(self._by_key.values()))
            self._by_key = {key: kept for key, kept in self._by_key.items() if kept is not oldest}
            self._warn_once()

    def _warn_once(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"the model was called in more than {self._size} ways (shapes, modes, values of numbers): for each new "
                "one the program unused for longest is dropped, and compiled again if its call comes back. Pad inputs "
                "to fewer shapes, or keep more: compile=sw.CompileOptions(cache_size=...)",
                stacklevel=2,
            )

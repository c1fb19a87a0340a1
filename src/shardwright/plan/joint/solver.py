"""Variable elimination for many pipeline ranks: tables of one structure share the elimination order."""

from __future__ import annotations

from ..search.elimination import Elimination, TooWide, eliminate
from ..tables import Tables


class Solver:
    """Finds the elimination steps once for each structure."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, tuple[int, ...] | None], tuple[Elimination, list[int]]] = {}

    def elimination(self, tables: Tables) -> Elimination | None:
        """None if the graph is too wide to be eliminated."""
        if not tables.is_plain:  # then its groups differ from those of other tables
            return self._eliminate(tables)
        known = self._known.get((id(tables.skeleton), tables.sizes)) or self._known.get((id(tables.skeleton), None))
        refitted = known[0].fitting([tables.arrays[number] for number in known[1]]) if known is not None else None
        if refitted is not None:
            return refitted
        new = self._eliminate(tables)
        if new is not None:
            entry = (new, self._numbers(tables, new))
            self._known[id(tables.skeleton), tables.sizes] = entry
            self._known.setdefault((id(tables.skeleton), None), entry)
        return new

    def _eliminate(self, tables: Tables) -> Elimination | None:
        try:
            return eliminate(tables.problem())
        except TooWide:
            return None

    def _numbers(self, tables: Tables, elimination: Elimination) -> list[int]:
        """The table of each group."""
        number = {id(array): at for at, array in enumerate(tables.arrays)}
        return [number[id(group.table)] for group in elimination.groups]

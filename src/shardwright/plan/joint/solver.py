"""Eliminations for many seats: tables of one structure are eliminated by the same steps."""

from __future__ import annotations

from ..search.elimination import Elimination, TooWide, eliminate
from ..tables import Tables


class Solver:
    """Finds the steps of tables once for each structure."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, tuple[int, ...] | None], tuple[Elimination, list[int]]] = {}

    def elimination(self, tables: Tables) -> Elimination | None:
        """None if the graph is too wide to be eliminated."""
        if not tables.is_plain:  # then groups are not those of other tables
            return self._made(tables)
        known = self._known.get((id(tables.skeleton), tables.sizes)) or self._known.get((id(tables.skeleton), None))
        found = known[0].fitting([tables.arrays[number] for number in known[1]]) if known is not None else None
        if found is not None:
            return found
        made = self._made(tables)
        if made is not None:
            new = (made, self._numbers(tables, made))
            self._known[id(tables.skeleton), tables.sizes] = new
            self._known.setdefault((id(tables.skeleton), None), new)
        return made

    def _made(self, tables: Tables) -> Elimination | None:
        try:
            return eliminate(tables.problem())
        except TooWide:
            return None

    def _numbers(self, tables: Tables, found: Elimination) -> list[int]:
        """The table of each group."""
        number = {id(array): at for at, array in enumerate(tables.arrays)}
        return [number[id(group.table)] for group in found.groups]

"""Eliminations for many seats: tables of one structure and of the same sizes are eliminated by the same steps."""

from __future__ import annotations

from ..search.elimination import Elimination, TooWide, eliminate
from ..tables import Tables


class Solver:
    """Finds the steps of tables once for each structure."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[Elimination, list[int]] | None] = {}

    def elimination(self, tables: Tables) -> Elimination | None:
        """None if the graph is too wide to be eliminated."""
        plain = not tables.skeleton.together and len({id(array) for array in tables.arrays}) == len(tables.arrays)
        if not plain:  # where tables are added up, or one stands for several, groups are not those of other tables
            return self._made(tables)
        key = (id(tables.skeleton), tables.sizes)
        if key not in self._known:
            found = self._made(tables)
            self._known[key] = None if found is None else (found, self._numbers(tables, found))
            return found
        known = self._known[key]
        return None if known is None else known[0].with_tables([tables.arrays[number] for number in known[1]])

    def _made(self, tables: Tables) -> Elimination | None:
        try:
            return eliminate(tables.problem())
        except TooWide:
            return None

    def _numbers(self, tables: Tables, found: Elimination) -> list[int]:
        """The table of each group."""
        number = {id(array): at for at, array in enumerate(tables.arrays)}
        return [number[id(group.table)] for group in found.groups]

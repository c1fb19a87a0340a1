"""The smallest linear programmes: maximise c . y where A y <= b, y >= 0, with b >= 0.

With b >= 0 the origin is a vertex to start from, so the textbook tableau is all that is needed. Bland's rule (the
first column that gains, the first row that binds) can't cycle. Some tens of rows and columns are what it is for.
"""

from __future__ import annotations

import numpy as np

from .problem import Floats

NOTHING = 1e-11  # what counts as zero in the tableau; callers scale their numbers to about 1


def maximise(c: Floats, a: Floats, b: Floats) -> Floats | None:
    """The best y, or None if y can grow without bound."""
    rows, columns = a.shape
    tableau = np.zeros((rows + 1, columns + rows + 1))
    tableau[:rows, :columns] = a
    tableau[:rows, columns:-1] = np.eye(rows)
    tableau[:rows, -1] = b
    tableau[-1, :columns] = -c
    basis = list(range(columns, columns + rows))
    while (gaining := np.flatnonzero(tableau[-1, :-1] < -NOTHING)).size:
        column = int(gaining[0])
        binding = np.flatnonzero(tableau[:rows, column] > NOTHING)
        if not binding.size:
            return None
        ratios = tableau[binding, -1] / tableau[binding, column]
        row = int(min(binding[ratios <= ratios.min() + NOTHING], key=lambda each: basis[each]))
        _pivot(tableau, row, column)
        basis[row] = column
    y = np.zeros(columns + rows)
    y[basis] = np.maximum(tableau[:rows, -1], 0.0)  # not a little below, by rounding
    return y[:columns]


def _pivot(tableau: Floats, row: int, column: int) -> None:
    tableau[row] /= tableau[row, column]
    others = np.arange(len(tableau)) != row
    tableau[others] -= np.outer(tableau[others, column], tableau[row])

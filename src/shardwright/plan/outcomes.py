"""What became of each mesh that the search tried, for the plan file: runners-up, and meshes pruned by their bound."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .mesh_fit import MeshResult

ROUNDING = 1e-4


def mesh_outcomes(results: Iterable[MeshResult], best: MeshResult, limit: float, slack: float) -> list[dict[str, Any]]:
    """The meshes, the fastest first: those that were solved, then those that were bounded.

    chosen         the best
    slower         solved, and slower
    bounded        not solved to the end: nothing on it is faster than `bound`, which is no gain, or too small a one
    does not fit   nothing on it was found that fits; `memory` is the least that was found, where that is known
    not solved     the search ended before

    `slack` is the relative gain that no mesh is solved for.
    """
    small = best.time * (1.0 - slack - ROUNDING)
    outcomes = [_outcome(result, best, limit, small) for result in results]
    return sorted(outcomes, key=lambda outcome: (outcome["seconds"] or math.inf, outcome["bound"] or math.inf))


def _outcome(result: MeshResult, best: MeshResult, limit: float, small: float) -> dict[str, Any]:
    solution = result.solution
    bound = result.within
    entry = {"mesh": str(result.candidate), "bound": _finite(bound), "seconds": _finite(result.time)}
    if result.candidate == best.candidate:
        return entry | {"outcome": "chosen"}
    if math.isfinite(result.time):
        return entry | {"outcome": "slower"}
    if solution is None:
        return entry | {"outcome": "bounded" if bound >= small else "not solved"}
    if solution.least_memory > limit:
        return entry | {"outcome": "does not fit", "memory": int(solution.least_memory)}
    return entry | {"outcome": "bounded" if bound >= small else "does not fit"}


def _finite(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None

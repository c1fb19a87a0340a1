"""What a step uses up, as a row of numbers that add up over ops, reshards and parameters.

    COMPUTE    seconds of kernels, forward and backward
    SEND       seconds of blocking communication
    BESIDE     seconds of overlapped communication: ZeRO's all_gathers, the sync of gradients
    UPDATE     seconds after backward: the optimizer, and all_gathers of what it has changed
    STORED     bytes that are there all the time: parameters, gradients, the optimizer's state
    KEPT       bytes that are saved for backward
    PASSING    bytes that one layer after the other has for a while, as a mean layer: what it saves while its backward
               runs, if it is recomputed, and parameters that ZeRO-3 gathers with their gradients

The time of a step is not a sum but a maximum of sums, because communication hides behind kernels. With an overlap of
w (1: perfect, 0: none), C seconds of kernels and G of overlapped communication take C + G - w min(C, G), which is

    max(C + (1 - w) G, G + (1 - w) C).
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

Row = np.ndarray
"""One number for each resource."""


class Resource(IntEnum):
    COMPUTE_FORWARD = 0
    COMPUTE_BACKWARD = 1
    SEND_FORWARD = 2
    SEND_BACKWARD = 3
    BESIDE_FORWARD = 4
    BESIDE_BACKWARD = 5
    UPDATE = 6
    STORED = 7
    KEPT = 8
    PASSING = 9


COUNT = len(Resource)


def row(**amounts: float) -> Row:
    """A row of resources, by their names in small letters."""
    weights = np.zeros(COUNT)
    for name, amount in amounts.items():
        weights[Resource[name.upper()]] = amount
    return weights


def phases(overlap: float, accumulate: int = 1) -> tuple[tuple[Row, ...], ...]:
    """The time of a step: a sum over phases of the largest of their forms (see the top of the file)."""
    rest = 1.0 - overlap
    rows = []
    for kind in ("forward", "backward"):
        names = {part: f"{part}_{kind}" for part in ("compute", "send", "beside")}
        hidden = {names["compute"]: 1.0, names["send"]: 1.0, names["beside"]: rest}
        shown = {names["compute"]: rest, names["send"]: 1.0, names["beside"]: 1.0}
        forms = (row(**hidden), row(**shown)) if overlap else (row(**hidden),)
        rows.append(tuple(accumulate * form for form in forms))
    return (*rows, (row(update=1.0),))


def seconds(used: Row, forms: tuple[tuple[Row, ...], ...]) -> float:
    """How long a step takes that uses so much."""
    return float(sum(max(float(form @ used) for form in phase) for phase in forms))


def memory() -> Row:
    """The weights that make bytes of a row."""
    return row(stored=1.0, kept=1.0, passing=1.0)


def lasting_memory() -> Row:
    """The same without what is there only for a while, of which a mean layer may say too much."""
    return row(stored=1.0, kept=1.0)


def certain_memory() -> Row:
    """The weights of a sum that no peak is below: at the end of forward all that is saved for backward exists.

    So do parameters and the optimizer's state; of what is stored, gradients are at most a half.
    """
    return row(stored=0.5, kept=1.0)

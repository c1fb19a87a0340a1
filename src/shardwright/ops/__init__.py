"""All that the compiler knows about each op, defined in one place.

`spec.py` says what there is to know (`OpSpec`); the other files define the ops of one family each. `contexts.py`,
`printing.py` and `reading.py` are what the functions of a definition are given; `strides.py` and `localizing.py` are
what several families share. Read `pointwise.py` first: to add an op is to add a definition to the file of its family.
"""

from . import (
    arithmetic,
    attention,
    chunked_losses,
    collectives,
    convolutions,
    creation,
    lookups,
    losses,
    matmuls,
    moves,
    norms,
    parts,
    pointwise,
    random,
    reductions,
    spatial,
    transforms,
    user_calls,
    views,
)
from .spec import Kernel, OpSpec, define_custom, defined, op_kind, spec_of, target_of

__all__ = [
    "Kernel",
    "OpSpec",
    "arithmetic",
    "attention",
    "chunked_losses",
    "collectives",
    "convolutions",
    "creation",
    "define_custom",
    "defined",
    "lookups",
    "losses",
    "matmuls",
    "moves",
    "norms",
    "op_kind",
    "parts",
    "pointwise",
    "random",
    "reductions",
    "spatial",
    "spec_of",
    "target_of",
    "transforms",
    "user_calls",
    "views",
]

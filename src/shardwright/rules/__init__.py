"""What may be split: the notation, the rules by op family, and the atoms that tie ops together."""

from . import kept, lookups, losses, norms, pointwise, products, reductions, space, transforms, views
from .atoms import Atoms
from .chance import DROPOUTS, is_drawn_whole
from .notation import Rule, parse
from .registry import Call, find_rule, known_targets, register
from .role import FAN, ROWS, Role
from .signature import Analysis, Find, Signature, analyse

__all__ = [
    "DROPOUTS",
    "FAN",
    "ROWS",
    "Analysis",
    "Atoms",
    "Call",
    "Find",
    "Role",
    "Rule",
    "Signature",
    "analyse",
    "find_rule",
    "is_drawn_whole",
    "kept",
    "known_targets",
    "lookups",
    "losses",
    "norms",
    "parse",
    "pointwise",
    "products",
    "reductions",
    "register",
    "space",
    "transforms",
    "views",
]

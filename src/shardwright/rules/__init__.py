"""What may be split: the notation, the rules by op family, and the atoms that tie ops together."""

from . import lookups, losses, matmuls, norms, pointwise, reductions, spatial, transforms, user_calls, views
from .atoms import Atoms
from .notation import Rule, parse
from .random_ops import DROPOUTS, is_random
from .registry import OpCall, find_rule, known_targets, register
from .role import FAN, ROWS, Role
from .signature import Analysis, Find, Signature, analyse

__all__ = [
    "DROPOUTS",
    "FAN",
    "ROWS",
    "Analysis",
    "Atoms",
    "Find",
    "OpCall",
    "Role",
    "Rule",
    "Signature",
    "analyse",
    "find_rule",
    "is_random",
    "known_targets",
    "lookups",
    "losses",
    "matmuls",
    "norms",
    "parse",
    "pointwise",
    "reductions",
    "register",
    "spatial",
    "transforms",
    "user_calls",
    "views",
]

"""What may be split: the notation, the table of rules (`ops/` fills it), and the atoms that tie ops together."""

from .atoms import Atoms
from .notation import Rule, parse
from .random_ops import is_random
from .registry import OpCall, find_rule, has_rule, known_targets, register
from .role import FAN, ROWS, Choices, Role
from .signature import Analysis, Find, Signature, analyse

__all__ = [
    "FAN",
    "ROWS",
    "Analysis",
    "Atoms",
    "Choices",
    "Find",
    "OpCall",
    "Role",
    "Rule",
    "Signature",
    "analyse",
    "find_rule",
    "has_rule",
    "is_random",
    "known_targets",
    "parse",
    "register",
]

"""How ops may be split: the notation of rules, and what it means for a graph.

Read `notation.py` (a rule as text), `dims.py` and `registry.py` (rules of calls; the definitions of ops fill the
registry), `atoms.py` (factors of dims, shared by unification), `signature.py` and `role.py` (a rule bound to a call,
and the layouts of each way to split it), `binding.py` (which binds the rules of a graph), `random_ops.py` (which ops
draw random numbers).
"""

from .atoms import Atoms
from .binding import Find, analyse
from .notation import Rule, parse
from .random_ops import is_random
from .registry import OpCall, find_rule, has_rule, known_targets, register
from .role import FAN, ROWS, STRIPED, Choices, Role, without_stripes
from .signature import Analysis, Signature

__all__ = [
    "FAN",
    "ROWS",
    "STRIPED",
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
    "without_stripes",
]

"""Test rules by running ops: globally and on shards, to check written rules and to discover missing ones.

Read `check.py` (is a split right?), `splits.py` (checks every split of a plan), `samples.py`, `search.py`, `wording.py`
and `discover.py` (find a rule for an unknown op), `custom_ops.py` (rules of `register_op`).
"""

from .check import check_role
from .discover import discover, probing
from .splits import check_splits

__all__ = ["check_role", "check_splits", "discover", "probing"]

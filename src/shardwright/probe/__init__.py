"""Rules put to the test: an op is run whole and in pieces, to check what was written and to find what was not."""

from .check import check_role
from .discover import discover, probing
from .splits import check_splits

__all__ = ["check_role", "check_splits", "discover", "probing"]

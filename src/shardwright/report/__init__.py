"""What was decided, for people to read: a plan explained, two plans compared."""

from .difference import Difference, diff
from .explain import Explanation, explain
from .plans import read_plan
from .why import Why

__all__ = ["Difference", "Explanation", "Why", "diff", "explain", "read_plan"]

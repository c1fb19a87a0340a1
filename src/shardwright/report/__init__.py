"""What was decided, for people to read: a plan explained, two plans compared."""

from .explain import Explanation, explain
from .plans import Difference, diff, read_plan

__all__ = ["Difference", "Explanation", "diff", "explain", "read_plan"]

"""Whether the compiled program does what the original does, and if not, where it leaves it."""

from .measure import Report, Row
from .parity import verify

__all__ = ["Report", "Row", "verify"]

"""`nn.Module` to `ir.Graph`: what is computed, at global shape, with nothing dropped silently."""

from .assemble import capture
from .captured import Captured, Function, InputLeaf
from .interpret import run
from .trace import without_collection

__all__ = ["Captured", "Function", "InputLeaf", "capture", "run", "without_collection"]

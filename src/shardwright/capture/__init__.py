"""`nn.Module` to `ir.Graph`: what is computed, at global shape, with nothing dropped silently."""

from .assemble import capture
from .captured import Captured, Function, InputLeaf
from .interpret import run
from .opaque import Body, Opaque, OpaquePart, opaque
from .real import Real
from .trace import without_collection

__all__ = [
    "Body",
    "Captured",
    "Function",
    "InputLeaf",
    "Opaque",
    "OpaquePart",
    "Real",
    "capture",
    "opaque",
    "run",
    "without_collection",
]

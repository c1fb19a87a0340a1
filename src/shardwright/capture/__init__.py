"""`nn.Module` to `ir.Graph`: what is computed, at global shape, with nothing dropped silently."""

from .assemble import capture, capture_pair
from .auto import AUTO, find_opaque
from .captured import Captured, Function, InputLeaf
from .casting import cast, casting
from .interpret import run
from .module_hooks import check_hooks
from .opaque import experts, opaque
from .part import Body, Opaque, OpaquePart
from .real import NoValues, Real
from .trace import without_collection

__all__ = [
    "AUTO",
    "Body",
    "Captured",
    "Function",
    "InputLeaf",
    "NoValues",
    "Opaque",
    "OpaquePart",
    "Real",
    "capture",
    "capture_pair",
    "cast",
    "casting",
    "check_hooks",
    "experts",
    "find_opaque",
    "opaque",
    "run",
    "without_collection",
]

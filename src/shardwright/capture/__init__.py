"""`nn.Module` to `ir.Graph`: what is computed, at global shape, with nothing dropped silently."""

from .assemble import capture, capture_pair
from .auto import AUTO, find_opaque
from .captured import Captured, Function, InputLeaf
from .casting import cast, casting
from .copies import copy_module, rebind
from .interpret import run
from .module_hooks import check_hooks
from .opaque import experts, opaque
from .part import Body, Opaque, OpaquePart
from .real import NoValues, Real
from .signature import input_paths, register_containers
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
    "copy_module",
    "experts",
    "find_opaque",
    "input_paths",
    "opaque",
    "rebind",
    "register_containers",
    "run",
    "without_collection",
]

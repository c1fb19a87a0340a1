"""`nn.Module` to `ir.Graph`: what is computed, at global shapes, with nothing dropped silently.

Read `assemble.py` (the flow), `tracing/` (one `torch.export`, made safe), `building/` (its nodes become a graph),
`user_calls/` (Python that stays one op), `captured.py` (the result). `interpret.py` runs a graph, `failure.py` explains
why a model can't be captured, `copies.py` copies modules.
"""

from .assemble import capture, capture_pair
from .building.call_paths import input_paths, register_containers
from .captured import CapturedGraph, ImportedFunction, InputLeaf, MaskFacts
from .copies import copy_module, rebind
from .interpret import run
from .tracing.casting import cast, casting
from .tracing.export import without_collection
from .tracing.grad_mode import called_with_gradients
from .tracing.module_hooks import check_hooks
from .user_calls.find_opaque import AUTO, find_opaque
from .user_calls.opaque import experts, opaque
from .user_calls.opaque_call import OpaqueBody, OpaqueCall, OpaqueModule
from .user_calls.real_run import NoValues, Real

__all__ = [
    "AUTO",
    "CapturedGraph",
    "ImportedFunction",
    "InputLeaf",
    "MaskFacts",
    "NoValues",
    "OpaqueBody",
    "OpaqueCall",
    "OpaqueModule",
    "Real",
    "called_with_gradients",
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

"""From a call to a program that runs: capture, plan, lower, emit, load, for one entry at a time."""

from .batched import with_unbatched
from .compiler import Compiler, Outputs
from .files import compile_graph, write
from .meta_copy import copy_to_meta
from .replicas import count_replicas, replicas_of

__all__ = [
    "Compiler",
    "Outputs",
    "compile_graph",
    "copy_to_meta",
    "count_replicas",
    "replicas_of",
    "with_unbatched",
    "write",
]  # fmt: skip

"""From a call to a program that runs: capture, plan, lower, emit, load, for one entry at a time."""

from .compiler import Compiler, Outputs, compile_graph, count_replicas, replicas_of
from .files import write
from .skeleton import skeleton_of

__all__ = [
    "Compiler", "Outputs", "compile_graph", "count_replicas", "replicas_of", "skeleton_of", "write",
]  # fmt: skip

"""From a call to a program that runs: capture, plan, lower, emit, load, for one kind of call at a time.

Read `compiler.py` (the steps in their order), `parameters.py` (the shards of a rank), `loading.py` (programs with their
parameters in place), `settings.py` and `agreement.py` (what ranks must have in common).
"""

from .batched import with_unbatched
from .compiler import Compiler
from .files import compile_graph, write
from .meta_copy import copy_to_meta
from .replicas import count_replicas, replicas_of
from .settings import CompilerSettings

__all__ = [
    "Compiler",
    "CompilerSettings",
    "compile_graph",
    "copy_to_meta",
    "count_replicas",
    "replicas_of",
    "with_unbatched",
    "write",
]  # fmt: skip

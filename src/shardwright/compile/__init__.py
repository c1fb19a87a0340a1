"""From a call to a program that runs: capture, plan, lower, emit, load, for one specialization at a time.

Read `compiler.py` (the steps in order), `parameters.py` and `pipeline_ranks.py` (shards and process groups),
`loading.py` and `pipeline.py` (programs with their parameters in place), `settings.py` and `agreement.py` (what all
ranks must have in common), then `batched.py`, `scalars.py`, `call_mapping.py`, `meta_copy.py` and `replicas.py`
(inputs, and copies of the model), `files.py` (where generated code is written).
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

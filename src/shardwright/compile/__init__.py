"""From a call to a program that runs: capture, plan, lower, emit, load, for one specialization at a time.

Read `compiler.py` (the steps in order), `parameters.py` and `pipeline_ranks.py` (shards and process groups),
`pipeline.py` (programs of stages), `agreement.py` (all ranks compile the same), then `batched.py`, `scalars.py`,
`call_mapping.py`, `meta_copy.py` and `replicas.py` (inputs, and copies of the model), `files.py` (where generated
code is written).
"""

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

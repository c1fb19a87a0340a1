"""How parameters are stored on ranks: replicated, or sharded as ZeRO-1, ZeRO-2 or ZeRO-3.

Read `storage.py` first: what a kind of storage has to answer (what a rank stores, what it sends, which runtime class
keeps it). `replicated.py`, `zero1.py`, `zero2.py` and `zero3.py` are the kinds, and `kinds.py` lists them: a new kind
is a file and a line there. `spec.py` has the `ParameterSpec`, one description of a parameter from lowering to the
generated file, the runtime and checkpoints.
"""

from __future__ import annotations

from .kinds import (
    KINDS,
    SHARDED_KINDS,
    SHARDED_TENSORS,
    kind_named,
    of_zero,
    parse_storage,
    sharded_tensors,
    storage_kind,
)
from .replicated import Replicated, restricted
from .spec import (
    ParameterSpec,
    effective_storage,
    sharding_axes,
    storage_layout,
    stored_layout,
    summing_axes,
    wanted_groups,
    zero_axes,
)
from .storage import Storage, StorageCollective, StoredElements

__all__ = [
    "KINDS",
    "SHARDED_KINDS",
    "SHARDED_TENSORS",
    "ParameterSpec",
    "Replicated",
    "Storage",
    "StorageCollective",
    "StoredElements",
    "effective_storage",
    "kind_named",
    "of_zero",
    "parse_storage",
    "restricted",
    "sharded_tensors",
    "sharding_axes",
    "storage_kind",
    "storage_layout",
    "stored_layout",
    "summing_axes",
    "wanted_groups",
    "zero_axes",
]

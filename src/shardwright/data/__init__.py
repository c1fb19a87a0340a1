"""Data for many ranks: which samples each rank gets, in which order, and where a run resumes.

Read `samples.py` (map-style datasets), `stream.py` (iterable ones), `packing.py` (documents to sequences), `collate.py`
(samples to batches), then `loader.py`, which joins them into a `Loader` whose position can be saved.
"""

from .loader import Loader, loader
from .packing import PackedDocuments, Packing, document_positions
from .samples import BatchShare, Last, ReplicaBatchSampler, share_of_samples
from .stream import Stream

__all__ = [
    "BatchShare", "Last", "Loader", "PackedDocuments", "Packing", "ReplicaBatchSampler", "Stream", "document_positions",
    "loader", "share_of_samples",
]  # fmt: skip

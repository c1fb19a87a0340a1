"""Data for many ranks: which samples each rank gets, in which order, and where a run resumes.

Read `samples.py` (map-style datasets), `stream.py` (iterable ones), `collate.py` (samples to batches), then
`loader.py`, which joins them into a `Loader` whose position can be saved.
"""

from .loader import Loader, loader
from .samples import BatchShare, Last, ReplicaBatchSampler, share_of_samples
from .stream import Stream

__all__ = ["BatchShare", "Last", "Loader", "ReplicaBatchSampler", "Stream", "loader", "share_of_samples"]

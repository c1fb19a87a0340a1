"""Data for many ranks: which rows are whose, in which order, and where a run goes on after a stop."""

from .loader import Loader, loader
from .samples import BatchShare, Last, ReplicaBatchSampler, share_of_samples
from .stream import Stream

__all__ = ["BatchShare", "Last", "Loader", "ReplicaBatchSampler", "Stream", "loader", "share_of_samples"]

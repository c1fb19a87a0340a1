"""Data for many ranks: which rows are whose, in which order, and where a run goes on after a stop."""

from .loader import Loader, loader
from .rows import Last, Rows, Sharing, share
from .stream import Stream

__all__ = ["Last", "Loader", "Rows", "Sharing", "Stream", "loader", "share"]

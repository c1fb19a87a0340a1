"""Plans for many devices, run for real at small sizes in one process, before there are so many."""

from .rehearsal import rehearse
from .result import Rehearsal

__all__ = ["Rehearsal", "rehearse"]

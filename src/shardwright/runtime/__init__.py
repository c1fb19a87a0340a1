"""What generated code imports: groups, converters, algorithms, pieces, and the loop around them."""

from . import comm
from .holding import Held, Piece, cut
from .lookup import embedding_rows
from .losses import cross_entropy, nll_loss
from .norms import batch_norm
from .stage import Stage, find, recompute, share
from .world import Group, Groups, World, start

__all__ = [
    "Group",
    "Groups",
    "Held",
    "Piece",
    "Stage",
    "World",
    "batch_norm",
    "comm",
    "cross_entropy",
    "cut",
    "embedding_rows",
    "find",
    "nll_loss",
    "recompute",
    "share",
    "start",
]

"""What generated code imports: groups, converters, algorithms, pieces, and the loop around them."""

from shardwright.tie import cond, scan, while_loop

from . import comm
from .holding import Held, Piece, cut
from .later import fan_in_later
from .linears import fan_out_linear, fan_out_linears, gather_linear, gather_linears
from .lookup import embedding_rows
from .losses import begin_count, count_labels, cross_entropy, nll_loss
from .norms import batch_norm
from .own import Part, find, own
from .stage import Count, Stage, recompute, share
from .world import Group, Groups, World, start

__all__ = [
    "Count",
    "Group",
    "Groups",
    "Held",
    "Part",
    "Piece",
    "Stage",
    "World",
    "batch_norm",
    "begin_count",
    "comm",
    "cond",
    "count_labels",
    "cross_entropy",
    "cut",
    "embedding_rows",
    "fan_in_later",
    "fan_out_linear",
    "fan_out_linears",
    "find",
    "gather_linear",
    "gather_linears",
    "nll_loss",
    "own",
    "recompute",
    "scan",
    "share",
    "start",
    "while_loop",
]

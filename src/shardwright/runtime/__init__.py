"""What generated code imports, and the model around it.

Read `model/` (the compiled model and the base class of programs), `collectives/` (reshards and what they run on),
`parameters/` (how parameters are stored, gradient sync, ZeRO), `optimizer/`, `algorithms/` (ops whose shards
communicate), `pipeline/` (schedules at run time), `faults/` (hangs, NaN, desynchronized ranks). `world.py` is the only
file that reads rank, world size and environment.
"""

from shardwright.control_flow import cond, scan, while_loop
from shardwright.storage import ParameterSpec

from .algorithms.attention import attention
from .algorithms.chunked_losses import linear_cross_entropy, logsumexp
from .algorithms.context_attention import context_attention
from .algorithms.custom_ops import SplitDim, custom_algorithm, find
from .algorithms.linears import all_gather_linear, all_gather_linears, replicate_linear, replicate_linears
from .algorithms.lookup import embedding_rows
from .algorithms.losses import begin_count, count_labels, cross_entropy, nll_loss
from .algorithms.norms import batch_norm
from .collectives import comm
from .collectives.comm import R
from .collectives.pending import all_reduce_pending
from .model.program import Program, PrologueCount, local_size, recompute
from .parameters.table import ParameterEntry, shard
from .world import Group, Groups, World, start

__all__ = [
    "Group",
    "Groups",
    "ParameterEntry",
    "ParameterSpec",
    "Program",
    "PrologueCount",
    "R",
    "SplitDim",
    "World",
    "all_gather_linear",
    "all_gather_linears",
    "all_reduce_pending",
    "attention",
    "batch_norm",
    "begin_count",
    "comm",
    "cond",
    "context_attention",
    "count_labels",
    "cross_entropy",
    "custom_algorithm",
    "embedding_rows",
    "find",
    "linear_cross_entropy",
    "local_size",
    "logsumexp",
    "nll_loss",
    "recompute",
    "replicate_linear",
    "replicate_linears",
    "scan",
    "shard",
    "start",
    "while_loop",
]

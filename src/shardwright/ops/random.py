"""Ops that draw random numbers.

Masks of dropout are drawn by the key of the op and the position of an element in the full tensor, so that the op may
be split and draws the same. All others are drawn whole, the same on every rank.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir import Op
from ..layout import Shard
from ..rules.dims import label_dims, write_rule
from ..rules.notation import Rule
from ..rules.registry import OpCall
from .contexts import Passes, ProgramOnRank, RankRun, RuntimeArguments, TracedCall
from .creation import canonical_creation, canonical_like
from .localizing import splits
from .printing import Printing, axes_text, show_shard
from .spec import define, target_of

DROPOUTS = (target_of("dropout"), target_of("native_dropout"))


def dropout(call: OpCall) -> Rule:
    """Each element by itself; the mask is drawn by position (`runtime/algorithms/random.py`)."""
    names = label_dims(call.shape)
    return write_rule([names], [names] * len(call.outputs), [1])


def canonical_dropout(call: TracedCall) -> list[str]:
    if call.arguments["p"] == 0 or not call.arguments["train"]:
        return call.identity(call.first)
    return call.keep()


def local_dropout(program: ProgramOnRank, op: Op) -> Op:
    """Masks are drawn by the op's key and the coordinates on the axes that split the value."""
    where = splits(program.layouts[op.outputs[0]])
    return replace(op, target="runtime.dropout").with_arguments(op_key=op.name, splits=where)


def print_splits(p: Printing) -> str:
    where: tuple[tuple[int, Shard], ...] = p.literal("splits")
    shown = ", ".join(f"({dim}, {axes_text((shard.axis,))}, {show_shard(shard)})" for dim, shard in where)
    return f", splits=[{shown}]" if where else ""


def print_dropout(p: Printing) -> str:
    training = "" if p.literal("train", True) else ", training=False"
    return f"self.random.dropout({p.first()}, {p['p']}, {p['op_key']}{print_splits(p)}{training})"


def groups_of_splits(run: RankRun, a: RuntimeArguments) -> list[tuple[int, object, object]]:
    return [(dim, run.group(shard.axis), shard) for dim, shard in a["splits"]]


def run_dropout(run: RankRun, a: RuntimeArguments) -> object:
    return run.random.dropout(a.tensors[0], a["p"], a["op_key"], groups_of_splits(run, a))


DROPPED = {
    "rule": dropout, "keyed": True, "localize": local_dropout, "saved": "",
    "work": (1.0, 2.0),  # x * mask, then * scale; backward reads a gradient that others may hold
    "saved_extra": lambda call, signature: call.outputs[0].elements,  # a mask of one byte an element
    "passes": Passes(outputs=1.5, results=1.5, gradients=1),
}  # fmt: skip
define("dropout", canonical=canonical_dropout, keeps_order=True, **DROPPED)
define("native_dropout", **DROPPED)
define("alpha_dropout feature_alpha_dropout feature_dropout", canonical=canonical_dropout)
define("runtime.dropout", keyed=True, prints=print_dropout, reads="self.random.dropout(x, p, op_key, splits, train)",
       positional=3, keywords={"training": "train"}, unsaid={"train": True}, runs=run_dropout)  # fmt: skip
define("rand randn randperm", canonical=canonical_creation)
define("rand_like randn_like", canonical=canonical_like, gradient="none")
define("randint_like", gradient="none")

"""Losses: each row by itself, then none, a sum or a mean over all of them."""

from __future__ import annotations

from .dims import broadcast_shape, label_dims, marked, stretched, write_rule
from .notation import Rule, parse
from .registry import OpCall, letters, rule

NONE, MEAN, SUM = 0, 1, 2
"""torch's numbers for `reduction`."""


@rule("aten.cross_entropy_loss.default")
def cross_entropy(call: OpCall) -> Rule | None:
    """Rows by the exact mean (local sum over global count), classes by the algorithm that sums inside."""
    logits, target = call.inputs[0], call.inputs[1]
    reduction = call.op.argument("reduction", MEAN)
    probabilities = target.floating
    if len(logits.shape) == 1 and len(call.inputs) > 2:
        return None  # a single row with weights by class
    if len(logits.shape) == 1:
        return parse(f"c=classes, {'' if not probabilities else 'c=classes'} -> ")
    rows = letters(len(logits.shape) - 1, "n")
    mark = {NONE: "", MEAN: "=rows+", SUM: "+"}[reduction]
    first, rest = rows[0] + mark, [row + mark for row in rows[1:]]
    classes = str(logits.shape[1]) if probabilities or len(call.inputs) > 2 else "c=classes"
    scores = [first, classes, *rest]
    wanted = scores if probabilities else [first, *rest]
    weight = [[str(logits.shape[1])]] * (len(call.inputs) - 2)
    return write_rule([scores, wanted, *weight], [rows if reduction == NONE else []])


@rule("call.shardwright.capture.tracing.ctc_loss.ctc_losses")
def ctc_losses(call: OpCall) -> Rule | None:
    """Each sample by itself, if its labels are a row of their own."""
    scores, labels = call.inputs[:2]
    return parse("t^ n c^, n s^, n, n -> n") if (len(scores.shape), len(labels.shape)) == (3, 2) else None


@rule("aten.nll_loss_nd.default", "aten.nll_loss.default")
def nll_loss(call: OpCall) -> Rule | None:
    if len(call.shape) == 1:
        return None  # a single row
    reduction = call.op.argument("reduction", MEAN)
    rows = letters(len(call.inputs[1].shape), "n")
    mark = {NONE: "", MEAN: "=rows+", SUM: "+"}[reduction]
    marks = [row + mark for row in rows]
    classes = str(call.shape[1])
    weight = [[classes]] * (len(call.inputs) - 2)
    return write_rule([[marks[0], classes, *marks[1:]], marks, *weight], [rows if reduction == NONE else []])


@rule("aten.mse_loss.default", "aten.l1_loss.default", "aten.smooth_l1_loss.default", "aten.huber_loss.default",
      "aten.binary_cross_entropy.default", "aten.binary_cross_entropy_with_logits.default",
      "aten.kl_div.default", "aten.soft_margin_loss.default", "aten.poisson_nll_loss.default",
      "aten.hinge_embedding_loss.default", "aten.margin_ranking_loss.default")  # fmt: skip
def elementwise_loss(call: OpCall) -> Rule:
    """Each element by itself, then none, a mean (lower.local divides by the whole) or a sum."""
    shape = broadcast_shape([value.shape for value in call.inputs])
    names = label_dims(shape)
    reduction = call.op.argument("reduction", MEAN)
    mark = "" if reduction == NONE else "+"
    inputs = [[marked(n, mark) for n in stretched(value.shape, shape, names)] for value in call.inputs]
    return write_rule(inputs, [names if reduction == NONE else []])


@rule("aten.cosine_embedding_loss.default", "aten.triplet_margin_loss.default", "aten.multi_margin_loss.default",
      "aten.multilabel_margin_loss.default")  # fmt: skip
def row_loss(call: OpCall) -> Rule | None:
    """A number for each row, from all of its columns."""
    if len(call.shape) != 2 or any(value.shape[:1] != call.shape[:1] for value in call.inputs):
        return None  # weights by class, or a single row
    reduction = call.op.argument("reduction", MEAN)
    row = marked(label_dims(call.shape)[0], "" if reduction == NONE else "+")
    inputs = [[row, *map(str, value.shape[1:])] for value in call.inputs]
    return write_rule(inputs, [[row] if reduction == NONE else []])


@rule("aten.cosine_similarity.default", "aten.pairwise_distance.default")
def along_one(call: OpCall) -> Rule | None:
    """Two tensors compared along a dim; the others broadcast."""
    a, b = (value.shape for value in call.inputs)
    if len(a) != len(b):
        return None
    dim = call.dim("dim", 1) if "cosine" in call.op.target else len(a) - 1
    shape = broadcast_shape([a, b])
    names = label_dims(shape)
    names[dim] = str(shape[dim])
    keep = bool(call.op.argument("keepdim", False))
    result = ["1" if at == dim else name for at, name in enumerate(names) if at != dim or keep]
    return write_rule([stretched(operand, shape, names) for operand in (a, b)], [result])

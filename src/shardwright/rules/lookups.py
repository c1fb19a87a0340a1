"""Lookups and losses: ops that read integers, and the algorithms that split them anyway."""

from __future__ import annotations

from .notation import Rule, parse
from .registry import Call, letters, rule
from .views import named


@rule("embedding")
def embedding(call: Call) -> Rule:
    """A table split on its rows is looked up by the algorithm "rows", which leaves a partial sum."""
    weight, ids = (call.inputs[0], call.inputs[1])
    places = " ".join(n if s != 1 else "1" for n, s in zip(letters(len(ids.shape), "i"), ids.shape, strict=True))
    return (
        parse(f"v=rows+ d ~1, {places} -> {places} d") if weight.shape[0] > 1 else parse(f"1 d, {places} -> {places} d")
    )


@rule("aten.cross_entropy_loss.default")
def cross_entropy(call: Call) -> Rule:
    """Rows by the exact mean (local sum over global count), classes by the algorithm that sums inside."""
    logits, target = call.inputs[0], call.inputs[1]
    reduction = call.op.argument("reduction", 1)
    probabilities = target.floating
    if len(logits.shape) == 1:
        return parse(f"c=classes, {'' if not probabilities else 'c=classes'} -> ")
    rows = letters(len(logits.shape) - 1, "n")
    mark = {0: "", 1: "=rows+", 2: "+"}[reduction]
    first, rest = rows[0] + mark, [row + mark for row in rows[1:]]
    classes = str(logits.shape[1]) if probabilities or len(call.inputs) > 2 else "c=classes"
    scores = " ".join([first, classes, *rest])
    wanted = scores if probabilities else " ".join([first, *rest])
    weight = f", {logits.shape[1]}" * (len(call.inputs) - 2)
    return parse(f"{scores}, {wanted}{weight} -> {' '.join(rows) if reduction == 0 else ''}")


@rule("aten.nll_loss_nd.default", "aten.nll_loss.default", "aten.nll_loss_forward.default")
def nll_loss(call: Call) -> Rule:
    reduction = call.op.argument("reduction", 1)
    rows = letters(len(call.inputs[1].shape), "n")
    mark = {0: "", 1: "=rows+", 2: "+"}[reduction]
    marked = [row + mark for row in rows]
    classes = str(call.shape[1])
    weight = f", {classes}" * (len(call.inputs) - 2)
    result = " ".join(rows) if reduction == 0 else ""
    outs = ", ".join([result, *["" for _ in call.outputs[1:]]])
    return parse(f"{' '.join([marked[0], classes, *marked[1:]])}, {' '.join(marked)}{weight} -> {outs}")


@rule("aten.mse_loss.default", "aten.l1_loss.default", "aten.smooth_l1_loss.default", "aten.huber_loss.default",
      "aten.binary_cross_entropy.default", "aten.binary_cross_entropy_with_logits.default",
      "aten.kl_div.default", "aten.soft_margin_loss.default")  # fmt: skip
def elementwise_loss(call: Call) -> Rule | None:
    """Each element by itself, then none, a mean (lower.local divides by the whole) or a sum."""
    if any(value.shape != call.shape for value in call.inputs):
        return None
    names = named(call.shape)
    reduction = call.op.argument("reduction", 1)
    if reduction == 0:
        return parse(f"{', '.join([' '.join(names)] * len(call.inputs))} -> {' '.join(names)}")
    summed = " ".join(name if name == "1" else f"{name}+" for name in names)
    return parse(f"{', '.join([summed] * len(call.inputs))} -> ")


@rule("gather")
def gather(call: Call) -> Rule:
    """Dims other than the one gathered along are free where the index has the same size."""
    dim, index = call.dim(), call.inputs[1].shape
    names = named(call.shape)
    left, right = [], []
    for at, (name, size) in enumerate(zip(names, call.shape, strict=True)):
        free = at != dim and index[at] == size
        left.append(name if free else str(size))
        right.append(name if free else str(index[at]))
    return parse(f"{' '.join(left)} ~1, {' '.join(right)} -> {' '.join(right)}")


@rule("index_select")
def index_select(call: Call) -> Rule:
    dim, names = call.dim(), named(call.shape)
    source = list(names)
    source[dim] = str(call.shape[dim])
    names[dim] = "i" if call.outputs[0].shape[dim] != 1 else "1"
    return parse(f"{' '.join(source)} ~1, {names[dim]} -> {' '.join(names)}")


@rule("aten.index.Tensor")
def index(call: Call) -> Rule | None:
    """Integer tensors in the leading places: those dims are read whole, the index's own dims and the rest are free."""
    held = call.op.argument("indices", ())
    count = len(held)
    if any(item is None for item in held) or any(value.dtype == "bool" for value in call.inputs[1:]):
        return None
    out = call.outputs[0].shape
    rest = named(call.shape[count:], "r")
    places = out[: len(out) - len(rest)]
    labels = letters(len(places), "i")
    shown = [name if size != 1 else "1" for name, size in zip(labels, places, strict=True)]
    terms = []
    for value in call.inputs[1:]:
        own = shown[len(places) - len(value.shape) :]
        terms.append(" ".join(n if s != 1 else "1" for n, s in zip(own, value.shape, strict=True)))
    source = [*map(str, call.shape[:count]), *rest]
    return parse(f"{' '.join(source)} ~1, {', '.join(terms)} -> {' '.join([*shown, *rest])}")


@rule("one_hot")
def one_hot(call: Call) -> Rule:
    names = named(call.shape)
    return parse(f"{' '.join(names)} -> {' '.join([*names, str(call.outputs[0].shape[-1])])}")

"""Losses: each row by itself, then none, a sum or a mean over all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..ir import Op
from ..layout import Mesh
from ..rules.dims import broadcast_shape, label_dims, marked, stretched, write_rule
from ..rules.notation import Rule, parse
from ..rules.registry import OpCall, letters
from ..rules.signature import Signature
from .contexts import AlgorithmCollective, LocalCall, Passes, ProgramOnRank, RankRun, RuntimeArguments
from .localizing import cut_axes, divided, in_mesh_order, one_cut, split_axes
from .norms import WIDE
from .printing import REDUCTIONS, Printer, Printing, axes_text, plain
from .spec import Kernel, define, input_work

NONE, MEAN, SUM = 0, 1, 2
"""torch's numbers for `reduction`."""

COUNTED = ("runtime.cross_entropy", "runtime.nll_loss")
"""Losses whose mean divides by a count of labels."""

COUNT = 8
"""Bytes of a count."""

# -- rules


def cross_entropy(call: OpCall) -> Rule | None:
    """Rows by the exact mean (local sum over global count), classes by the algorithm that sums inside."""
    logits, target = call.inputs[0], call.inputs[1]
    reduction = call.op.argument("reduction", MEAN)
    probabilities = target.floating
    if len(logits.shape) == 1 and (probabilities or len(call.inputs) > 2):
        return None  # a single row with probabilities of classes, or weights of them
    if len(logits.shape) == 1:
        return parse("c=classes,  -> ")
    samples = letters(len(logits.shape) - 1, "n")
    mark = {NONE: "", MEAN: "=samples+", SUM: "+"}[reduction]
    first, rest = samples[0] + mark, [row + mark for row in samples[1:]]
    classes = str(logits.shape[1]) if probabilities or len(call.inputs) > 2 else "c=classes"
    scores = [first, classes, *rest]
    wanted = scores if probabilities else [first, *rest]
    weight = [[str(logits.shape[1])]] * (len(call.inputs) - 2)
    return write_rule([scores, wanted, *weight], [samples if reduction == NONE else []])


def ctc_losses(call: OpCall) -> Rule | None:
    """Each sample by itself, if its labels are a row of their own."""
    scores, labels = call.inputs[:2]
    return parse("t^ n c^, n s^, n, n -> n") if (len(scores.shape), len(labels.shape)) == (3, 2) else None


def nll_loss(call: OpCall) -> Rule | None:
    if len(call.shape) == 1:
        return None  # a single row
    reduction = call.op.argument("reduction", MEAN)
    samples = letters(len(call.inputs[1].shape), "n")
    mark = {NONE: "", MEAN: "=samples+", SUM: "+"}[reduction]
    marks = [row + mark for row in samples]
    classes = str(call.shape[1])
    weight = [[classes]] * (len(call.inputs) - 2)
    return write_rule([[marks[0], classes, *marks[1:]], marks, *weight], [samples if reduction == NONE else []])


def elementwise_loss(call: OpCall) -> Rule:
    """Each element by itself, then none, a mean (`local_loss` divides by the reduced) or a sum."""
    shape = broadcast_shape([value.shape for value in call.inputs])
    names = label_dims(shape)
    reduction = call.op.argument("reduction", MEAN)
    mark = "" if reduction == NONE else "+"
    inputs = [[marked(n, mark) for n in stretched(value.shape, shape, names)] for value in call.inputs]
    return write_rule(inputs, [names if reduction == NONE else []])


def row_loss(call: OpCall) -> Rule | None:
    """A number for each row, from all of its columns."""
    if len(call.shape) != 2 or any(value.shape[:1] != call.shape[:1] for value in call.inputs):
        return None  # weights by class, or a single row
    reduction = call.op.argument("reduction", MEAN)
    row = marked(label_dims(call.shape)[0], "" if reduction == NONE else "+")
    inputs = [[row, *map(str, value.shape[1:])] for value in call.inputs]
    return write_rule(inputs, [[row] if reduction == NONE else []])


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


# -- on a rank


def local_loss(program: ProgramOnRank, op: Op) -> Op | tuple[Op, ...]:
    """A mean over split elements, or samples, is the local sum over their whole number."""
    split = any(cut_axes(program.layouts[name]) for name in op.inputs)
    if op.argument("reduction", MEAN) != MEAN or not split:
        return op
    signature = program.analysis.signatures[op.name]
    assert signature.rule is not None
    atoms = program.analysis.atoms
    count = math.prod(atoms.product(signature.labels[label]) for label in signature.rule.sums)
    return divided(op.with_arguments(reduction=SUM), count)


def local_cross_entropy(program: ProgramOnRank, op: Op) -> Op:
    logits = program.layouts[op.inputs[0]]
    at = 1 if len(logits.shards) > 1 else 0
    classes = logits.shards[at]
    samples = tuple(axis for dim in range(len(logits.shards)) if dim != at for axis in split_axes(logits, dim))
    if not classes and (not samples or op.argument("reduction", MEAN) != MEAN):
        return op
    result = replace(op, target="runtime.cross_entropy").with_arguments(samples=in_mesh_order(program, samples))
    if classes:
        total = program.sizes_of(op.inputs[0])[at].global_size()
        axes, shard = one_cut(program, op, "classes", classes)
        result = result.with_arguments(classes=axes, sharding=shard, size=total)
    return result


def local_nll_loss(program: ProgramOnRank, op: Op) -> Op:
    samples = in_mesh_order(program, cut_axes(program.layouts[op.inputs[1]]))
    if not samples or op.argument("reduction", MEAN) != MEAN:
        return op
    return replace(op, target="runtime.nll_loss").with_arguments(samples=samples)


# -- in generated code


def print_loss(name: str) -> Printer:
    def show(p: Printing) -> str:
        reduction = p.literal("reduction", MEAN)
        extra = f", reduction={REDUCTIONS[reduction]}" if reduction != MEAN else ""
        return f"F.{name}({p['self']}, {p['target']}{extra})"

    return show


def print_cross_entropy(p: Printing) -> str:
    reduction = p.literal("reduction", MEAN)
    samples, classes = p.literal("samples"), p.literal("classes")
    shown = [p["self"], p["target"]]
    if samples:
        shown.append(f"samples={axes_text(samples)}")
    if classes:
        even = plain(p.literal("sharding"), p.many(classes))
        shown += [f"classes={axes_text(classes)}", *([] if even else [f"sharding={p['sharding']}"])]
        shown.append(f"size={p['size']}")
    shown += _which_labels(p)
    if reduction != MEAN:
        shown.append(f"reduction={REDUCTIONS[reduction]}")
    if p.literal("label_smoothing", 0.0):
        shown.append(f"label_smoothing={p['label_smoothing']}")
    if p.has("count"):
        shown.append(f"count={p['count']}")
    if p.literal("reduced"):
        shown.append("reduced=True")
    where = "runtime" if p.op.target.startswith("runtime.") else "F"
    return f"{where}.{'nll_loss' if 'nll' in p.op.target else 'cross_entropy'}({', '.join(shown)})"


def _which_labels(p: Printing) -> list[str]:
    defaults = [("weight", None), ("ignore_index", -100)]
    return [f"{key}={p[key]}" for key, usual in defaults if p.literal(key, usual) != usual]


def print_begin_count(p: Printing) -> str:
    samples = axes_text(p.literal("samples"))
    return f"runtime.begin_count({', '.join([p['target'], f'samples={samples}', *_which_labels(p)])})"


def print_count_labels(p: Printing) -> str:
    return f"runtime.count_labels({', '.join([p['target'], *_which_labels(p)])})"


# -- run op by op


def run_cross_entropy(run: RankRun, a: RuntimeArguments) -> object:
    return run.runtime.cross_entropy(
        a["self"], a["target"], samples=run.group(a["samples"]), classes=run.group(a["classes"]),
        sharding=a["sharding"], size=a["size"], weight=a["weight"], ignore_index=a.get("ignore_index", -100),
        reduction=_reduction(a), label_smoothing=a.get("label_smoothing", 0.0), count=a["count"],
        reduced=a.get("reduced", False),
    )  # fmt: skip


def run_nll_loss(run: RankRun, a: RuntimeArguments) -> object:
    return run.runtime.nll_loss(
        a["self"], a["target"], samples=run.group(a["samples"]), weight=a["weight"],
        ignore_index=a.get("ignore_index", -100), reduction=_reduction(a), count=a["count"],
        reduced=a.get("reduced", False),
    )  # fmt: skip


def _reduction(a: RuntimeArguments) -> str:
    return REDUCTIONS[a.get("reduction", MEAN)].strip('"')


def run_begin_count(run: RankRun, a: RuntimeArguments) -> object:
    return run.runtime.begin_count(
        a["target"], samples=run.group(a["samples"]), weight=a["weight"], ignore_index=a.get("ignore_index", -100)
    )()


# -- cost


def split_classes(call: LocalCall, signature: Signature) -> bool:
    """Whether a cross entropy runs on some of the classes: it keeps logits then, and no softmax."""
    shape = signature.analysis.graph.values[call.op.inputs[0]].shape
    classes = shape[1] if len(shape) > 1 else shape[0]
    labels = call.inputs[1]
    return not labels.dtype.startswith("float") and call.inputs[0].elements < 0.99 * classes * labels.elements


def saved_cross_entropy(call: LocalCall, signature: Signature, flat: Sequence[bool] | None) -> str:
    return "0 1" if split_classes(call, signature) else "1"


def log_softmax_bytes(call: LocalCall, signature: Signature) -> float:
    """The logarithm of the softmax; with split classes a few numbers for each row (`runtime/algorithms/losses.py`)."""
    if split_classes(call, signature):
        return call.inputs[1].elements * (8.0 + 8.0 + 2.0)
    return call.inputs[0].bytes + 4


def logits_work(call: LocalCall, signature: Signature, flat: Sequence[bool] | None) -> tuple[float, float]:
    """With split classes also the largest logit of each row, its label's place and sums, each of 8 bytes or less."""
    logits = call.inputs[0].bytes
    return (logits + 6 * 8 * call.inputs[1].elements, 0.0) if split_classes(call, signature) else (0.0, logits)


def send_loss(
    call: LocalCall, signature: Signature, axes: Mapping[str, tuple[str, ...]], mesh: Mesh
) -> list[AlgorithmCollective]:
    """Classes split: all_reduce of the largest, and of two or three sums, for each row. Rows split: of one count."""
    collectives = []
    if "classes" in axes:
        row_bytes = call.inputs[1].elements * WIDE.get(call.inputs[0].dtype, 4)
        sums = 3 if call.op.argument("label_smoothing", 0.0) else 2
        collectives += [
            AlgorithmCollective("all_reduce", count * row_bytes, axes["classes"], "forward") for count in (1, sums)
        ]
    if "samples" in axes:
        collectives.append(AlgorithmCollective("all_reduce", COUNT, axes["samples"], "forward"))
    return collectives


# -- definitions

LABELS = {"ignore_index": -100, "reduction": MEAN}
SMOOTHED = {**LABELS, "label_smoothing": 0.0}
define("cross_entropy_loss", rule=cross_entropy, localize=local_cross_entropy, kernel=Kernel.CROSS_ENTROPY,
       result="loss", saved=saved_cross_entropy, saved_extra=log_softmax_bytes, work=logits_work, collectives=send_loss,
       prints=print_cross_entropy, positional=2, defaults=SMOOTHED,
       reads="F.cross_entropy(self, target, weight, ignore_index, reduction, label_smoothing)")  # fmt: skip
define("runtime.cross_entropy", prints=print_cross_entropy, positional=2, defaults=SMOOTHED, runs=run_cross_entropy,
       reads="runtime.cross_entropy(self, target, samples, classes, sharding, size, weight, ignore_index, reduction, "
             "label_smoothing, count, reduced)")  # fmt: skip
define("nll_loss nll_loss_nd", rule=nll_loss, localize=local_nll_loss, saved="0 1", collectives=send_loss,
       result="loss", passes=Passes(inputs=0, gradients=1))  # reads one score a row, writes zeros for all  # fmt: skip
define("nll_loss2d", saved="0 1")
define("runtime.nll_loss", prints=print_cross_entropy, positional=2, defaults=LABELS, runs=run_nll_loss,
       reads="runtime.nll_loss(self, target, samples, weight, ignore_index, reduction, count, reduced)")  # fmt: skip
define("runtime.begin_count", prints=print_begin_count, positional=1, defaults={"ignore_index": -100},
       reads="runtime.begin_count(target, samples, weight, ignore_index)", runs=run_begin_count)  # fmt: skip
define("runtime.count_labels", prints=print_count_labels, positional=1, defaults={"ignore_index": -100},
       reads="runtime.count_labels(target, weight, ignore_index)")  # fmt: skip
define("call.shardwright.capture.tracing.ctc_loss.ctc_losses", rule=ctc_losses)

ELEMENTWISE = {"rule": elementwise_loss, "localize": local_loss, "result": "loss"}
FORM = {"positional": 2, "defaults": {"reduction": MEAN}}
IN_PLACE = {"keeps_storage": True, "work": input_work(1.0, 0.0)}  # torch reduces in the storage of the terms
define("mse_loss", saved="0 1", prints=print_loss("mse_loss"), reads="F.mse_loss(self, target, reduction)",
       **IN_PLACE, **ELEMENTWISE, **FORM)  # fmt: skip
define("l1_loss", saved="0", prints=print_loss("l1_loss"), reads="F.l1_loss(self, target, reduction)",
       work=input_work(2.0, 1.0), **ELEMENTWISE, **FORM)  # fmt: skip
define("smooth_l1_loss binary_cross_entropy soft_margin_loss", saved="0 1", **IN_PLACE, **ELEMENTWISE)
define("huber_loss", saved="0 1", work=input_work(1.0, 0.0), **ELEMENTWISE)
define("binary_cross_entropy_with_logits", saved="0 1", work=input_work(2.0, 1.0), **ELEMENTWISE)
define("kl_div", saved="1", work=input_work(3.0, 0.0), **ELEMENTWISE)
define("poisson_nll_loss hinge_embedding_loss margin_ranking_loss", **ELEMENTWISE)
define("cosine_embedding_loss triplet_margin_loss multi_margin_loss multilabel_margin_loss", rule=row_loss,
       localize=local_loss, result="loss")  # fmt: skip
define("cosine_similarity pairwise_distance", rule=along_one, work=input_work(3.0, 4.0))

"""A linear and the cross entropy of its logits as one call of the runtime, which lowering joins (`lower/`)."""

from __future__ import annotations

from .contexts import RankRun, RuntimeArguments
from .losses import MEAN, SMOOTHED, reduction_of
from .printing import REDUCTIONS, Printing, axes_text, plain
from .spec import define

CHUNKED = "runtime.linear_cross_entropy"


def print_linear_cross_entropy(p: Printing) -> str:
    shown = [p["input"], p["weight"], p["target"], f"chunks={p['chunks']}"]
    shown += [f"{key}={p[key]}" for key in ("bias", "slices", "steps", "logsumexp") if p.has(key)]
    rows, classes = p.literal("rows"), p.literal("classes")
    if rows:
        shown.append(f"rows={axes_text(rows)}")
    if classes:
        shown.append(f"classes={axes_text(classes)}")
        shown += [] if plain(p.literal("sharding"), p.many(classes)) else [f"sharding={p['sharding']}"]
        shown.append(f"size={p['size']}")
    shown += [f"class_weight={p['class_weight']}"] if p.has("class_weight") else []
    for key, usual in (("ignore_index", -100), ("label_smoothing", 0.0)):
        shown += [f"{key}={p[key]}"] if p.literal(key, usual) != usual else []
    reduction = p.literal("reduction", MEAN)
    shown += [f"reduction={REDUCTIONS[reduction]}"] if reduction != MEAN else []
    shown += [f"count={p['count']}"] if p.has("count") else []
    shown += ["whole=True"] if p.literal("whole") else []
    return f"{CHUNKED}({', '.join(shown)})"


def run_linear_cross_entropy(run: RankRun, a: RuntimeArguments) -> object:
    return run.runtime.linear_cross_entropy(
        a["input"], a["weight"], a["target"], chunks=a["chunks"], bias=a["bias"], slices=a.get("slices", ()),
        steps=a.get("steps", ()), logsumexp=a["logsumexp"], rows=run.group(a["rows"]), classes=run.group(a["classes"]),
        sharding=a["sharding"], size=a["size"], class_weight=a["class_weight"],
        ignore_index=a.get("ignore_index", -100), reduction=reduction_of(a),
        label_smoothing=a.get("label_smoothing", 0.0), count=a["count"], whole=a.get("whole", False),
    )  # fmt: skip


define(CHUNKED, prints=print_linear_cross_entropy, positional=3, unsaid=SMOOTHED, runs=run_linear_cross_entropy,
       reads="runtime.linear_cross_entropy(input, weight, target, chunks, bias, slices, steps, logsumexp, rows, "
             "classes, sharding, size, class_weight, ignore_index, reduction, label_smoothing, count, "
             "whole)")  # fmt: skip

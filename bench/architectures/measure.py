"""One row of the table: a model with or without labels, captured, on two ranks by dp and by tp."""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, cast

import torch

from shardwright.capture import CapturedGraph, find_opaque
from shardwright.cost import flops
from shardwright.ir import Graph, Op
from shardwright.ops.attention import STRUCTURED
from shardwright.parallelize import captured_graph
from shardwright.plan import build_plan, parse_plan_string
from shardwright.plan.request import PlanRequest
from shardwright.probe import probing
from shardwright.rules import analyse
from shardwright.verify.measure import TOLERANCE
from shardwright.verify.parity import ComparisonOptions, Reference, compare_plan, make_reference, make_task

from .configs import CannotBuild, small_config
from .inputs import BATCH, Maker, fit, message
from .listed import Architecture

Depth = Literal["built", "captured", "verified"]
STEPS = 2
NO_SPLIT = ("fan", "whole")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What came out for an architecture with or without labels. Times are seconds."""

    model_type: str
    kind: str
    model: str
    labels: bool
    built: bool = False
    captured: bool = False
    parts: str = ""  # submodules that had to stay as they are (opaque="auto"); empty if it was captured whole
    dp: bool = False
    tp: bool = False
    split: float = 0.0  # the share of arithmetic that tp splits
    whole: str = ""  # the targets that take the most of what it does not split
    capture_seconds: float = 0.0
    dp_seconds: float = 0.0
    tp_seconds: float = 0.0
    reason: str = ""  # why the first stage that failed did
    tp_reason: str = ""
    inputs: str = ""
    parameters: int = 0
    dtype: str = "float64"  # of the comparison; float32 where the model itself can't run in float64
    attention: int = 0  # attention ops
    causal: int = 0  # those of them that run with is_causal, without a mask
    unmasked: int = 0  # those that see everything, without a mask
    structured: int = 0  # those that run by what their mask means: a window, documents, padded keys
    masks: str = ""  # what the masks of the others are

    @property
    def seconds(self) -> float:
        return self.capture_seconds + self.dp_seconds + self.tp_seconds


FIELDS = tuple(field.name for field in fields(Row))


def build(architecture: Architecture) -> tuple[Any, dict[str, Any], dict[str, Any] | CannotBuild | None]:
    """A small model, its inputs, and its labels if it takes any."""
    torch.manual_seed(0)
    try:
        actual = architecture.model_class()
        config = small_config(actual.config_class)
        model = actual(config).float().train()
        if model._can_set_experts_implementation():
            model.set_experts_implementation("batched_mm")  # the default knows no float64, and eager loops over data
    except Exception as error:
        raise CannotBuild(f"{message(error)} {_place(error)}") from error
    _stir(model)
    maker = Maker(architecture, model)
    inputs, outputs = fit(maker)
    return model, inputs, labels_for(maker, inputs, outputs)


def labels_for(maker: Maker, inputs: dict[str, Any], outputs: Any) -> dict[str, Any] | CannotBuild | None:
    """What the model takes for a loss; None if it has none, and an error if none could be made."""
    try:
        labels = maker.labels(outputs, inputs)
        if labels is not None:
            with torch.no_grad():
                maker.model(**_with(inputs, labels))
    except Exception as error:
        return CannotBuild(f"with labels: {message(error)} {_place(error)}")
    return labels


def rows(architecture: Architecture, depth: Depth = "verified") -> Iterator[Row]:
    """The rows of an architecture: without labels, and with them if its model takes any."""
    look = {"built": lambda row, *_: row, "captured": look_at_masks, "verified": measure}[depth]
    first = Row(model_type=architecture.model_type, kind=architecture.kind, model=architecture.model, labels=False)
    with _quiet():
        try:
            model, inputs, labels = build(architecture)
        except CannotBuild as error:
            yield replace(first, reason=str(error))
            return
        count = sum(parameter.numel() for parameter in model.parameters())
        first = replace(first, built=True, parameters=count, inputs=" ".join(inputs))
        yield look(first, model, inputs)
        if isinstance(labels, CannotBuild):
            yield replace(first, built=False, labels=True, reason=str(labels))
        elif labels is not None:
            passed = _with(inputs, labels)
            second = replace(first, labels=True, inputs=" ".join(passed))
            yield look(second, model, passed)


def measure(row: Row, model: Any, example: dict[str, Any]) -> Row:
    """Capture once, whole or else in parts, then hold both plans against the original."""
    begun = time.perf_counter()
    reason = ""
    for how in ("marked", "auto"):
        try:
            row = replace(row, dtype="float64" if _runs_double(model, example) else "float32")
            task = make_task(model, example, getattr(torch, row.dtype), torch.device("cpu"), steps=STEPS)
            find_opaque(task.module, cast(Literal["marked", "auto"], how))
            reference = make_reference(task)
            break
        except Exception as error:
            reason = reason or f"{message(error)} {_place(error)}"  # of the first try: why it can't be whole
    else:
        return replace(row, reason=reason, capture_seconds=time.perf_counter() - begun)
    kept = reference.side.captured("train").opaques.values()
    parts = " ".join(dict.fromkeys(call.path for call in kept if not call.rule))
    row = replace(row, captured=True, parts=parts, capture_seconds=time.perf_counter() - begun)
    bad = [check for check in reference.checks if not check.passed]
    if bad:
        why = f"the graph differs from the model: {bad[0].name} by {bad[0].deviation:.1e}"
        return replace(row, captured=False, reason=why)
    row = replace(row, **attention_masks(reference.side.captured("train").graph))
    share, whole = split_share(reference.side.captured("train"))
    limit = TOLERANCE[getattr(torch, row.dtype)]
    dp, dp_seconds, dp_reason = _verified(reference, "dp=2", limit)
    tp, tp_seconds, tp_reason = _verified(reference, "tp=2", limit)
    return replace(row, dp=dp, tp=tp, dp_seconds=dp_seconds, tp_seconds=tp_seconds, split=share, whole=whole,
                   reason=dp_reason or reason, tp_reason=tp_reason)  # fmt: skip


def look_at_masks(row: Row, model: Any, example: dict[str, Any]) -> Row:
    """Capture alone, for what its attention ops read."""
    for how in ("marked", "auto"):
        try:
            graph = captured_graph(model, example, opaque=cast(Literal["marked", "auto"], how)).graph
            return replace(row, captured=True, **attention_masks(graph))
        except Exception as error:
            row = replace(row, reason=f"{message(error)} {_place(error)}")
    return row


def attention_masks(graph: Graph) -> dict[str, Any]:
    """How many attention ops there are, how many run without a dense mask, and what the others' masks are."""
    fused = [op for op in graph.ops if op.target == "aten.scaled_dot_product_attention.default"]
    structured = [op for op in graph.ops if op.target == STRUCTURED]
    free = [op for op in fused if op.tensor("attn_mask") is None]
    by_key = [op for op in fused if _is_by_key(graph, op)]
    dense = {str(op.mask or "unknown") for op in fused if op not in free and op not in by_key}
    causal = sum(bool(op.argument("is_causal")) for op in free)
    return {
        "attention": len(fused) + len(structured), "causal": causal, "unmasked": len(free) - causal,
        "structured": len(structured) + len(by_key), "masks": "; ".join(sorted(dense)),
    }  # fmt: skip


def _is_by_key(graph: Graph, op: Op) -> bool:
    """Whether a mask is alike for all queries, and known to be of padding."""
    mask = op.tensor("attn_mask")
    return mask is not None and op.mask is not None and graph.values[mask].shape[-2:-1] in ((), (1,))


def split_share(captured: CapturedGraph) -> tuple[float, str]:
    """The share of a graph's arithmetic that tp=2 splits, and which targets take the most of the rest."""
    graph = captured.graph
    analysis = analyse(graph, probing(captured.functions))
    choices = build_plan(graph, parse_plan_string("tp=2"), analysis).choices(graph.entry)
    total, split = 0.0, 0.0
    left: dict[str, float] = {}
    for op in graph.ops:
        if all(name in analysis.constants for name in op.outputs):
            continue  # computed once, for all steps
        work = flops(analysis.signatures[op.name])
        total += work
        role = choices.get(op.name, {}).get("tp", "whole")
        if role in NO_SPLIT or role.startswith("partial:"):
            name = op.target + ("" if analysis.signatures[op.name].rule is not None else " (no rule)")
            left[name] = left.get(name, 0.0) + work
        else:
            split += work
    most = sorted(left, key=lambda name: -left[name])[:3]
    return split / total if total else 0.0, ", ".join(f"{name} {left[name] / total:.0%}" for name in most)


def _runs_double(model: Any, example: dict[str, Any]) -> bool:
    """Whether the model runs in float64: some make float32 tensors on the way and multiply by them."""
    task = make_task(model, example, torch.float64, torch.device("cpu"), steps=1)
    try:
        with torch.no_grad():
            task.module(**task.kwargs)
    except RuntimeError:
        return False
    return True


def _verified(reference: Reference, plan: str, limit: float) -> tuple[bool, float, str]:
    """Whether the program of a plan does what the original does, how long that took, and why not."""
    begun = time.perf_counter()
    try:
        run = ComparisonOptions(limit=limit, timeout=90)
        report = compare_plan(reference, PlanRequest.read(plan), 2, run, name=plan)
    except Exception as error:
        return False, time.perf_counter() - begun, f"{plan}: {message(error)} {_place(error)}"
    seconds = time.perf_counter() - begun
    if report.passed:
        return True, seconds, ""
    worst = report.failures[0] if report.failures else None
    why = f"{worst.kind} {worst.name} {worst.deviation:.1e} off" if worst else "nothing was compared"
    return False, seconds, f"{plan}: {len(report.failures)} of {len(report.rows)} tensors differ, {why}"


def _stir(model: Any) -> None:
    """Parameters that start as zeros or ones hide what is wrong with them."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))


def _with(inputs: dict[str, Any], labels: dict[str, Any] | None) -> dict[str, Any]:
    passed = {**inputs, **(labels or {})}
    if labels and "labels" in labels:
        passed.pop("decoder_input_ids", None)  # made from the labels
    return passed


def _place(error: BaseException) -> str:
    """The innermost line of the error's trace that is not torch's."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/torch/" not in f.filename]
    if not frames:
        return ""
    last = frames[-1]
    return f"[{'/'.join(last.filename.split('/')[-2:])}:{last.lineno}]"


@contextmanager
def _quiet() -> Iterator[None]:
    import logging

    from transformers.utils import logging as theirs

    theirs.set_verbosity_error()
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


__all__ = ["BATCH", "FIELDS", "Row", "measure", "rows", "split_share"]

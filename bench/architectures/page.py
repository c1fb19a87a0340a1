"""The results as a page of the docs: shares against the aims, the table, and why what fails does."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Sequence
from importlib.metadata import version

from .exceptions import AT_FAULT, INPUTS, LEFT_OUT, TEXT
from .listed import KINDS
from .measure import Row

AIMS = {"whole": None, "captured": 0.95, "dp": 0.95, "tp": 0.90, "split": 0.90}
ENOUGH = 0.8
ONLY_TEXT = {"input_ids", "attention_mask", "labels", "decoder_input_ids"}
MARK = {True: "yes", False: "**no**"}


def _captured(row: Row) -> str:
    return "in parts" if row.parts and row.captured else MARK[row.captured]


def page(rows: Sequence[Row]) -> str:
    """The whole page, from the rows of the CSV."""
    built = [row for row in rows if row.built]
    unbuilt = sorted(row.model_type for row in rows if not row.built)
    types = {row.model_type for row in built}
    parts = [
        "# Coverage of transformers",
        f"Made by `python -m bench.coverage` from `bench/coverage.csv`. transformers {version('transformers')}, "
        f"torch {version('torch')}, {platform.python_implementation()} {platform.python_version()}, two cores.",
        f"{len(types)} architectures, {len(built)} rows: each model from a small config in training mode, with labels "
        "and without. A row is *captured* if its graph does what the model does: whole, or in parts, with the smallest "
        'submodules that no graph can say kept as they are (`CompileOptions(opaque="auto")`). *dp* or *tp* is '
        "verified if two ranks with that plan give the outputs, the gradients, the buffers and the parameters after "
        "two steps that the original gives, to 1e-10 in float64. *Split* is the share of the forward arithmetic "
        "that tp=2 splits. *Attention* is how many of the fused attention ops run without a dense mask: it says no "
        "more than `is_causal` (c) or nothing at all (f, full), or is a structure (s: a window, documents, padded "
        "keys); and what the masks of the others are (see [Attention](attention.md)).",
        "Experts run as `batched_mm`: the default knows no float64, and the eager way loops over data. The rows of "
        "audio models have a head for classes where there is one: a CTC loss picks labels by a mask "
        "(`labels.masked_select`), so that its shapes depend on data. Models whose images or sounds come as rows of "
        "any number, or are picked by a mask, were given text alone: " + _text_alone(built) + ". What each was given "
        "is in the CSV." + _narrow(built),
        _summary(built),
        _table(built),
        _reasons(built),
    ]
    if unbuilt or LEFT_OUT:
        message = [f"- `{name}`: {why}" for name, why in sorted(LEFT_OUT.items())]
        message += [f"- `{row.model_type}`: {_short(row.reason)}" for row in rows if not row.built]
        parts.append(
            "## Not rows\n\nNo small config or batch is made for these automatically.\n\n" + "\n".join(message)
        )
    return "\n\n".join(parts) + "\n"


def _text_alone(rows: Sequence[Row]) -> str:
    """Models of text and something else that were given only the text."""
    results = {row.model for row in rows if INPUTS.get(row.model_type) is TEXT}
    results |= {row.model for row in rows if row.kind == "multimodal" and set(row.inputs.split()) <= ONLY_TEXT}
    return ", ".join(sorted(results)) or "none"


def _narrow(rows: Sequence[Row]) -> str:
    actual = sorted({row.model for row in rows if row.dtype != "float64"})
    return f" Compared in float32, to 1e-5, since they can't run in float64: {', '.join(actual)}." if actual else ""


def shares(rows: Iterable[Row]) -> dict[str, float]:
    """The share of rows that are captured, verified under dp, under tp, and under tp with enough of it split."""
    stored = list(rows)
    count = max(len(stored), 1)
    return {
        "whole": sum(row.captured and not row.parts for row in stored) / count,
        "captured": sum(row.captured for row in stored) / count,
        "dp": sum(row.dp for row in stored) / count,
        "tp": sum(row.tp for row in stored) / count,
        "split": sum(row.tp and row.split >= ENOUGH for row in stored) / count,
    }


def _summary(rows: Sequence[Row]) -> str:
    lines = [
        "| kind | architectures | rows | captured whole | also in parts | dp=2 | tp=2 | tp=2, 80 % split "
        "| attention without masks | seconds |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for kind in KINDS:
        if values := [row for row in rows if row.kind == kind]:
            lines.append(_sums(kind, values))
    lines.append(_sums("**all**", rows))
    aims = " | ".join(f"{aim:.0%}" if aim else "" for aim in AIMS.values())
    lines.append(f"| aim | 150 | | {aims} | | |")
    return "\n".join(lines)


def _sums(name: str, rows: Sequence[Row]) -> str:
    actual = shares(rows)
    cells = " | ".join(f"{actual[part]:.1%}" for part in AIMS)
    types = len({row.model_type for row in rows})
    return (
        f"| {name} | {types} | {len(rows)} | {cells} | {without_masks(rows)} | {sum(row.seconds for row in rows):.0f} |"
    )


def _table(rows: Sequence[Row]) -> str:
    lines = [
        "## Every architecture",
        "",
        "| model | labels | captured | dp=2 | tp=2 | split | attention | seconds |",
        "|---|---|---|---|---|--:|---|--:|",
    ]
    kind = ""
    for row in rows:
        if row.kind != kind:
            kind = row.kind
            lines.append(f"| **{kind}** | | | | | | | |")
        lines.append(f"| {row.model} | {'yes' if row.labels else ''} | {_captured(row)} | {MARK[row.dp]} | "
                     f"{MARK[row.tp]} | {row.split:.0%} | {_attention(row)} | {row.seconds:.1f} |")  # fmt: skip
    return "\n".join(lines)


def _attention(row: Row) -> str:
    if not row.attention:
        return ""
    marks = "".join(mark for mark, count in (("c", row.causal), ("f", row.unmasked), ("s", row.structured)) if count)
    names = sorted({re.sub(r" by [^;]*", "", mask) for mask in row.masks.split("; ")} - {""})
    free = f"{row.causal + row.unmasked + row.structured}/{row.attention} {marks}".strip()
    return f"{free}: {'; '.join(names)}" if names else free


def without_masks(rows: Iterable[Row]) -> str:
    """The share of rows with fused attention in which all of it runs without a dense mask."""
    attending = [row for row in rows if row.attention]
    free = sum(not row.masks for row in attending)
    return f"{free}/{len(attending)}" if attending else ""


def _reasons(rows: Sequence[Row]) -> str:
    """Rows that fail for one reason stand together, those where the model is at fault first."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        if not (row.captured and row.dp and row.tp):
            why = AT_FAULT.get(row.model_type) or _short(row.reason or row.tp_reason)
            groups.setdefault(why, []).append(f"{row.model}{' with labels' if row.labels else ''}")
    lines = ["## Why what fails does"]
    theirs = [why for why in groups if why in AT_FAULT.values()]
    ours = [why for why in groups if why not in theirs]
    for title, result in (("The model itself is at fault", theirs), ("Open", ours)):
        if result:
            lines += ["", f"### {title}", ""]
            lines += [f"- {', '.join(groups[why])}: {why}" for why in sorted(result, key=lambda why: -len(groups[why]))]
    kept: dict[str, list[Row]] = {}
    for row in rows:
        if row.captured and row.parts and row.dp and row.tp:
            kept.setdefault(AT_FAULT.get(row.model_type) or _short(row.reason), []).append(row)
    if kept:
        lines += ["", "### Captured in parts", "", "What stays as it is, and why it can't be captured:", ""]
        for why, value in kept.items():
            names = ", ".join(dict.fromkeys(f"{row.model} (`{row.parts[:80]}`)" for row in value))
            lines.append(f"- {names}: {why}")
    low = [row for row in rows if row.tp and row.split < ENOUGH]
    if low:
        lines += ["", "### Verified under tp, with less than 80 % split", "", "What takes the most of the rest:", ""]
        lines += [f"- {row.model}{' with labels' if row.labels else ''}: {row.split:.0%}; {row.whole}" for row in low]
    return "\n".join(lines)


def _short(reason: str) -> str:
    return reason.replace("|", "/").replace("<", "(").replace(">", ")")[:240]

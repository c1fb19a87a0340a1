"""The predicted cost of a plan on one screen, from the plan file alone.

The mesh and why, the parts of a step's time, communication by axis and collective, memory by kind, the most
expensive ops and reshards, the runners-up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..plan import Plan
from ..plan.folding import star
from ..plan.joint import UNBOUNDED
from .communication import format_bytes
from .pipeline import pipeline_devices, pipeline_screen
from .text import format_time, indented, parts_of_step, parts_of_time, percent, step_time, table_of

MOST_SENT = 5  # rows of the table of collectives
MOST_MESHES = 4
MOST_NOTES = 6
KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers", "inputs")

Predicted = Mapping[str, Any]


def screen(plan: Plan, entry: str) -> Iterator[RenderableType]:
    """The parts of the screen, top to bottom, for a plan with predicted costs."""
    predicted = plan.predicted[entry]
    staged = "pipeline" in predicted
    yield from _mesh(predicted)
    yield from pipeline_screen(plan, entry) if staged else _time(predicted)
    yield from _throughput(predicted)
    yield from () if staged else _pipelines(predicted)
    if "sent" in predicted:  # else the file is of an earlier version
        yield _sent(predicted["sent"])
    yield from _memory(predicted)
    for title, key, more in PARTS:
        if key in predicted:
            yield _most_expensive(title, predicted[key], predicted["seconds"], *more)
    if staged and len(pipeline_devices(predicted)) > 1:
        yield Text("times of communication, ops and reshards are of a mean device: all stages, by pipeline ranks")


PARTS = (
    ("most expensive ops", "ops", ()),
    ("most expensive reshards", "edges", ("forward / backward",)),
)


def priced_for(predicted: Predicted) -> str:
    """What a plan was priced for: "batch 16, adamw, in bfloat16"."""
    conditions = predicted["for"]
    kind = conditions.get("precision") or conditions["compute"]
    words = [f"batch {conditions['batch']}", conditions["optimizer"], f"in {kind}" if kind else ""]
    words.append(f"gradient accumulation {conditions['accumulate']}" if conditions["accumulate"] > 1 else "")
    return ", ".join(word for word in words if word)


def _mesh(predicted: Predicted) -> Iterator[RenderableType]:
    for use in predicted.get("axes", ()):
        where = "within a node" if use["nodes"] == 1 else f"over {use['nodes']} nodes"
        links = f", {' and '.join(use['links'])}" if use["links"] else ""
        kinds = {"the batch": use["batch"], "the weights": use["weights"], "the sequence or others": use["other"]}
        shares = [f"{kind} in {percent(part)}" for kind, part in kinds.items() if part >= 0.0005]
        work = f"splits {', '.join(shares)} of the arithmetic" if shares else "its devices repeat the same work"
        yield indented(f"{use['axis']}={use['size']} {where}{links}: {work}")
    yield from _stored(predicted)
    if "pipeline" in predicted and len(pipeline_devices(predicted)) > 1:
        names = " and ".join(predicted["pipeline"].get("links", ()))
        yield indented(f"pp={len(pipeline_devices(predicted))} stages of the model{f', {names}' if names else ''}")
    others = [mesh for mesh in predicted.get("meshes", ()) if mesh["outcome"] != "chosen"]
    if others:
        words = [f"{mesh['mesh']} {_outcome(mesh, predicted['seconds'])}" for mesh in others[:MOST_MESHES]]
        more = f"; {len(others) - MOST_MESHES} more" if len(others) > MOST_MESHES else ""
        yield indented(f"other meshes: {'; '.join(words)}{more}")
    elif "meshes" in predicted:
        yield indented("no other mesh is possible")


def _stored(predicted: Predicted) -> Iterator[RenderableType]:
    total = sum(predicted["stored"].values())
    if total:
        every = predicted["stored"].items()
        shares = [f"{how} {percent(size / total)}" for how, size in every if size >= 0.0005 * total]
        yield indented(f"parameters ({format_bytes(total)}): {'; '.join(shares)}")


def _pipelines(predicted: Predicted) -> Iterator[RenderableType]:
    """The outcome of the pipelines searched, for a plan without stages."""
    pipelines = predicted.get("pipelines")
    if pipelines is None:
        return
    best, count = pipelines["best"], pipelines["tried"] + pipelines["pruned"]
    step, bound = predicted["seconds"], pipelines["bound"]
    limit = f" (bound: {_against(bound, step)})" if bound < UNBOUNDED else ""
    if best is not None:
        more = percent(best["seconds"] / step - 1)
        yield indented(f"of {count} pipelines the best solved is {more} slower{limit}: {best['text']}")
    else:
        yield indented(f"of {count} pipelines none was found that is faster{limit}")


def _outcome(mesh: Predicted, best: float) -> str:
    kind, bound = mesh["outcome"], mesh["bound"]
    if kind == "slower":
        return f"is {percent(mesh['seconds'] / best - 1)} slower"
    if kind == "does not fit":
        return (
            f"does not fit ({format_bytes(mesh['memory'])} at least)" if "memory" in mesh else "has no plan that fits"
        )
    at_best = "" if bound is None else _against(bound, best)
    return f"was not solved within the time limit ({at_best})" if kind == "not solved" else f"is {at_best}"


def _against(bound: float, best: float) -> str:
    """A lower bound as text."""
    ratio = bound / best - 1
    if abs(ratio) < 5e-4:
        return "as fast at best"
    return f"at least {percent(ratio)} slower" if ratio >= 0 else f"at most {percent(-ratio)} faster"


def _time(predicted: Predicted) -> Iterator[RenderableType]:
    step = predicted["seconds"]
    yield step_time(predicted)
    yield from parts_of_time(parts_of_step(predicted), step, bool(predicted.get("stopped")))


def _throughput(predicted: Predicted) -> Iterator[RenderableType]:
    """Tokens a second, how much of the peak that is, and what a device sends."""
    rates = predicted.get("throughput")
    if rates is None:
        return
    words = [f"{rates[kind]:,.0f} {kind}/s" for kind in ("tokens", "samples") if rates[kind] is not None][:1]
    words.append(f"{rates['flops'] / 1e12:.3g} TFLOP/s per device (MFU {percent(rates['mfu'])})")
    sent = sum(message.get("bytes", 0) for message in predicted["sent"])
    words.append(f"a device sends {format_bytes(sent)} a step")
    yield indented(f"predicted {', '.join(words)}")


def _sent(sent: Sequence[Predicted]) -> Table:
    rows: dict[tuple[str, str, str], list[float]] = {}
    for message in sent:
        key = (", ".join(message["axes"]), message["collective"], _how(message))
        sums = rows.setdefault(key, [0, 0.0, 0.0, 0.0])
        numbers = (message["count"], message.get("bytes", 0.0), message["seconds"], message["hidden"])
        for at, amount in enumerate(numbers):
            sums[at] += amount
    table = table_of("communication", "over", "how", ">tensors", ">sent", ">time", ">exposed")
    ordered = sorted(rows.items(), key=lambda item: -item[1][2])
    shown = [(f"  {collective}", axes, how, sums) for (axes, collective, how), sums in ordered[:MOST_SENT]]
    rest = [sums for _, sums in ordered[MOST_SENT:]]
    if rest:
        shown.append((f"  {len(rest)} more kinds", "", "", [sum(column) for column in zip(*rest, strict=True)]))
    for name, axes, how, (count, size, seconds, hidden) in shown:
        exposed = "in the bubble" if how == "between stages" else format_time(seconds - hidden)
        table.add_row(name, axes, how, str(int(count)), format_bytes(size), format_time(seconds), exposed)
    if not ordered:
        table.add_row("  none")
    return table


def _how(message: Predicted) -> str:
    if message["collective"] == "send":
        return "between stages"
    return "overlapped" if message["overlapped"] else "after backward" if message["when"] == "update" else "blocking"


def _memory(predicted: Predicted) -> Iterator[RenderableType]:
    memory, limit, at = predicted["memory"], predicted["limit"], predicted["at"]
    part = f"{percent(memory['peak'] / limit)} of the limit of {format_bytes(limit)}"
    line = f"predicted memory {format_bytes(memory['peak'])} per device, {part}"
    line += ": IT DOES NOT FIT" if memory["peak"] > limit else f", headroom {format_bytes(limit - memory['peak'])}"
    yield Text(line, style="bold" if memory["peak"] <= limit else "bold red")
    kinds = ", ".join(f"{kind} {format_bytes(memory[kind])}" for kind in KINDS if memory[kind])
    yield indented(f"{kinds}; peak in {at['phase']}, at {star(at['op'].strip(' /'))}")


def _most_expensive(title: str, parts: Sequence[Predicted], step: float, *more: str) -> Table:
    table = table_of(title, *more, ">count", ">time", ">share")
    for part in parts:
        sends = (Text(part.get("sends", "")),) if more else ()
        numbers = (str(part["count"]), format_time(part["seconds"]), percent(part["seconds"] / step))
        table.add_row(Text(f"  {part['name']}"), *sends, *numbers)
    if not parts:
        table.add_row("  none")
    return table


def notes_of(plan: Plan, most: int | None = MOST_NOTES) -> Iterator[RenderableType]:
    """Up to `most` of the plan's notes, those of equal layers merged."""
    notes = folded_notes(plan)
    if not notes:
        return
    yield Text("notes", style="bold")
    for note in notes[:most]:
        yield indented(f"- {note}")
    if most is not None and most < len(notes):
        yield indented(f"- and {len(notes) - most} more: see explain(plan, full=True)")


def folded_notes(plan: Plan) -> list[str]:
    """The plan's notes, those of equal layers as one."""
    count: dict[str, list[str]] = {}
    for note in plan.notes:
        count.setdefault(star_names(note), []).append(note)
    return [
        names[0] if len(names) == 1 else f"{folded} ({len(names)} times)" for folded, names in count.items()
    ]


def star_names(note: str) -> str:
    """A note with stars for the numbers of layers."""
    return " ".join(star(word) if "." in word else word for word in note.split(" "))


def in_ranges(paths: Sequence[str]) -> list[str]:
    """Module paths, with three or more consecutive layers merged: "model.layers.2-79.mlp"."""
    runs: list[tuple[str, list[str]]] = []
    for path in sorted(paths, key=lambda path: (star(path), _layer(path))):
        kind, run = runs[-1] if runs else ("", [])
        if kind == star(path) and kind.count("*") == 1 and _layer(path) == _layer(run[-1]) + 1:
            run.append(path)
        else:
            runs.append((star(path), [path]))
    texts: list[str] = []
    for kind, run in runs:
        ends = f"{_layer(run[0])}-{_layer(run[-1])}"
        texts += [kind.replace("*", ends)] if len(run) > 2 else run
    return texts


def _layer(path: str) -> int:
    """The first number of a path; -1 if it has none."""
    return next((int(part) for part in path.split(".") if part.isdigit()), -1)

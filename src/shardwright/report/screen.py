"""What a plan is predicted to cost, on one screen: all of it from the plan file, without the model.

The mesh and why, the time of a step by what takes it, communication by axis and collective, memory by kind, the dearest
ops and conversions, what almost won.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..plan import Plan
from ..plan.folding import star
from .communication import format_bytes
from .pipeline import pipeline_screen
from .text import format_time, indented, parts_of_time, percent, table_of

MOST_SENT = 7  # rows of the table of what is sent
MOST_MESHES = 4
MOST_NOTES = 6
KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers", "inputs")

Said = Mapping[str, Any]


def screen(plan: Plan, entry: str) -> Iterator[RenderableType]:
    """The parts of the screen, top to bottom, for a plan that says what it costs."""
    said = plan.predicted[entry]
    if "pipeline" in said:
        yield from _stored(said)
        yield from pipeline_screen(plan, entry)
        yield from _memory(said)
        return
    yield from _mesh(said)
    yield from _time(said)
    yield from _pipelines(said)
    yield _sent(said["sent"])
    yield from _memory(said)
    yield _dearest("dearest ops", said["ops"], said["seconds"])
    yield _dearest("dearest conversions", said["edges"], said["seconds"], "forward / backward")


def priced_for(said: Said) -> str:
    """What a plan was priced for: "batch 16, adamw, in bfloat16"."""
    made = said["for"]
    kind = made.get("precision") or made["compute"]
    words = [f"batch {made['batch']}", made["optimizer"], f"in {kind}" if kind else ""]
    words.append(f"accumulating {made['accumulate']} times" if made["accumulate"] > 1 else "")
    return ", ".join(word for word in words if word)


def _mesh(said: Said) -> Iterator[RenderableType]:
    for use in said["axes"]:
        where = "inside of a node" if use["nodes"] == 1 else f"over {use['nodes']} nodes"
        links = f", {' and '.join(use['links'])}" if use["links"] else ""
        kinds = {"the batch": use["batch"], "the weights": use["weights"], "the sequence or others": use["other"]}
        shares = [f"{kind} in {percent(part)}" for kind, part in kinds.items() if part >= 0.0005]
        work = f"splits {', '.join(shares)} of the arithmetic" if shares else "its devices all do the same"
        yield indented(f"{use['axis']}={use['size']} {where}{links}: {work}")
    yield from _stored(said)
    others = [one for one in said.get("meshes", ()) if one["outcome"] != "chosen"]
    if others:
        words = [f"{one['mesh']} {_outcome(one, said['seconds'])}" for one in others[:MOST_MESHES]]
        more = f"; {len(others) - MOST_MESHES} more" if len(others) > MOST_MESHES else ""
        yield indented(f"other meshes: {'; '.join(words)}{more}")
    elif "meshes" in said:
        yield indented("there is no other mesh")


def _stored(said: Said) -> Iterator[RenderableType]:
    total = sum(said["stored"].values())
    if total:
        shares = [f"{how} {percent(size / total)}" for how, size in said["stored"].items()]
        yield indented(f"parameters ({format_bytes(total)}): {'; '.join(shares)}")


def _pipelines(said: Said) -> Iterator[RenderableType]:
    """What became of the pipelines beside a plan that is none."""
    held = said.get("pipelines")
    if held is None:
        return
    best, count = held["best"], held["looked"] + held["left"]
    if best is not None:
        more = percent(best["seconds"] / said["seconds"] - 1)
        yield indented(f"of {count} pipelines the best that was tried is {more} slower: {best['said']}")
    else:
        yield indented(f"none of {count} pipelines can be faster")


def _outcome(mesh: Said, best: float) -> str:
    kind, bound = mesh["outcome"], mesh["bound"]
    if kind == "slower":
        return f"is {percent(mesh['seconds'] / best - 1)} slower"
    if kind == "does not fit":
        return f"does not fit ({format_bytes(mesh['memory'])} at least)" if "memory" in mesh else "was not made to fit"
    at_best = "" if bound is None else _against(bound, best)
    return f"was not solved for lack of time ({at_best})" if kind == "not solved" else f"is {at_best}"


def _against(bound: float, best: float) -> str:
    """A bound in words: nothing under it is that fast."""
    ratio = bound / best - 1
    if abs(ratio) < 5e-4:
        return "as fast at best"
    return f"at least {percent(ratio)} slower" if ratio >= 0 else f"at most {percent(-ratio)} faster"


def _time(said: Said) -> Iterator[RenderableType]:
    step = said["seconds"]
    line = f"a step takes {format_time(step)}"
    if "bound" in said:
        where = "on the meshes that were looked at" if said["stopped"] else "of all that was searched"
        line += f"; nothing {where} takes less than {format_time(said['bound'])} (gap {percent(said['gap'])})"
    yield Text(line, style="bold")
    kinds = {
        "compute": said["compute"],
        "waiting for communication": said["waited"],
        "communication beside compute that shows": said["exposed"],
        "update": said["update"],
    }
    yield from parts_of_time(kinds, step, bool(said.get("stopped")))


def _sent(sent: Sequence[Said]) -> Table:
    rows: dict[tuple[str, str, str], list[float]] = {}
    for one in sent:
        how = "beside compute" if one["beside"] else "after the update" if one["when"] == "update" else "waited for"
        key = (", ".join(one["axes"]), one["collective"], how)
        held = rows.setdefault(key, [0, 0.0, 0.0])
        for at, amount in enumerate((one["count"], one["seconds"], one["hidden"])):
            held[at] += amount
    table = table_of("communication", "over", "how", ">tensors", ">takes", ">shows", ">hidden")
    ordered = sorted(rows.items(), key=lambda item: -item[1][1])
    for (axes, collective, how), (count, seconds, hidden) in ordered[:MOST_SENT]:
        times = (format_time(held) for held in (seconds, seconds - hidden, hidden))
        table.add_row(f"  {collective}", axes, how, str(int(count)), *times)
    rest = ordered[MOST_SENT:]
    if rest:
        count, seconds, hidden = (sum(held[at] for _, held in rest) for at in range(3))
        times = (format_time(held) for held in (seconds, seconds - hidden, hidden))
        table.add_row(f"  {len(rest)} more kinds", "", "", str(int(count)), *times)
    if not ordered:
        table.add_row("  none")
    return table


def _memory(said: Said) -> Iterator[RenderableType]:
    held, limit, at = said["memory"], said["limit"], said["at"]
    part = f"{percent(held['peak'] / limit)} of the {format_bytes(limit)} that may be used"
    line = f"memory {format_bytes(held['peak'])}, {part}"
    if held["peak"] > limit:
        line += ": IT DOES NOT FIT"
    yield Text(line, style="bold" if held["peak"] <= limit else "bold red")
    kinds = ", ".join(f"{kind} {format_bytes(held[kind])}" for kind in KINDS if held[kind])
    yield indented(f"{kinds}; most in {at['phase']}, at {star(at['op'].strip(' /'))}")


def _dearest(title: str, parts: Sequence[Said], step: float, *more: str) -> Table:
    table = table_of(title, *more, ">count", ">takes", ">share")
    for part in parts:
        sends = (Text(part["sends"]),) if more else ()
        numbers = (str(part["count"]), format_time(part["seconds"]), percent(part["seconds"] / step))
        table.add_row(Text(f"  {part['name']}"), *sends, *numbers)
    if not parts:
        table.add_row("  none")
    return table


def notes_of(plan: Plan, most: int | None = MOST_NOTES) -> Iterator[RenderableType]:
    """The plan's notes, those of equal layers as one; `most` of them."""
    count: dict[str, list[str]] = {}
    for note in plan.notes:
        count.setdefault(star_names(note), []).append(note)
    if not count:
        return
    yield Text("notes", style="bold")
    shown = list(count.items())[:most]
    for folded, held in shown:
        yield indented(f"- {held[0]}" if len(held) == 1 else f"  - {folded} ({len(held)} times)")
    if len(shown) < len(count):
        yield indented(f"- and {len(count) - len(shown)} more, which explain(plan, full=True) shows")


def star_names(note: str) -> str:
    """A note with stars for the numbers of layers."""
    return " ".join(star(word) if "." in word else word for word in note.split(" "))


def in_ranges(paths: Sequence[str]) -> list[str]:
    """Module paths, with those of three or more layers that follow each other as one: "model.layers.2-79.mlp"."""
    runs: list[tuple[str, list[str]]] = []
    for path in sorted(paths, key=lambda path: (star(path), _layer(path))):
        kind, held = runs[-1] if runs else ("", [])
        if kind == star(path) and kind.count("*") == 1 and _layer(path) == _layer(held[-1]) + 1:
            held.append(path)
        else:
            runs.append((star(path), [path]))
    found: list[str] = []
    for kind, held in runs:
        ends = f"{_layer(held[0])}-{_layer(held[-1])}"
        found += [kind.replace("*", ends)] if len(held) > 2 else held
    return found


def _layer(path: str) -> int:
    """The first number of a path; -1 if it has none."""
    return next((int(part) for part in path.split(".") if part.isdigit()), -1)

"""Building blocks of screens: indented lines, borderless tables, formatted times and shares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.padding import Padding
from rich.table import Table
from rich.text import Text


def step_time(predicted: Mapping[str, Any]) -> Text:
    """The step of a plan, and how far it can be from the best that was searched."""
    line = f"predicted step time {format_time(predicted['seconds'])}"
    if "bound" in predicted:
        where = "in the search space"
        if predicted["stopped"]:
            where = "on the meshes that were searched"
        elif "pipelines" in predicted:  # which have a bound of their own, and a looser one
            where = "without stages or microbatches"
        line += f"; nothing {where} takes less than {format_time(predicted['bound'])} (gap {percent(predicted['gap'])})"
    return Text(line, style="bold")


def parts_of_time(kinds: Mapping[str, float], step: float, stopped: bool) -> Iterator[Padding]:
    """The parts of a step's time, and whether the search was stopped."""
    if stopped:
        yield indented("the search was stopped early: there may be better plans")
    yield indented(
        ", ".join(f"{kind} {format_time(seconds)} ({percent(seconds / step)})" for kind, seconds in kinds.items())
    )


def parts_of_step(predicted: Mapping[str, Any]) -> dict[str, float]:
    """The seconds of a step by what takes them; the parts add up to it."""
    stages = len(predicted["pipeline"]["stages"]) if "pipeline" in predicted else 0
    kinds = {
        "compute": predicted["compute"],
        "blocking communication": predicted["blocking"],
        "exposed overlapped communication": predicted["exposed"],
    }
    if stages > 1:
        kinds["bubble and sends"] = predicted.get("bubble", 0.0)
    return {**kinds, "sync and update" if stages else "update": predicted["update"]}


def indented(text: str) -> Padding:
    return Padding(Text(text), (0, 0, 0, 2), expand=False)


def table_of(*heads: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for head in heads:
        number = head.startswith(">")
        table.add_column(head.lstrip(">"), justify="right" if number else "left", no_wrap=head != heads[0])
    return table


def format_time(seconds: float) -> str:
    """A time with a unit. What is shorter than a picosecond is a rounding error."""
    if abs(seconds) < 1e-12:
        return "0"
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(seconds) >= size:
            return f"{seconds / size:.3g} {unit}" if abs(seconds) < 100 * size else f"{seconds / size:.0f} {unit}"
    return f"{seconds * 1e6:.2g} us"


def percent(part: float) -> str:
    return f"{100 * part:.1f} %" if abs(part) < 0.0995 else f"{100 * part:.0f} %"

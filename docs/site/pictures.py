"""Draws the pictures of the pages: `python docs/site/pictures.py` writes docs/pictures/*.svg.

Each is one SVG without scripts or fonts of its own, on a light panel that reads on a dark page too. Colours are of the
Okabe-Ito palette, and every colour has a word beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from xml.sax.saxutils import escape

from shardwright.schedule import StageEdge, StageTimes, schedule_kind, simulate

FOLDER = Path(__file__).parents[1] / "pictures"
BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#B8BCC4"
PALE = {BLUE: "#CFE4F2", ORANGE: "#FBE7BF", GREEN: "#C6EBDF", PURPLE: "#F4DEEA", GREY: "#E9EBEF"}
INK, FAINT = "#1D2433", "#5B6475"


def picture(width: int, height: int, about: str, *parts: str) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img" '
        f'aria-label="{escape(about)}" font-family="system-ui, sans-serif" font-size="13">'
    )
    panel = f'<rect width="{width}" height="{height}" rx="8" fill="#FBFCFE"/>'
    return "\n".join([head, f"<title>{escape(about)}</title>", panel, *parts, "</svg>", ""])


def text(x: float, y: float, words: str, anchor: str = "start", color: str = INK, size: int = 13) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{color}" font-size="{size}">{escape(words)}</text>'


def box(x: float, y: float, w: float, h: float, color: str, words: str = "", dashed: bool = False) -> str:
    dash = ' stroke-dasharray="4 3"' if dashed else ""
    shape = (
        f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="3" fill="{PALE[color]}" stroke="{color}"{dash}/>'
    )
    return shape + (text(x + w / 2, y + h / 2 + 4.5, words, "middle", size=12) if words else "")


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    way = 1 if x2 > x1 else -1
    tip = x2 - 7 * way
    line = f"M{x1:g} {y1:g}H{x2 - way:g}M{tip:g} {y2 - 4:g}L{x2:g} {y2:g}L{tip:g} {y2 + 4:g}"
    return f'<path d="{line}" stroke="{FAINT}" fill="none"/>'


def layouts() -> str:
    """The value [a b c d] in each of the four states."""
    parts = []
    columns = [
        ("S", "sharded", [["a", "b"], ["c", "d"]], "gradient: sharded", BLUE, False),
        ("I", "invariant", [["a", "b", "c", "d"]] * 2, "gradient: replicated", GREEN, False),
        ("R", "replicate", [["a", "b", "c", "d"]] * 2, "gradient: a pending sum", ORANGE, False),
        ("P", "partial", [["a₀", "b₀", "c₀", "d₀"], ["a₁", "b₁", "c₁", "d₁"]], "gradient: replicated", PURPLE, True),
    ]
    for column, (letter, name, ranks, gradient, color, dashed) in enumerate(columns):
        left = 78 + column * 160
        parts.append(text(left, 30, f"{letter}  {name}"))
        for rank, values in enumerate(ranks):
            for at, value in enumerate(values):
                parts.append(box(left + at * 32, 46 + rank * 44, 30, 30, color, value, dashed))
        parts.append(text(left, 152, gradient, color=FAINT, size=12))
    parts += [text(14, 66, "rank 0"), text(14, 110, "rank 1")]
    return picture(720, 170, "The four layout states of a tensor on an axis of two ranks", *parts)


def reshards() -> str:
    """Megatron's MLP, forward and backward."""
    parts, x = [], 24
    steps = [("I", "x", GREEN), ("R", "replicate", ORANGE), ("S", "up, gelu", BLUE), ("P", "down", PURPLE)]
    for at, (letter, name, color) in enumerate([*steps, ("I", "y", GREEN)]):
        left = x + at * 138
        parts.append(box(left, 52, 92, 36, color, f"{name}  [{letter}]", letter == "P"))
        if at < 4:
            parts += [arrow(left + 94, 64, left + 136, 64), arrow(left + 136, 78, left + 94, 78)]
    parts += [
        text(24, 26, "forward, left to right"),
        text(577, 40, "all_reduce", "middle", FAINT, 12),
        text(24, 130, "backward, right to left"),
        text(139, 106, "all_reduce", "middle", FAINT, 12),
        text(300, 130, "one all_reduce each way: the reshards P → I and, in backward, I → R", color=FAINT, size=12),
    ]
    return picture(720, 146, "The reshards around a tensor-parallel MLP", *parts)


def mesh() -> str:
    """zero3=2,tp=4 on two nodes."""
    parts = []
    for node in range(2):
        left = 24 + node * 344
        parts.append(box(left, 40, 328, 96, GREY))
        parts.append(text(left + 10, 60, f"node {node}: zero3 rank {node}"))
        for rank in range(4):
            parts.append(box(left + 14 + rank * 77, 74, 70, 46, BLUE, f"rank {4 * node + rank}"))
    parts += [
        text(24, 26, "mesh dp=2 x tp=4 of the plan zero3=2,tp=4"),
        text(24, 160, "tp connects neighbours, over the fast links of a node: each rank has a quarter of every large "
             "weight.", color=FAINT, size=12),
        text(24, 178, "dp connects 0 with 4, 1 with 5, … over the network: each stores half of its quarter, and "
             "has half of the batch.", color=FAINT, size=12),
    ]  # fmt: skip
    return picture(720, 192, "A plan on a mesh of two nodes with four devices each", *parts)


def schedules() -> str:
    """GPipe and 1F1B for four stages and eight microbatches, as they are simulated."""
    parts, top = [], 22
    for name in ("gpipe", "1f1b"):
        schedule = schedule_kind(name).make(4, 8)
        edges = [StageEdge(at, at + 1, 0.0, 0.0) for at in range(3)]
        run = simulate(schedule, [StageTimes(forward=1.0, backward=1.0, weight=1.0)] * 4, edges)
        parts.append(text(14, top, f"{name}: bubble {100 * run.bubble:.0f} %"))
        scale = 620 / run.total
        for device, steps in enumerate(run.schedule.devices):
            y = top + 10 + device * 22
            parts.append(text(14, y + 14, f"rank {device}", color=FAINT, size=12))
            for step, start, end in zip(steps, run.starts[device], run.ends[device], strict=True):
                color = BLUE if step.kind == "F" else ORANGE
                parts.append(box(72 + start * scale, y, (end - start) * scale - 1, 19, color, str(step.microbatch)))
        top += 122
    parts.append(text(14, top - 6, "blue (narrow): forward of a microbatch; orange (wide): backward; empty: bubble",
                      color=FAINT, size=12))  # fmt: skip
    return picture(720, top + 8, "Two pipeline schedules, step by step", *parts)


def memory() -> str:
    """What a rank holds in a step, without and with recomputation."""
    parts = []
    kinds = ("all activations saved", 90, 0), ("recompute: one layer at a time", 52, 4)
    for at, (name, peak, waves) in enumerate(kinds):
        left, base, width = 24 + at * 350, 172, 320
        parts.append(text(left, 24, name))
        for height, y, color, label in (
            (26, base - 26, BLUE, "parameters"), (20, base - 46, GREEN, "optimizer state"),
        ):  # fmt: skip
            parts.append(box(left, y, width, height, color, label))
        floor, middle = base - 48, left + width / 2
        line = f"M{left} {floor}L{middle:g} {floor - peak * (1.0 if not waves else 0.5):g}"
        for _ in range(waves):
            step = width / 2 / waves
            line += f"l{step / 3:g} {-peak * 0.5:g}l{2 * step / 3:g} {peak * 0.5 + peak * 0.5 / waves:g}"
        line += f"L{left + width} {floor}Z"
        parts.append(f'<path d="{line}" fill="{PALE[ORANGE]}" stroke="{ORANGE}"/>')
        parts.append(text(middle, floor - 8, "activations", "middle", size=12))
        parts.append(text(left, 190, "forward", color=FAINT, size=12))
        parts.append(text(left + width, 190, "backward", "end", FAINT, 12))
    return picture(720, 202, "Memory of a rank over a step", *parts)


PICTURES: dict[str, Callable[[], str]] = {
    "layouts": layouts, "reshards": reshards, "mesh": mesh, "schedules": schedules, "memory": memory,
}  # fmt: skip


def drawn() -> Iterator[tuple[Path, str]]:
    for name, draw in PICTURES.items():
        yield FOLDER / f"{name}.svg", draw()


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for path, svg in drawn():
        path.write_text(svg, encoding="utf-8")

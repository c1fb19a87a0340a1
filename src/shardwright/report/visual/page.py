"""The report as one HTML file: data, style and scripts in it, nothing loaded from anywhere.

Plan files are untrusted. All that comes from them stands in a block of JSON in which no tag can end (`<`, `>` and `&`
are escaped), and the scripts put it on the page as text only.
"""

from __future__ import annotations

import gzip
import html
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from ...errors import InputError
from ...ir import Graph
from ...plan import Plan
from ..difference import Difference, diff
from ..explain import MeasuredSteps, TrainedModel, compiled_plan
from .contents import model_contents, plan_contents
from .trace import chrome_trace

SCRIPTS = (
    "base.js", "head.js", "mesh.js", "communication.js", "memory.js", "timeline.js", "modules.js", "code.js",
    "difference.js", "main.js",
)  # fmt: skip
HEIGHT = 720  # of a report in a notebook, in pixels


@dataclass(frozen=True, kw_only=True, repr=False)
class VisualReport:
    """A report on a plan, or on two. `save` it, or show it in a notebook."""

    title: str
    contents: Mapping[str, Any]

    def __repr__(self) -> str:
        return f"<report on {self.title}: save('report.html'), or show it in a notebook>"

    @property
    def html(self) -> str:
        """The whole file."""
        data = json.dumps(self.contents, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        filled = {
            "title": html.escape(f"{self.title} · shardwright report"),
            "style": asset("report.css"),
            "scripts": "\n".join(asset(name) for name in SCRIPTS),
            "data": data.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"),
        }
        parts = asset("report.html").split("%%")
        return "".join(filled[part] if at % 2 else part for at, part in enumerate(parts))

    def save(self, path: str | Path) -> Path:
        """Write the file whole or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.write_text(self.html, encoding="utf-8")
        return part.replace(path)

    def save_trace(self, path: str | Path) -> Path:
        """Write the predicted step of the (first) plan as a trace for ui.perfetto.dev; compressed if it ends in .gz."""
        path = Path(path)
        text = json.dumps(chrome_trace(self.contents["plans"][0]), separators=(",", ":"), allow_nan=False).encode()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
        return path

    def _repr_html_(self) -> str:
        return self.frame

    @property
    def frame(self) -> str:
        """The report in a frame of its own, so that its style and a notebook's leave each other alone."""
        style = f"width:100%;height:{HEIGHT}px;border:1px solid #8884;border-radius:8px"
        text = html.escape(self.html, quote=True)
        return f'<iframe srcdoc="{text}" sandbox="allow-scripts" style="{style}" title="shardwright report"></iframe>'


def asset(name: str) -> str:
    """A file of the page."""
    return files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def report(
    plan: Plan | TrainedModel,
    graph: Graph | None = None,
    *,
    other: Plan | None = None,
    path: str | Path | None = None,
) -> VisualReport:
    """A plan to look at: one HTML file without dependencies, for any browser, also from `file://`.

    A compiled model is its plan, with its measured step time. In a notebook the result shows itself.

    graph   of the model: adds shapes, layouts and costs of every op, memory over the step, what runs inside of forward
            and backward, and the source beside the generated code
    other   a second plan, which every view then compares with the first; a graph has to fit both
    path    where to write the file
    """
    measured: MeasuredSteps | None = None
    if not isinstance(plan, Plan):
        measured, plan = plan.step_times, compiled_plan(plan)
    entry = graph.entry if graph is not None else next(iter(plan.entries))
    if other is not None and entry not in other.entries:
        raise InputError(f"the second plan has no entry {entry!r}; it has {', '.join(other.entries)}")
    plans = [plan] if other is None else [plan, other]
    steps = [measured, None]
    shown = [
        plan_contents(each, entry, known) if graph is None else model_contents(each, graph, known)
        for each, known in zip(plans, steps, strict=False)
    ]
    contents: dict[str, Any] = {"plans": shown}
    if other is not None:
        contents["difference"] = _difference(diff(plan, other, graph))
    title = " and ".join(f"{each.model} under {each.policy or 'a custom plan'}" for each in plans)
    result = VisualReport(title=title, contents=contents)
    if path is not None:
        result.save(path)
    return result


def _difference(difference: Difference) -> dict[str, Any]:
    return {
        "rows": [[row.what, row.name, row.a, row.b] for row in difference.rows],
        "totals": [[total.what, total.a, total.b, total.bytes] for total in difference.totals],
        "parts": [[part.name, part.ops, part.stored, part.seconds, part.memory] for part in difference.parts],
        "whyNot": difference.why_not,
    }

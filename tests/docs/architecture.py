"""One op followed through the compiler: the texts that docs/design.md shows, made again."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.capture import capture
from shardwright.emit import emit
from shardwright.ir import show
from shardwright.layout import Axis, Mesh
from shardwright.lower import LoweredProgram
from shardwright.lower import show as show_program
from shardwright.ops import matmuls
from shardwright.plan import build_plan, parse_plan_string
from shardwright.plan.lowering import lower
from shardwright.rules import Analysis, analyse
from tests.parity.threaded import compare

OP = "down / linear"


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(self.norm(x)))
        y = x + self.down(h)
        return y.square().mean()


def texts() -> dict[str, str]:
    """By the name that stands above each block of the page."""
    graph = capture(MLP(), (torch.randn(8, 16),), {}).graph
    analysis = analyse(graph)
    plan = build_plan(graph, parse_plan_string("tp=2"), analysis)
    passes: dict[str, LoweredProgram] = {}
    program = lower(graph, plan, analysis, show=lambda name, after: passes.setdefault(name.split(":")[0], after))
    generated = emit(program).text
    return {
        "model": inspect.getsource(MLP),
        "graph": _without_paths(show(graph)),
        "spec": _definition("linear"),
        "signature": signature(analysis),
        "plan": excerpt(json.loads(plan.to_json())),
        "place": _without_paths(show_program(passes["place"])),
        "parameters": _between(generated, "PARAMETERS = {", "}"),
        "generated": _without_paths(textwrap.dedent(generated[generated.index("    def forward") :])),
        "collectives": collectives(),
    }


def signature(analysis: Analysis) -> str:
    """The rule of the op, its atoms, and the layouts of every role on an axis of 2."""
    bound, mesh = analysis.signatures[OP], Mesh(axes=(Axis(name="tp", size=2),))
    assert bound.rule is not None
    lines = [f"rule    {bound.rule.text}", f"{'role':<7} {'inputs':<34} output"]
    for role in bound.roles:
        inputs, outputs = bound.layouts({"tp": role.name}, mesh)
        lines.append(f"{role.name:<7} {'  '.join(map(str, inputs)):<34} {'  '.join(map(str, outputs))}")
    return "\n".join(lines)


def _definition(name: str) -> str:
    source = inspect.getsource(matmuls)
    start = re.search(rf'^define\("{name}"', source, re.MULTILINE)
    assert start is not None
    return source[start.start() : source.index(")  # fmt", start.start()) + 1]


def excerpt(plan: dict[str, Any]) -> str:
    """What a plan file says about the ops."""
    (stage,) = plan["entries"]["train"]
    rows = (f"    {json.dumps(op)}: {json.dumps(choice)}" for op, choice in stage["choices"].items())
    return f'"mesh": {json.dumps(plan["mesh"])},\n"choices": {{\n' + ",\n".join(rows) + "\n}"


def collectives() -> str:
    """What a rank sends in a step: kind, axis, shape."""
    rank = compare(MLP(), (torch.randn(8, 16),), "tp=2").ranks[0]
    rows = [("forward", issued) for issued in rank.forward] + [("backward", issued) for issued in rank.backward]
    return "\n".join(f"{when:<9} {kind} over {' '.join(axes)} of {list(shape)}" for when, (kind, axes, shape) in rows)


def _between(text: str, start: str, end: str) -> str:
    first = text.index(start)
    return text[first : text.index(f"\n{end}", first) + 1 + len(end)]


def _without_paths(text: str) -> str:
    """Without the fingerprint, which changes with every op's name, and lines of this file."""
    text = re.sub(r", fingerprint \w+", "", text)
    return re.sub(r"  architecture\.py:\d+", "", text)

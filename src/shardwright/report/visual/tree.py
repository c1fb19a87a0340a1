"""The module tree with every op: shapes, layouts, what a rank has of them, costs, reshards; equal layers as one.

A row is an op, or a parameter. Rows and modules of layers that are alike in all but their costs are folded: costs are
added up, and the layers' numbers become a range.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from ...cost.resources import Resource
from ...ir import Graph, Op
from ...ir.paths import word_of
from ...layout import MB, REPLICATE
from ...lower import LoweredProgram
from ...lower.program import graph_value
from ...plan import Plan
from ...plan.priced_parts import PricedTables
from ...storage import ParameterSpec
from ..communication import stored_bytes
from ..difference import describe_choice
from .interning import Interned, LayoutTable, shorts

COSTS = ("COMPUTE_FORWARD", "COMPUTE_BACKWARD", "SEND_FORWARD", "SEND_BACKWARD", "BESIDE_FORWARD", "BESIDE_BACKWARD",
         "UPDATE", "KEPT")  # fmt: skip


@dataclass
class TreeRow:
    """An op or a parameter: what it is, the costs of all that are folded into it, and their names."""

    facts: dict[str, Any]
    costs: np.ndarray
    names: list[str]
    reshards: list[tuple[dict[str, Any], float]] = field(default_factory=list)  # with seconds


@dataclass
class TreeNode:
    """A module. `numbers`: those of the layers that are folded into it."""

    name: str
    children: dict[str, TreeNode] = field(default_factory=dict)
    rows: list[TreeRow] = field(default_factory=list)
    stages: set[int] = field(default_factory=set)
    count: int = 1

    def signature(self) -> str:
        """The same for modules that are alike in all but name and costs."""
        return json.dumps([
            [[row.facts, [facts for facts, _ in row.reshards]] for row in self.rows],
            [[child.name, child.count, child.signature()] for child in self.children.values()],
        ])  # fmt: skip


class TreeBuilder:
    """Makes the tree of a plan's programs. Rows get numbers when it is written out."""

    def __init__(self, plan: Plan, graph: Graph, layouts: LayoutTable, sources: Interned) -> None:
        self.graph, self.layouts, self.sources, self.inputs = graph, layouts, sources, Interned()
        self.texts = Interned()
        self.choices = plan.choices(graph.entry)
        self.recomputed = {path for stage in plan.entries[graph.entry] for path in stage.recompute}
        self.root = TreeNode("")
        self.row_of: dict[str, TreeRow] = {}

    def add(self, program: LoweredProgram, own: Iterable[str], stage: int) -> None:
        """The ops of a stage, and the parameters of its program."""
        mine = set(own)
        first = dict.fromkeys(program.mesh.names, 0)
        before = {op.name: op for op in program.constants}
        running = {op.name: op for op in (*program.constants, *program.prologue, *program.body)}
        for op in self.graph.ops:
            if op.name in mine and op.name not in self.row_of:
                facts = self._facts(op, running.get(op.name, op), program, first, op.name in before)
                self._place(op.module_path, TreeRow(facts, np.zeros(len(COSTS)), [op.name]), stage)
        for spec in program.parameters:
            if spec.name not in self.row_of:
                path = spec.name.rpartition(".")[0]
                self._place(path, TreeRow(self._stored(spec, program, first), np.zeros(len(COSTS)), [spec.name]), stage)

    def _place(self, path: str, row: TreeRow, stage: int) -> None:
        self.row_of[row.names[0]] = row
        node = self.root
        node.stages.add(stage)
        for name in path.split(".") if path else ():
            node = node.children.setdefault(name, TreeNode(name))
            node.stages.add(stage)
        node.rows.append(row)

    def _facts(
        self, op: Op, lowered: Op, program: LoweredProgram, first: Mapping[str, int], constant: bool
    ) -> dict[str, Any]:
        value = self.graph.values[op.outputs[0]]
        source = None if op.source is None else (str(op.source), op.source.code)
        facts: dict[str, Any] = {
            "kind": op.name.rpartition("/ ")[2], "shape": list(value.shape), "dtype": value.dtype,
            "choice": self.texts.number(describe_choice(self.choices.get(op.name, {}))),
        }  # fmt: skip
        facts["target"] = self.texts.number(op.target)
        layout = program.layouts.get(op.outputs[0])
        if layout is not None:
            facts["layout"] = self.layouts.layout(layout)
            facts["local"] = list(layout.local_shape(value.shape, program.mesh.sizes, first))
        facts["inputs"] = [
            self._input(name, program, op.module_path) for name in lowered.inputs if name in program.layouts
        ]
        if source is not None:
            facts["source"] = self.sources.number(source, list(source))
        if constant:
            facts["constant"] = 1
        if lowered.region is not None or any(_inside(op.module_path, path) for path in self.recomputed):
            facts["recomputed"] = 1
        return facts

    def _input(self, name: str, program: LoweredProgram, path: str) -> int:
        """The number of an input in `inputs`: what it is called in its module, its shape, its layout."""
        word = word_of(graph_value(name).removeprefix(path.replace(".", "_") + "_"))
        shape, layout = list(program.values[name].shape), self.layouts.layout(program.layouts[name])
        return self.inputs.number((word, *shape, layout), [word, shape, layout])

    def _stored(self, spec: ParameterSpec, program: LoweredProgram, first: Mapping[str, int]) -> dict[str, Any]:
        stored = stored_bytes(program, spec)
        sums = [axis for axis in program.mesh.names if axis != MB and spec.layout.placement(axis) == REPLICATE]
        return {
            "parameter": spec.name.rpartition(".")[2], "shape": list(spec.shape), "dtype": spec.dtype,
            "layout": self.layouts.layout(spec.layout),
            "local": list(spec.layout.local_shape(spec.shape, program.mesh.sizes, first)),
            "stored": self.texts.number(_stored_text(spec, sums)),
            "bytes": [int(stored.parameter), int(stored.gradient) if spec.trainable else 0],
        }  # fmt: skip

    def price(self, priced: PricedTables, share: float) -> None:
        """Add what ops, reshards and parameters cost. A reshard is its reader's; of several readers its maker's.

        share   of a mean device: 1 by the number of pipeline ranks, as in the plan file
        """
        columns = [Resource[name] for name in COSTS]
        for part in priced.parts():
            row = self.row_of.get(part.reader or part.name)
            if row is None:
                continue
            scale = np.array([{"UPDATE": share, "KEPT": 1.0}.get(name, share * priced.times) for name in COSTS])
            row.costs += scale * part.used[columns]
            sent = [message for message in part.messages if message.axes]
            if part.kind == "reshard" and sent and part.layouts is not None:
                shown: dict[str, list[list[Any]]] = {"forward": [], "backward": []}
                for message in sent:
                    shown[message.when].append([message.collective, list(message.axes)])
                facts = {
                    "from": self.layouts.layout(part.layouts[0]), "to": self.layouts.layout(part.layouts[1]),
                    "value": part.name.rpartition("/ ")[2] if part.name in self.row_of else part.name, **shown,
                }  # fmt: skip
                row.reshards.append((facts, share * sum(message.seconds for message in sent)))

    def finish(self, names: Interned) -> tuple[dict[str, Any], list[int]]:
        """The folded tree as data, and for each name in `names` the number of its row (-1: none)."""
        _fold(self.root)
        numbers: dict[str, int] = {}
        tree = _written(self.root, numbers, count())
        for name in numbers:
            names.number(name)
        return tree, [numbers.get(name, -1) for name in names.items]


def _stored_text(spec: ParameterSpec, sums: Sequence[str]) -> tuple[str, str]:
    """How a parameter is stored, and over which axes its gradient is summed."""
    how = f"{spec.storage.title} over {', '.join(spec.storage.axes)}" if spec.storage.axes else "replicated"
    return how, ", ".join(sums) if spec.trainable else "frozen"


def _inside(path: str, outer: str) -> bool:
    return path == outer or path.startswith(f"{outer}.")


def _fold(node: TreeNode) -> None:
    """Neighbouring numbered modules that are alike become one."""
    for child in node.children.values():
        _fold(child)
    folded: list[tuple[list[TreeNode], str]] = []
    for child in node.children.values():
        signature = child.signature() if child.name.isdigit() else ""
        last = folded[-1] if folded else None
        if signature and last is not None and last[1] == signature and int(last[0][-1].name) + 1 == int(child.name):
            last[0].append(child)
        else:
            folded.append(([child], signature))
    node.children = {}
    for run, _ in folded:
        first = run[0]
        for other in run[1:]:
            _merge(first, other)
        if len(run) > 1:
            first.name, first.count = f"{first.name}-{run[-1].name}", len(run)
        node.children[first.name] = first


def _merge(node: TreeNode, other: TreeNode) -> None:
    node.stages |= other.stages
    for row, same in zip(node.rows, other.rows, strict=True):
        row.costs = row.costs + same.costs
        row.names += same.names
        row.reshards = [
            (facts, seconds + more) for (facts, seconds), (_, more) in zip(row.reshards, same.reshards, strict=True)
        ]
    for child, twin in zip(node.children.values(), other.children.values(), strict=True):
        _merge(child, twin)


def _written(node: TreeNode, numbers: dict[str, int], counter: Iterator[int]) -> dict[str, Any]:
    rows = []
    for row in node.rows:
        number = next(counter)
        rows.append(_row(row, number))
        numbers.update(dict.fromkeys(row.names, number))
    return {
        "name": node.name, "count": node.count, "stages": sorted(node.stages), "rows": rows,
        "children": [_written(child, numbers, counter) for child in node.children.values()],
    }  # fmt: skip


def _row(row: TreeRow, number: int) -> dict[str, Any]:
    shown = {**row.facts, "id": number, "costs": shorts(row.costs.tolist())}
    if shown.get("local") == shown["shape"]:
        del shown["local"]
    if len(row.names) > 1:
        shown["times"] = len(row.names)
    if row.reshards:
        shown["reshards"] = [{**facts, "seconds": float(f"{seconds:.4g}")} for facts, seconds in row.reshards]
    return shown


def choices_tree(choices: Mapping[str, Mapping[str, str]], storage: Mapping[str, str]) -> dict[str, Any]:
    """The tree of what the plan file names, without a model: which role each op has, and how parameters are stored."""
    root: dict[str, Any] = {"name": "", "count": 1, "stages": [], "rows": [], "children": []}
    rows: Iterator[tuple[str, dict[str, Any]]] = (
        *((name.partition(" / ")[0] if not name.startswith("/ ") else "",
           {"kind": name.rpartition("/ ")[2], "choice": describe_choice(choice)}) for name, choice in choices.items()),
        *((key.rpartition(".")[0], {"parameter": key.rpartition(".")[2], "storage": how})
          for key, how in storage.items()),
    ).__iter__()  # fmt: skip
    for number, (path, row) in enumerate(rows):
        _module(root, path.split(".") if path else [])["rows"].append({**row, "id": number})
    return root


def _module(root: dict[str, Any], path: Sequence[str]) -> dict[str, Any]:
    node = root
    for name in path:
        child = next((child for child in node["children"] if child["name"] == name), None)
        if child is None:
            child = {"name": name, "count": 1, "stages": [], "rows": [], "children": []}
            node["children"].append(child)
        node = child
    return node

"""Activation checkpointing: which modules save only their inputs for backward, and are recomputed there.

    "model.layers.3"        a whole layer: only its inputs are saved
    "model.layers.3.mlp"    a part of one

An entry is a module path, and a region is one call of that module: all ops at or under the path. What may not be an
entry: a module that the model does not have, one inside of another entry, one that a checkpointed region of the
user's model reaches beyond of (such a region stays as it is; one that lies in an entry becomes a part of it), and one
that reads a buffer which the step changes, since backward would read the new value.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from ..errors import PlanError, raise_all
from ..ir import Graph, Op
from ..ir.paths import is_inside, prefixes

REGION = "recompute "
"""How the name of a region begins that comes from a plan; those of the user's model are r0, r1, .."""

_CALL = re.compile(r"@\d+")


def region_path(region: str) -> str | None:
    """The module that a plan's region is a call of; None for a region of the user's model."""
    return _CALL.sub("", region.removeprefix(REGION)) if region.startswith(REGION) else None


def regions_of(graph: Graph, paths: Sequence[str]) -> dict[str, str]:
    """The region of every op that is in one, the user's own included. Refuses entries that can't be, all at once."""
    faults = [f"it recomputes {path!r} twice" for path, count in Counter(paths).items() if count > 1]
    for path in dict.fromkeys(paths):
        faults += [f"it recomputes {path!r}, {why}" for why in faults_of(graph, path)]
        outer = next((other for other in paths if other != path and is_inside(path, other)), None)
        if outer is not None:
            faults.append(f"it recomputes {path!r}, which is in {outer!r}, and that is recomputed already; name one")
    raise_all(PlanError, "the plan does not fit the model:", faults)
    regions = {op.name: op.region for op in graph.ops if op.region is not None}
    for path in paths:
        for number, ops in enumerate(_calls(graph.under[path])):
            regions |= dict.fromkeys((op.name for op in ops), f"{REGION}{path}{f'@{number}' if number else ''}")
    return regions


def faults_of(graph: Graph, path: str) -> list[str]:
    """Why a module can't be recomputed, each as the end of a sentence; nothing if it can."""
    ops = graph.under.get(path, ())
    if not ops:
        return ["which is not a module of the model that has ops" if path else "the whole model, which saves nothing"]
    faults: list[str] = []
    names, own = {op.name for op in ops}, {op.region for op in ops if op.region is not None}
    for region in sorted(own):
        beyond = next((op for op in graph.ops if op.region == region and op.name not in names), None)
        if beyond is not None:
            faults.append(f"but the model checkpoints a region that reaches beyond it, to {beyond}; leave that to it")
    changed = {state.value: f"buffer {state.key!r}" for state in graph.buffers if state.update is not None}
    changed |= {state.value: f"parameter {state.key!r}" for state in graph.parameters if state.update is not None}
    updates = {update for _, update in graph.updates()}
    for op in ops:
        if "batch_norm" in op.target:  # one that trains only writes its buffers
            continue
        if all(name in updates and not graph.users[name] for name in op.outputs):  # backward has no use for it
            continue
        for state in (changed[name] for name in op.inputs if name in changed):
            faults.append(f"where {op} reads the {state}, which the step changes before backward")
    return faults


def _calls(ops: Sequence[Op]) -> list[Sequence[Op]]:
    """The ops of a module that is called several times, by call, if all its calls do the same."""
    first = _CALL.sub("", ops[0].name)
    count = sum(_CALL.sub("", op.name) == first for op in ops)
    size, rest = divmod(len(ops), count)
    calls = [ops[at : at + size] for at in range(0, len(ops), size)]
    signatures = [[(op.module_path, op.target) for op in call] for call in calls]
    return calls if not rest and all(signature == signatures[0] for signature in signatures) else [ops]


def layers_of(graph: Graph) -> tuple[str, ...]:
    """The repeated layers of a model: items of its outermost lists that have a sibling of much the same ops.

    "Much the same" is three quarters of the smaller one: the first layer of a T5 also makes the position bias of all.
    Items with a handful of ops of one module (an activation in a Sequential) are no layers.
    """
    ops: dict[str, Counter[tuple[str, str]]] = {}
    for op in graph.ops:
        for path in prefixes(op.module_path):
            if path.rsplit(".", 1)[-1].isdigit():
                ops.setdefault(path, Counter())[op.module_path[len(path) :], op.target] += 1
    large = {
        path: counts for path, counts in ops.items() if len({where for where, _ in counts}) > 1 or counts.total() > 4
    }
    lists: dict[str, list[str]] = {}
    for path in large:
        lists.setdefault(path.rpartition(".")[0], []).append(path)
    layers = [
        path
        for path, counts in large.items()
        if any(_alike(counts, large[other]) for other in lists[path.rpartition(".")[0]] if other != path)
    ]
    return tuple(path for path in layers if not any(path != outer and is_inside(path, outer) for outer in layers))


def _alike(a: Counter[tuple[str, str]], b: Counter[tuple[str, str]]) -> bool:
    return (a & b).total() >= 0.75 * min(a.total(), b.total()) and 2 * (a & b).total() >= max(a.total(), b.total())

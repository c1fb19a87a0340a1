"""What a plan file should have, beside what only its model can tell."""

from __future__ import annotations

from typing import Any

from ..formats import (
    Faults,
    anything,
    boolean,
    either,
    integer,
    listing,
    literal,
    mapping,
    nothing,
    number,
    record,
    text,
)
from ..layout import MOST_DEVICES
from .plan import VERSION

_NAME = text(r"[^\\\"]*", longest=1000, described="text without quotes and backslashes")
"""Of a model, a policy or a cluster, which stand in generated code and in the names of files."""
_AXIS = text(r"[A-Za-z]\w{0,31}", described="a name such as dp or tp1")
_WORD = text(longest=200)
_seconds = number()
_bytes = number(low=0)
_count = integer(0)

_CHOICES = mapping(mapping(_WORD, _AXIS, most=8))
_MESH = mapping(integer(1, MOST_DEVICES), _AXIS, most=8)
_STAGE = {"choices": _CHOICES, "recompute": listing(text())}
_MAY_HAVE = {"chunked_loss": mapping(integer(1, 2**31))}
_PLACED = {
    **_STAGE, "mesh": _MESH, "devices": listing(integer(0, MOST_DEVICES - 1), most=MOST_DEVICES),
    "ops": listing(text()),
}  # fmt: skip
_STORAGE = mapping(mapping(either(integer(1, 9), _WORD), _AXIS, most=8))
_STEPS = record(
    {
        "name": _NAME, "microbatches": integer(1, 2**16), "holders": listing(text(), most=2**16),
        "steps": listing(text(longest=10_000_000), most=2**16),
    }
)  # fmt: skip

# -- what the plan was predicted to cost -----------------------------------------------------------

_FOR = record(
    {
        "cluster": text(), "batch": either(_count, nothing()), "optimizer": text(),
        "compute": either(text(), nothing()), "reduce": either(text(), nothing()), "accumulate": integer(1),
        "replica_axes": listing(_AXIS), "outputs": text(),
    },
    {"masters": boolean(), "precision": text()},
    others=True,
)  # fmt: skip
_MEMORY = record(
    dict.fromkeys(("peak", "parameters", "gradients", "optimizer", "activations", "buffers", "inputs"), _bytes),
    others=True,
)
_AXIS_USE = record(
    {
        "axis": _AXIS, "size": _count, "links": listing(text()), "nodes": _count, "batch": number(),
        "weights": number(), "other": number(),
    },
    others=True,
)  # fmt: skip
_SENT = record(
    {
        "when": text(), "collective": text(), "axes": listing(_AXIS), "count": number(), "seconds": _seconds,
        "hidden": _seconds, "overlapped": boolean(),
    },
    {"bytes": number()},
    others=True,
)  # fmt: skip
_THROUGHPUT = record(
    {
        "samples": either(number(), nothing()), "tokens": either(number(), nothing()), "flops": number(),
        "mfu": number(),
    },
    others=True,
)  # fmt: skip
_PART = record({"name": text(), "count": _count, "seconds": _seconds}, {"sends": text()}, others=True)
_TRIED = {"mesh": text(), "bound": either(_seconds, nothing()), "seconds": either(_seconds, nothing())}
_MESH_TRIED = either(
    record({**_TRIED, "outcome": literal("chosen", "bounded", "does not fit", "not solved")}, {"memory": _bytes}),
    record({**_TRIED, "outcome": literal("slower"), "seconds": _seconds}),
)
_RUNNER_UP = record({"text": text(), "seconds": _seconds}, others=True)
_PIPELINES = record({"best": either(_RUNNER_UP, nothing()), "tried": _count, "pruned": _count}, others=True)
_PREDICTED_STAGE = record(
    {
        "devices": text(), "mesh": text(), "layers": listing(text()), "recompute": _count, "forward": _seconds,
        "backward": _seconds, "weight": _seconds, "enters": _seconds, "memory": _bytes,
    },
    others=True,
)  # fmt: skip
_PIPELINE = record(
    {
        "bubble": number(), "balance": number(), "stages": listing(_PREDICTED_STAGE, most=4096, least=1),
    },
    {
        "flat": either(record({"mesh": text(), "seconds": _seconds}, others=True), nothing()),
        "others": listing(_RUNNER_UP), "tried": _count, "pruned": _count, "links": listing(text()),
    },
    others=True,
)  # fmt: skip
_TIMES = {
    "for": _FOR, "seconds": _seconds, "compute": _seconds, "blocking": _seconds, "exposed": _seconds,
    "update": _seconds, "stored": mapping(_bytes), "memory": _MEMORY, "limit": number(low=1),
    "at": record({"phase": text(), "op": text()}, others=True),
}  # fmt: skip
_FLAT = record(
    {
        **_TIMES, "axes": listing(_AXIS_USE), "sent": listing(_SENT), "ops": listing(_PART), "edges": listing(_PART),
    },
    {
        "bound": number(finite=False), "gap": number(finite=False), "stopped": boolean(),
        "meshes": listing(_MESH_TRIED), "pipelines": _PIPELINES, "throughput": _THROUGHPUT,
    },
    others=True,
)  # fmt: skip
_STAGED = record(
    {**_TIMES, "pipeline": _PIPELINE},
    {
        "stopped": boolean(), "axes": listing(_AXIS_USE), "sent": listing(_SENT), "ops": listing(_PART),
        "edges": listing(_PART), "bubble": _seconds, "throughput": _THROUGHPUT,
    },
    others=True,
)  # fmt: skip

_PLAN = record(
    {
        "version": literal(VERSION), "model": _NAME, "policy": _NAME, "cluster": text(), "mesh": _MESH,
        "microbatches": integer(1, 2**16), "fingerprints": mapping(text(longest=200)), "storage": _STORAGE,
        "entries": mapping(listing(anything(), most=4096, least=1), most=1000), "notes": listing(text()),
        "predicted": mapping(anything()),
    },
    {"schedule": text(longest=200), "steps": _STEPS, "local": boolean(), "batch_norm": literal("global", "local")},
)  # fmt: skip


RENAMED = {
    "rows": "replica_axes", "looked": "tried", "left": "pruned", "said": "text", "waited": "blocking",
    "beside": "overlapped",
}  # fmt: skip
"""Keys of predictions in files of version 1, which differs in nothing else."""


def upgraded(data: Any) -> Any:
    """A plan file of version 1 as one of this version; anything else as it is."""
    if not isinstance(data, dict) or type(data.get("version")) is not int or data["version"] != 1:
        return data
    predicted = {"predicted": _renamed(data["predicted"])} if "predicted" in data else {}
    return {**data, "version": VERSION, **predicted}


def _renamed(item: Any) -> Any:
    if isinstance(item, dict):
        return {RENAMED.get(key, key): _renamed(value) for key, value in item.items()}
    return [_renamed(each) for each in item] if isinstance(item, list) else item


def plan_faults(data: Any) -> Faults:
    """Every fault of a plan file, with its place."""
    faults = list(_PLAN(data))
    entries = data.get("entries") if isinstance(data, dict) else None
    for entry, stages in entries.items() if isinstance(entries, dict) else ():
        stage = record(_STAGE if isinstance(stages, list) and len(stages) == 1 else _PLACED, _MAY_HAVE)
        faults += [(("entries", entry, *route), text) for route, text in listing(stage)(stages)]
    predicted = data.get("predicted") if isinstance(data, dict) else None
    for entry, item in predicted.items() if isinstance(predicted, dict) else ():
        schema = _STAGED if isinstance(item, dict) and "pipeline" in item else _FLAT
        faults += [(("predicted", entry, *route), text) for route, text in schema(item)]
    return list(dict.fromkeys(faults))

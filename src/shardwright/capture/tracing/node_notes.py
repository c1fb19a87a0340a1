"""Notes on the nodes of a trace: the checkpointed region they belong to, and whether gradients were off.

Export traces a model several times over, and hands `torch.fx.traceback.current_meta` from one trace to the next. The
notes have keys of their own there. Torch's way to do this, `torch.fx.traceback.annotate`, stores everything under one
key of this global dict, and every function that dynamo skips (`checkpoint`, `Optimizer.step`) enters it: a rank that
runs as a thread would restore another thread's notes, in the middle of its trace or after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx
from torch.fx import traceback
from torch.fx.proxy import TracerBase

NO_GRAD = "shardwright_no_grad"
REGION = "shardwright_region"


@contextmanager
def noting() -> Iterator[None]:
    """Within this, nodes of a trace get the notes that are set when they are created."""
    tracer: Any = TracerBase
    original = tracer.create_node

    def create_node(self: TracerBase, *args: Any, **kwargs: Any) -> fx.Node:
        node: fx.Node = original(self, *args, **kwargs)
        replayed = traceback.get_current_replay_node()  # a view that is made again after a write to its base
        notes = traceback.current_meta if replayed is None else replayed.meta
        node.meta.update({key: notes[key] for key in (NO_GRAD, REGION) if key in notes})
        return node

    with traceback.preserve_node_meta():
        try:
            tracer.create_node = create_node
            yield
        finally:
            tracer.create_node = original


def set_note(key: str, value: Any) -> Any:
    """Note something on the nodes that follow, or None to stop it; returns what was noted before."""
    before = traceback.current_meta.pop(key, None)
    if value is not None:
        traceback.current_meta[key] = value
    return before

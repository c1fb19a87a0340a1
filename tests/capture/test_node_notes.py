"""What nodes of a trace note comes from the trace alone, whatever other threads do and however an earlier one ended."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwright.capture import capture
from shardwright.errors import CaptureError


class Nested(nn.Module):
    """A checkpointed call within another, with something done in the innermost, without gradients."""

    def __init__(self, then: Callable[[], None]) -> None:
        super().__init__()
        self.layer, self._then = nn.Linear(4, 4), [then]

    def _inner(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self._then[0]()
        return self.layer(x)

    def _outer(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self._inner, self.layer(x), use_reentrant=False)
        return result

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self._outer, x, use_reentrant=False)
        return result.sum()


def notes_of_a_plain_model() -> set[tuple[str | None, bool]]:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    return {(op.region, op.no_grad) for op in capture(model, (torch.randn(2, 4),)).graph.ops}


def test_a_thread_that_computes_during_a_trace_leaves_nothing_behind() -> None:
    entered, done = threading.Event(), threading.Event()

    @torch._dynamo.disable
    def step() -> None:  # what `Optimizer.step` and `checkpoint` are to dynamo, on a rank that is a thread
        entered.set()
        done.wait()

    other = threading.Thread(target=step)

    def start_other() -> None:
        if not other.ident:
            other.start()
            entered.wait()

    capture(Nested(start_other), (torch.randn(2, 4),))
    done.set()
    other.join()
    assert notes_of_a_plain_model() == {(None, False)}


def test_a_trace_that_fails_in_a_checkpointed_region_leaves_nothing_behind() -> None:
    def fail() -> None:
        raise ValueError("not today")

    try:
        capture(Nested(fail), (torch.randn(2, 4),))
    except CaptureError as error:
        kept = [error]  # with its frames, in which the checkpointed calls are still open
    assert notes_of_a_plain_model() == {(None, False)}
    kept.clear()
    gc.collect()
    assert notes_of_a_plain_model() == {(None, False)}

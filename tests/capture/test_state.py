"""What a forward keeps in attributes: fine if its next call does the same, refused if it reads it there."""

import copy
import re
from collections import Counter, defaultdict, deque
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from shardwright.capture import capture
from shardwright.errors import CaptureError

from .agreement import agree

SHARED = torch.zeros(4, dtype=torch.float64)


class Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.kept: Tensor | tuple[Tensor, ...] | None = None
        self.table, self.table_of = torch.zeros(4, dtype=torch.float64), {}
        self.calls = 0
        self.losses: list[Tensor] = []


class Inspected(Keeping):
    """Keeps what somebody may want to look at."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.calls += 1
        self.kept = y.mean()
        return y + self.kept


class Cached(Keeping):
    """Makes a constant once."""

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = torch.arange(4.0, dtype=x.dtype)
        return self.linear(x) * self.kept


class Filled(Keeping):
    """Fills a table once, in an object."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] not in self.table_of:
            self.table_of[x.shape[-1]] = Meter(x.shape[-1])
        return self.linear(x) * self.table_of[x.shape[-1]].count


class Meter:
    """What many write for themselves."""

    def __init__(self, count: int = 0) -> None:
        self.count, self.values = count, []

    def update(self, value: object) -> None:
        self.count += 1
        self.values.append(value)


METER, SEEN, CALLS, COUNTS = Meter(), [], 0, {"calls": 0}


def count_global() -> None:
    global CALLS
    CALLS += 1


def count_in(namespace: SimpleNamespace) -> None:
    namespace.n += 1


CHANGES = {
    "a list of tensors": ("self.noted", [], lambda module, y: module.noted.append(y.mean())),
    "a list of numbers": ("self.noted", [], lambda module, y: module.noted.append(y.shape[0])),
    "an entry of a dict": ("self.noted", {}, lambda module, y: module.noted.update(mean=y.mean())),
    "a counter in a dict": ("self.noted", Counter(), lambda module, y: module.noted.update(["calls"])),
    "lists in a dict": ("self.noted", defaultdict(list), lambda module, y: module.noted["mean"].append(y.mean())),
    "a deque": ("self.noted", deque(maxlen=9), lambda module, y: module.noted.append(y.mean())),
    "a set": ("self.noted", set(), lambda module, y: module.noted.add(len(module.noted))),
    "an object with tensors": ("self.noted", Meter(), lambda module, y: module.noted.update(y.mean())),
    "an object with numbers": ("self.noted", Meter(), lambda module, y: module.noted.update(1)),
    "a namespace": ("self.noted", SimpleNamespace(n=0), lambda module, y: count_in(module.noted)),
    "a list of a submodule": ("self.linear.noted", [], lambda module, y: module.linear.noted.append(y.mean())),
    "a global list": ("SEEN", None, lambda module, y: SEEN.append(1)),
    "a global number": ("CALLS", None, lambda module, y: count_global()),
    "a global dict": ("COUNTS", None, lambda module, y: COUNTS.update(calls=COUNTS["calls"] + 1)),
    "a global object": ("METER", None, lambda module, y: METER.update(1)),
}
"""What a forward changes at every call: its name, what is there before, and the change."""


class Changing(Keeping):
    def __init__(self, change: str) -> None:
        super().__init__()
        name, before, self.change = CHANGES[change]
        owner = self.linear if "linear" in name else self
        owner.noted = copy.deepcopy(before)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.change(self, y)
        return y


class Recurrent(Keeping):
    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.zeros(4).to(x) if self.kept is None else self.kept
        y = self.linear(x) + hidden
        self.kept = y.detach().mean(0)
        return y


class RecurrentPair(Keeping):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) + (self.kept[0] if self.kept else 0.0)
        self.kept = (y.detach().mean(0), y.detach().sum(0))
        return y


class Counting(Keeping):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) * min(1.0, self.calls / 100)


class Summing(Keeping):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.losses.append(y.mean())
        return y + sum(self.losses)


class Writing(Keeping):
    def forward(self, x: Tensor) -> Tensor:
        self.table += x.mean(0)
        return self.linear(x) + self.table


class WritingShared(Keeping):
    def forward(self, x: Tensor) -> Tensor:
        SHARED.add_(x.mean(0))
        return self.linear(x) + SHARED


def x() -> Tensor:
    return torch.randn(2, 4, dtype=torch.float64)


@pytest.mark.parametrize("change", CHANGES)
def test_what_every_call_changes_in_place_is_refused(change):
    name = CHANGES[change][0]
    with pytest.raises(CaptureError, match=rf"{re.escape(name)}.* at every call.*Return"):
        capture(Changing(change), (x(),))


@pytest.mark.parametrize("kind", [Inspected, Cached, Filled])
def test_what_the_next_call_does_not_need_may_be_kept(kind):
    module = kind()
    agree(module, x())
    capture(module, (x(),))
    assert (module.kept, module.calls, module.losses) == (None, 0, [])


@pytest.mark.parametrize(
    ("kind", "name"),
    [(Recurrent, "kept"), (RecurrentPair, "kept"), (Counting, "calls"), (Summing, "losses")],
)
def test_what_the_next_call_reads_is_refused(kind, name):
    with pytest.raises(CaptureError, match=rf"changes self\.{name}, and its next call reads it.*register_buffer"):
        capture(kind(), (x(),))


def test_a_write_to_a_tensor_that_is_no_buffer_is_refused():
    with pytest.raises(CaptureError, match=r"writes to the tensor self\.table, which is no buffer"):
        capture(Writing(), (x(),))
    with pytest.raises(CaptureError, match=r"SHARED is a variable .* changes it at every call.*register_buffer"):
        capture(WritingShared(), (x(),))

"""What a forward keeps in attributes: fine if its next call does the same, refused if it reads it there."""

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
        self.table = torch.zeros(4, dtype=torch.float64)
        self.calls = 0
        self.losses: list[Tensor] = []


class Looked(Keeping):
    """Keeps what somebody may want to look at."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.calls += 1
        self.kept = y.mean()
        self.losses.append(y.sum())
        return y + self.kept


class Cached(Keeping):
    """Makes a constant once."""

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = torch.arange(4.0, dtype=x.dtype)
        return self.linear(x) * self.kept


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


@pytest.mark.parametrize("kind", [Looked, Cached])
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


@pytest.mark.parametrize(("kind", "name"), [(Writing, "self.table"), (WritingShared, "of a global or a list")])
def test_a_write_to_a_tensor_that_is_no_buffer_is_refused(kind, name):
    with pytest.raises(CaptureError, match=f"writes to the tensor {name}, which is no buffer"):
        capture(kind(), (x(),))

"""A sum that is on its way behaves as the number that it will be."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shardwright.layout import Axis, Mesh
from shardwright.runtime import all_reduce_pending
from shardwright.runtime.collectives.pending import PendingTensor
from shardwright.runtime.world import Groups
from tests.runtime.ranks import run_processes, run_ranks

READS: dict[str, Callable[[Tensor], float]] = {
    "item": lambda x: x.item(),
    "float": lambda x: float(x.detach()),
    "detach": lambda x: x.detach().item(),
    "arithmetic": lambda x: (x * 2 / 2).item(),
    "stack": lambda x: torch.stack([x, x]).mean().item(),
    "numpy": lambda x: float(x.detach().cpu().numpy()),
    "print": lambda x: float(str(x.detach()).removeprefix("tensor(").split(",")[0].rstrip(")")),
    "format": lambda x: float(f"{x.item():.6f}"),
    "copy": lambda x: copy.deepcopy(x.detach()).item(),
    "pickle": lambda x: pickle.loads(pickle.dumps(x.detach())).item(),
    "compare": lambda x: 3.0 if x == 3.0 else 0.0,
    "out": lambda x: torch.add(x.detach(), 0, out=torch.empty((), dtype=x.dtype)).item(),
}


class Slow:
    """A sum that arrives only when somebody waits."""

    def __init__(self, x: PendingTensor) -> None:
        self.waited, self.finish = 0, x.finish

    def __call__(self) -> Tensor:
        self.waited += 1
        return self.finish()


def read(rank: int, how: str) -> tuple[float, int]:
    share = torch.tensor(1.0 + rank, dtype=torch.float64, requires_grad=True)
    x = all_reduce_pending(share * 1.0, Groups(Mesh(axes=(Axis(name="dp", size=2),)))["dp"])
    assert isinstance(x, PendingTensor)
    slow = x.finish = Slow(x)
    actual = READS[how](x)
    return actual, slow.waited


@pytest.mark.parametrize("how", READS)
def test_whoever_reads_it_waits_once_and_has_the_sum(how: str) -> None:
    assert run_ranks(2, read, how) == [(3.0, 1), (3.0, 1)]


def train(rank: int) -> list[float]:
    share = torch.tensor(1.0 + rank, dtype=torch.float64, requires_grad=True)
    x = all_reduce_pending(share * 5.0, Groups(Mesh(axes=(Axis(name="dp", size=2),)))["dp"])
    slow = x.finish = Slow(x)
    assert x.requires_grad
    assert x.shape == ()
    assert x.grad_fn is not None
    x.backward()
    waited = slow.waited
    return [waited, share.grad.item(), x.item(), slow.waited]


def test_backward_does_not_wait() -> None:
    assert run_ranks(2, train) == [[0, 5.0, 15.0, 1]] * 2


def late(rank: int) -> float:
    """Real processes, one of them late."""
    import time

    group = Groups(Mesh(axes=(Axis(name="dp", size=2),)))["dp"]
    if rank:
        time.sleep(0.5)
    return all_reduce_pending(torch.tensor(float(rank + 1)), group).item()


def test_a_late_rank_is_waited_for() -> None:
    assert run_processes(2, late) == [3.0, 3.0]

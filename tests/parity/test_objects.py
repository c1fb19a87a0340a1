"""Plain objects as arguments: their numbers are fixed until they change, their tensors are inputs."""

from __future__ import annotations

import copy
import enum
from argparse import Namespace
from dataclasses import dataclass, make_dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from shardwright.capture import capture
from shardwright.errors import CaptureError
from shardwright.parallelize import parallelize
from tests.runtime.ranks import run_ranks


class Config:
    def __init__(self, scale: float, inner: Any = None) -> None:
        self.scale, self.inner = scale, inner

    def doubled(self) -> float:
        return self.scale * 2


@dataclass
class Data:
    scale: float
    name: str = "data"


class Pair(NamedTuple):
    scale: float
    shift: Tensor


class Size(enum.Enum):
    SMALL = 1.0
    LARGE = 2.0

    @property
    def scale(self) -> float:
        return self.value


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, config: Any) -> Tensor:
        factor = config.doubled() if isinstance(config, Config) else config.scale
        shift = getattr(config, "shift", 0.0)
        return (self.linear(x) * factor + shift).square().mean()


def changed(config: Any) -> Any:
    """Another config of the kind, or the same object with another number in it."""
    if isinstance(config, Size):
        return Size.LARGE
    if isinstance(config, Pair):
        return Pair(5.0, config.shift * 2)
    config.scale = 5.0
    return config


CONFIGS = {
    "object": lambda: Config(3.0, Config(1.0, [1, 2])),
    "namespace": lambda: SimpleNamespace(scale=3.0, shift=torch.ones(8)),
    "argparse": lambda: Namespace(scale=3.0, verbose=True),
    "dataclass": lambda: Data(3.0),
    "named tuple": lambda: Pair(3.0, torch.ones(8)),
    "enum": lambda: Size.SMALL,
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_config_is_read_at_every_call(kind):
    torch.manual_seed(0)
    net, x, config = Scaled(), torch.randn(4, 8), CONFIGS[kind]()
    second = changed(copy.deepcopy(config))
    expected = [net(x, value).item() for value in (config, second)]

    def run(rank: int) -> list[float]:
        mine = copy.deepcopy(config)
        model = parallelize(copy.deepcopy(net), plan="tp=2", example=(x, mine))
        return [model(x, mine).item(), model(x, changed(mine)).item()]

    for result in run_ranks(2, run):
        assert result == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("argument", [object(), SimpleNamespace(scale=2.0, function=print)])
def test_what_can_not_be_compared_is_refused(argument):
    with pytest.raises(CaptureError, match=r"(?s)can't capture Scaled.*An argument is a .*plain objects of these"):
        capture(Scaled(), (torch.randn(4, 8), argument))


@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
def test_an_object_that_torch_meets_for_the_first_time_in_a_call_is_looked_into(plan):
    kind = make_dataclass("Batch", ["rows", "scale", "shift"])  # nobody has registered it yet
    torch.manual_seed(0)
    plain, rows = Scaled(), torch.randn(4, 8)
    expected = plain(rows, kind(rows, 2.0, torch.ones(8))).item()

    class Batched(Scaled):
        def forward(self, batch: Any) -> Tensor:
            return super().forward(batch.rows, batch)

    def run(rank: int) -> float:
        mine = Batched()
        mine.load_state_dict(plain.state_dict())
        return parallelize(mine, plan=plan)(kind(rows, 2.0, torch.ones(8))).item()

    for result in run_ranks(2, run):
        assert result == pytest.approx(expected, rel=1e-5)


class Configured(nn.Module):
    """Is told how to compute: a dtype, a part of its columns, and which of its layers to use."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, dtype: torch.dtype, columns: slice, layers: range) -> Tensor:
        for at in layers:
            x = self.layers[at](x).tanh()
        return x[:, columns].to(dtype).square().mean()


def test_values_that_are_no_numbers_are_fixed_until_they_change(tmp_path):
    torch.manual_seed(0)
    x, original = torch.randn(4, 8), Configured()
    calls = [(torch.float64, slice(0, 4), range(2)), (torch.float64, slice(2, 8), range(0, 3, 2))]

    def run(rank: int) -> list[Tensor]:
        model = parallelize(copy.deepcopy(original), plan="dp=2", compile={"directory": tmp_path})
        return [model(x, *value).detach() for value in calls]

    for result in run_ranks(2, run):
        for loss, call in zip(result, calls, strict=True):
            torch.testing.assert_close(loss, original(x, *call).detach())

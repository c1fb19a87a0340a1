"""Containers that models return, as their libraries registered them with torch."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from shardwright.parallelize import parallelize
from shardwright.verify import verify
from tests.runtime.ranks import run_ranks

X = torch.linspace(-1, 1, 16, dtype=torch.double).view(4, 4)


class Output(OrderedDict[str, Any]):
    """A dataclass that is a dict too, as diffusers has its outputs: a pytree whose children have no names."""

    def __init_subclass__(cls) -> None:
        pytree.register_pytree_node(
            cls,
            lambda result: (list(result.values()), list(result)),
            lambda value, names: cls(**dict(zip(names, value, strict=True))),
        )

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


@dataclass
class Sample(Output):
    sample: torch.Tensor
    hidden: torch.Tensor | None = None


class Pair:
    """A container that says nothing of its children but how many there are."""

    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second


pytree.register_pytree_node(Pair, lambda result: ([result.first, result.second], None), lambda value, _: Pair(*value))


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.up, self.down = kind, nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        hidden = self.up(x).relu()
        if self.kind == "pair":
            return Pair(self.down(hidden), Sample(sample=hidden))
        return Sample(sample=self.down(hidden))


@pytest.mark.parametrize("kind", ["sample", "pair"])
@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
def test_an_output_without_names_for_its_children(tmp_path, kind, plan):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        nets = [Net(kind).double() for _ in range(3)]
    for net in nets[1:]:
        net.load_state_dict(nets[0].state_dict())
    wanted = nets[2](X)

    def run(rank):
        return parallelize(nets[rank], plan=plan, example=(X,), compile={"directory": tmp_path})(X)

    for result in run_ranks(2, run):
        assert type(result) is type(wanted)
        first, other = (result.first, wanted.first) if kind == "pair" else (result["sample"], wanted["sample"])
        torch.testing.assert_close(first, other, rtol=0, atol=1e-10)


def test_such_an_output_is_verified():
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net("sample")

        def forward(self, x):
            return Sample(sample=self.net(x)["sample"].square().mean())

    assert verify(Loss(), example=(X.float(),), plan="tp=2").passed

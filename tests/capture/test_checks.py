"""A check of values does not stop a trace; a branch on them does."""

import pytest
import torch
from torch import Tensor, nn

from shardwright.capture import capture
from shardwright.errors import CaptureError


class Checking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        assert torch.all(x >= 0).item(), "only numbers that are not negative"
        assert x.isnan().sum() == 0 and x.max() < 100, "no nan"
        if x.shape[0] == 2 and x.min() < 0:
            raise ValueError("only numbers that are not negative")
        return x.sqrt()


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sqrt() if torch.all(x >= 0) else x


class Negating(nn.Module):
    """A `not` would turn the truth around, so nothing is assumed."""

    def forward(self, x: Tensor) -> Tensor:
        assert not x.isnan().any()
        return x.sqrt()


def test_a_check_is_taken_to_have_passed_and_left_out():
    graph = capture(Checking(), (torch.rand(2, 3),), {}).graph
    assert [op.target for op in graph.ops] == ["aten.sqrt.default"]
    assert len(graph.notes) == 3, "a line is said once"
    assert all(note.startswith("a check of values is taken to pass and is not in the program") for note in graph.notes)
    assert all(note.split(":")[-2].endswith("test_checks.py") for note in graph.notes)


class Sampling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.distributions.Normal(x, x.exp()).rsample()


@pytest.mark.parametrize("before", [True, False])
def test_distributions_do_not_look_at_values(monkeypatch, before):
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", before)
    graph = capture(Sampling(), (torch.rand(2, 3),), {}).graph
    assert any("normal" in op.target for op in graph.ops)
    assert torch.distributions.Distribution._validate_args is before


@pytest.mark.parametrize("kind", [Branching, Negating])
def test_other_decisions_by_values_are_errors(kind):
    with pytest.raises(CaptureError, match="decides by the values"):
        capture(kind(), (torch.rand(2, 3),), {})

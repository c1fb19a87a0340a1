"""A split that a plan chooses is tried out before it is used: a wrong rule or local form is an error, not a number."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from shardwright.errors import LoweringError
from shardwright.ops import spec, spec_of
from shardwright.parallelize import parallelize
from shardwright.probe import splits
from shardwright.rules import registry
from tests.runtime.ranks import run_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return ((x * self.scale).cumsum(0) + x.mean(0)).square().sum()


@pytest.fixture(autouse=True)
def forget(monkeypatch) -> None:
    monkeypatch.setattr(splits, "_TRIED", {})


def compiled(folder) -> None:
    run_ranks(
        2, lambda rank: parallelize(Net(), plan="dp=2", example=(torch.randn(4, 6),), compile={"directory": folder})
    )


def test_what_is_written_passes(tmp_path) -> None:
    compiled(tmp_path)


def test_a_wrong_rule_is_refused_with_the_op_and_its_line(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(registry._TABLE, "aten.cumsum.default", lambda call: "b d -> b d")
    with pytest.raises(LoweringError, match=r"cumsum.*at test_splits.py:\d+: split on b over 2 the result is off"):
        compiled(tmp_path)


def test_a_wrong_local_form_is_refused(tmp_path, monkeypatch) -> None:
    wrong = replace(spec_of("aten.mean.dim"), localize=lambda program, op: op)
    monkeypatch.setitem(spec._BY_TARGET, "aten.mean.dim", wrong)
    with pytest.raises(LoweringError, match=r"mean.*split on .* over 2 the result is off"):
        compiled(tmp_path)


def test_a_kind_of_op_is_tried_once(tmp_path, monkeypatch) -> None:
    compiled(tmp_path)
    monkeypatch.setattr(splits, "_try", lambda *args: pytest.fail("it was tried again"))
    compiled(tmp_path)

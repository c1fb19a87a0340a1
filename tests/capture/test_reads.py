"""A capture knows the attributes that it has fixed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwright.capture import capture
from tests.models.deciding import Chooses, Recurrent


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.drop = nn.Linear(4, 4), nn.Dropout(0.1)
        self.scale, self.unread = 2.0, 3.0

    def forward(self, x):
        return self.drop(self.layer(x)) * self.scale + getattr(self, "shift", 0.0)


class Plain(Net):
    def forward(self, x):
        return self.layer(x) * self.__dict__["scale"]


def test_what_a_forward_reads_is_known():
    reads = capture(Net(), (torch.randn(2, 4),)).reads
    assert {("", "scale"), ("", "shift"), ("drop", "p")} <= reads
    assert ("", "unread") not in reads


def test_whoever_reads_the_dict_reads_all():
    assert ("", "*") in capture(Plain(), (torch.randn(2, 4),)).reads


def test_modules_are_as_they_were_before():
    capture(Net(), (torch.randn(2, 4),))
    assert "__getattribute__" not in vars(nn.Module)


@pytest.mark.parametrize(("kind", "shape"), [(Chooses, (3, 4)), (Recurrent, (2, 3, 4))])
def test_where_dynamo_captures_a_branch_all_is_read(kind, shape):
    assert ("", "*") in capture(kind(), (torch.randn(shape),)).reads

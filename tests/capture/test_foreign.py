"""A parameter that is not the model's is refused, in both of export's ways."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardwright.capture.tracing.export as trace
from shardwright.capture import capture
from shardwright.errors import CaptureError


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.scales = nn.Linear(4, 4), [torch.ones(4, requires_grad=True)]

    def forward(self, x):
        return self.head(x * self.scales[0])


@pytest.mark.parametrize("strict", [False, True])
def test_a_tensor_that_requires_a_gradient_is_no_constant(strict, monkeypatch):
    original = trace._export
    monkeypatch.setattr(trace, "_export", lambda *args: original(*args[:-1], (strict,)))
    with pytest.raises(CaptureError, match=r"x \* self.scales\[0\](.|\n)*is not a parameter of the model"):
        capture(Scaled(), (torch.randn(2, 4),))

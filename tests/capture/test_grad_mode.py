"""Where the user turned gradients off, nothing is trained, also inside of an autocast region."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from shardwright.parallelize import captured_graph, parallelize


class Teacher(nn.Module):
    """A target that is not trained, made of the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                target = self.weight @ self.weight
                with torch.enable_grad():
                    trained = x @ self.weight
            return ((target @ x).float() * trained.float()).sum()


def test_no_grad_inside_of_autocast_gives_the_gradients_of_the_original(tmp_path) -> None:
    torch.manual_seed(0)
    original, x = Teacher(), torch.randn(8, 8)
    model = parallelize(copy.deepcopy(original), plan="single", example=(x,), compile={"directory": tmp_path})
    model(x).backward()
    original(x).backward()
    torch.testing.assert_close(model.weight.grad.as_subclass(Tensor), original.weight.grad, rtol=0, atol=0)


@pytest.mark.parametrize(("line", "off"), [("target = self", True), ("trained = x", False), ("return", False)])
def test_ops_know_whether_gradients_are_on(line: str, off: bool) -> None:
    graph = captured_graph(Teacher(), (torch.randn(8, 8),)).graph
    products = [op for op in graph.ops if op.source and op.source.code.strip().startswith(line)]
    assert products
    assert {op.no_grad for op in products} == {off}

"""Names that people know, constants that are one value, nothing dead."""

import torch
from torch import Tensor, nn

from shardwright.capture import capture, capture_pair
from shardwright.capture.building.value_names import assignment

from ..models.zoo import ZOO
from .agreement import agree, ops


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.Linear(4, 8, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        unused = x.cos()  # noqa: F841
        q, k = self.qk(x).split(4, -1)
        scale = torch.arange(4, dtype=torch.float64) + 1
        x = q * k * scale
        return x + x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.block(x)
        for block in self.blocks:
            x = block(x)
        return x


def captured():
    return agree(Net(), torch.randn(2, 4, dtype=torch.float64))


def test_ops_are_named_by_module_call_and_kind():
    names = [op.name for op in captured().graph.ops]
    assert len(set(names)) == len(names)
    assert {"block.qk / linear", "block.qk / bias", "block.qk@1 / linear", "blocks.1.qk / linear"} <= set(names)
    assert {"block / mul", "block / mul.1", "block@1 / mul.1"} <= set(names)


def test_the_module_path_has_no_call_number():
    assert captured().graph.by_name["block.qk@1 / linear"].module_path == "block.qk"


def test_values_are_named_by_the_users_line():
    graph = captured().graph
    assert graph.by_name["block / split"].outputs == ("q", "k")
    assert graph.by_name["block@1 / split"].outputs == ("q_1", "k_1")
    assert graph.by_name["block.qk / bias"].outputs == ("qk_1",)
    assert graph.by_name["block / mul.1"].outputs == ("x_1",)


def test_the_source_is_the_users_line():
    source = captured().graph.by_name["block.qk / linear"].source
    assert source.file == __file__
    assert source.code == "q, k = self.qk(x).split(4, -1)"


def test_equal_constants_are_one_value():
    assert len(ops(captured(), "arange")) == 1
    llama = ZOO["hf_llama"]()
    graph = capture(*llama).graph
    assert (
        len([op for op in graph.ops if op.target.startswith("aten.unsqueeze") and "self_attn" in op.module_path]) <= 8
    )


def test_random_ops_are_not_joined():
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.rand(4) - torch.rand(4)

    assert len(ops(agree(Noisy(), torch.ones(4)), "rand")) == 2


def test_dead_ops_are_gone():
    assert not ops(captured(), "cos")


def test_two_captures_are_equal():
    assert captured().graph.fingerprint == captured().graph.fingerprint


def test_assignment():
    assert assignment("q, k = f(x)") == ("q", "k")
    assert assignment("x: Tensor = f(x)") == ("x",)
    assert assignment("x += 1") == ("x",)
    assert assignment("return x == y") == ()
    assert assignment("if x == y:") == ()
    assert assignment("self.x = f(y)") == ()
    assert assignment("f(a=1)") == ()


def test_a_pair_is_what_two_captures_give():
    module, args, kwargs = ZOO["hf_llama"](dtype=torch.float64)
    plain, wide = capture_pair(module, args, kwargs, entry="train", real=None, promote=lambda graph: True)
    assert plain.graph == capture(module, args, kwargs).graph
    assert wide.graph == capture(module, args, kwargs, promote=True).graph
    assert plain.graph != wide.graph

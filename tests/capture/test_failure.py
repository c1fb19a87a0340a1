"""A model that can't be captured fails with its line, the reason and a way out."""

import pytest
import torch
from torch import Tensor, nn

from shardwright.capture import capture
from shardwright.errors import CaptureError


class Does(nn.Module):
    def __init__(self, function: object) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def branches(x: Tensor) -> Tensor:
    if x.sum() > 0:
        return x + 1
    return x


def takes_a_number(x: Tensor) -> Tensor:
    return torch.roll(x, (x > 0).sum().item())


def selects(x: Tensor) -> Tensor:
    return x[x > 0] * 2


def resizes(x: Tensor) -> Tensor:
    return torch.sum(x, 0, out=torch.empty(0))


def differentiates(x: Tensor) -> Tensor:
    return torch.func.grad(lambda a: a.square().sum())(x)


def fails(x: Tensor) -> Tensor:
    return x @ x[:1]


@pytest.mark.parametrize(
    ("function", "line", "words"),
    [
        (branches, "if x.sum() > 0:", ["torch.cond", "sw.opaque"]),
        (takes_a_number, "return torch.roll(x, (x > 0)", ["number", "sw.opaque"]),
        (selects, "", ["values of a tensor", "torch.where"]),
        (resizes, "return torch.sum(x, 0, out=", ["resizes its out=", "Assign what it returns"]),
        (differentiates, "return torch.func.grad", ["create_graph=True", "sw.opaque"]),
        (fails, "return x @ x[:1]", ["sw.opaque"]),
    ],
)
def test_the_message_names_line_and_remedy(function, line, words):
    with pytest.raises(CaptureError) as caught:
        capture(Does(function), (torch.ones(3, 3),))
    message = str(caught.value)
    assert caught.value.path == ""
    assert f"{__file__}:" in message
    assert line in message
    assert [word for word in words if word not in message] == []


class Deep(nn.Module):
    def __init__(self, function: object) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 3), nn.ModuleDict({"inner": Does(function)})])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1]["inner"](self.blocks[0](x))


@pytest.mark.parametrize("function", [branches, takes_a_number, selects, resizes])
def test_the_message_names_the_submodule(function):
    with pytest.raises(CaptureError) as caught:
        capture(Deep(function), (torch.ones(3, 3),))
    assert "sw.opaque(model.blocks[1].inner)" in str(caught.value)
    assert caught.value.path == "blocks.1.inner"


def test_a_line_of_the_model_itself_has_other_ways_out():
    with pytest.raises(CaptureError, match=r"(?s)torch.cond.*move it to a submodule.*parts="):
        capture(Does(branches), (torch.ones(3, 3),))


def test_nothing_is_printed(capfd):
    with pytest.raises(CaptureError):
        capture(Does(branches), (torch.ones(3, 3),))
    assert capfd.readouterr() == ("", "")


def test_strict_export_is_a_second_try(monkeypatch):
    """What the first way can't take, the second may."""
    export, tried = torch.export.export, []

    def only_strict(*args, strict, **kwargs):
        tried.append(strict)
        if not strict:
            raise RuntimeError("not this way")
        return export(*args, strict=True, **kwargs)

    monkeypatch.setattr(torch.export, "export", only_strict)
    graph = capture(Does(lambda x: x.relu() * 2), (torch.randn(3, 4),)).graph
    assert tried == [False, True]
    assert [op.target for op in graph.ops] == ["aten.relu.default", "aten.mul.Tensor"]


def test_a_scripted_module_is_refused_by_name():
    with pytest.warns(DeprecationWarning, match="torch.jit"):
        scripted = torch.jit.script(nn.Linear(3, 3))
    with pytest.raises(CaptureError, match=r"model\.1 is a module of torch\.jit.*Use the module that"):
        capture(nn.Sequential(nn.Linear(3, 3), scripted), (torch.ones(3, 3),))

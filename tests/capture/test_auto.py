"""With opaque="auto" the smallest submodules that can't be captured stay as they are, and the user is told."""

import copy

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.capture import capture, find_opaque
from shardwright.errors import CaptureError, InputError

from .agreement import agree


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return self.linear(x)
        return x


class Select(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x.sum(1) > 0]


class Pooled(nn.Module):
    """The shape inside depends on data, that of what it returns does not."""

    def __init__(self) -> None:
        super().__init__()
        self.select, self.linear = Select(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.select(x)).amax(0)


class Rolled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.roll(x, (x > 0).sum().item(), -1)


class Net(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return (self.last(x) ** 2).mean()


def x() -> Tensor:
    return torch.randn(6, 4, dtype=torch.float64)


@pytest.mark.parametrize(
    ("block", "kept"),
    [(Gate, "blocks.1"), (Rolled, "blocks.1"), (Pooled, "blocks.1"), (lambda: nn.Sequential(Gate()), "blocks.1.0")],
)
def test_the_smallest_submodule_that_fails_is_kept(block, kept):
    net = find_opaque(Net(nn.Linear(4, 4), block()).double(), "auto")
    with pytest.warns(UserWarning, match="runs uncompiled, replicated on every device"):
        captured = agree(net, x())
    assert [op.argument("op_key") for op in captured.graph.ops if op.target == "call.opaque"] == [kept]
    [note] = captured.graph.notes
    assert note.startswith(f"{kept} runs uncompiled")


def test_the_warning_names_submodule_line_and_reason():
    with pytest.warns(UserWarning, match="is not captured") as reported:
        capture(find_opaque(Net(Gate(), Rolled()), "auto"), (torch.randn(6, 4),))
    first, second = (str(value.message) for value in reported)
    assert "model.blocks[0] is not captured" in first
    assert "`if x.sum() > 0:`: The line decides by the values of a tensor" in first
    assert "model.blocks[1] is not captured" in second
    assert "with a number that was taken out of a tensor" in second


def test_what_is_captured_stays_captured():
    captured = capture(find_opaque(Net(nn.Linear(4, 4)), "auto"), (torch.randn(6, 4),))
    assert not captured.opaques
    assert captured.graph.notes == ()


def test_the_model_itself_is_never_opaque():
    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if x.sum() > 0 else x

    with pytest.raises(CaptureError, match="in the forward of the model itself"):
        capture(find_opaque(Root(), "auto"), (torch.randn(6, 4),))


def test_the_user_s_model_is_not_marked():
    net = Net(Gate())
    before = copy.deepcopy(vars(net.blocks[0])).keys()
    with pytest.warns(UserWarning, match=r"model.blocks\[0\]"):
        plan = sw.plan(net, example=torch.randn(6, 4), plan="dp=2", compile={"opaque": "auto"})
    assert any(note.startswith("blocks.0 runs uncompiled") for note in plan.notes)
    assert vars(net.blocks[0]).keys() == before


def test_another_word_is_refused():
    with pytest.raises(InputError, match="opaque='always'"):
        sw.plan(Net(), example=torch.randn(6, 4), compile={"opaque": "always"})


@pytest.mark.filterwarnings("ignore:model.blocks")
def test_verified():
    torch.manual_seed(0)
    report = sw.verify(
        Net(Gate(), Pooled()), "dp=2", example=torch.randn(6, 4), method="threads", compile={"opaque": "auto"}
    )
    assert report, str(report)

"""What depends on no input is known while tracing; what depends on one is not."""

import pytest
import torch
from torch import Tensor, nn

from shardwright.capture import capture
from shardwright.errors import CaptureError


class OwnMask(nn.Module):
    """A branch on a mask that the model makes itself, and a size that it puts into a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        mask = (1.0 - torch.ones(x.shape[:2]))[:, None] < 0
        if mask.flatten().any().item():
            return x
        height, width = torch.tensor([[2, 3]])[0]
        ones = torch.full_like(height, fill_value=1)
        return x.view(x.shape[0], height.item() * ones.item(), torch.arange(width).shape[0]).sin()


class Written(nn.Module):
    """What is written to depends on what is written."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(x.shape)
        row = mask[0]
        row.copy_(x[0])
        return x if mask.any() else x.sin()


class GivenMask(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if (x > torch.zeros(x.shape)).any() else x.sin()


def test_a_branch_on_what_depends_on_nothing_is_decided():
    graph = capture(OwnMask(), (torch.rand(2, 6),), {}).graph
    assert [op.target for op in graph.ops] == ["aten.view.default", "aten.sin.default"]


@pytest.mark.parametrize("kind", [Written, GivenMask])
def test_a_branch_on_an_input_is_an_error(kind):
    with pytest.raises(CaptureError, match="decides by the values"):
        capture(kind(), (torch.rand(2, 6),), {})


class Asking(nn.Module):
    """Every question that can be asked about constants, those held by the module included."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.tensor([1.0, 2.0])

    def forward(self, x: Tensor) -> Tensor:
        ones, eye = torch.ones(4), torch.eye(3)
        zeros = torch.zeros(8).to(x)
        zeros[2:] = 7
        count = torch.tensor(2)
        count += 1
        answers = [
            bool(ones.all()), torch.equal(eye, eye.t()), torch.allclose(eye, eye.clone()), torch.is_nonzero(ones[:1]),
            bool(zeros.sum() == 42), int(count) == 3, float(self.table.max()) == 2, self.table.tolist() == [1, 2],
            1.0 in self.table, self.table.numpy().sum() == 3, torch.arange(3)[count - 1].item() == 2,
        ]  # fmt: skip
        return x.sin() if all(answers) else x


class OverwrittenByInput(nn.Module):
    """A constant that an op writes to without a name that says so."""

    def forward(self, x: Tensor) -> Tensor:
        mean = torch.zeros(6)
        torch.nn.functional.batch_norm(x, mean, torch.ones(6), training=True)
        return x if mean.any() else x.sin()


def test_constants_answer_every_question():
    graph = capture(Asking(), (torch.rand(2, 6),), {}).graph
    assert [op.target for op in graph.ops] == ["aten.sin.default"]


def test_what_an_op_updates_is_not_known():
    with pytest.raises(CaptureError, match="decides by the values"):
        capture(OverwrittenByInput(), (torch.rand(2, 6),), {})

"""Writes in place, through views and through .data, end up in the graph as values."""

import pytest
import torch
from torch import Tensor, nn

from shardwright.capture import capture
from shardwright.errors import CaptureError

from .agreement import agree, ops


class Writes(nn.Module):
    def __init__(self, write: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6, dtype=torch.float64))
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        return self.write(x * self.weight)


def shift(y: Tensor) -> Tensor:
    moved = torch.zeros_like(y)
    moved[:, 1:] = y[:, :-1].clone()
    moved[:, 0] = 3.0
    return moved.masked_fill_(moved > 1, 0.5)


def through_split(y: Tensor) -> Tensor:
    y = y.detach().clone()  # torch refuses this write where there is a gradient
    _, right = y.split([2, 4], 1)
    right.mul_(2)
    return y + 1


def through_chunk(y: Tensor) -> Tensor:
    y = y.detach().clone()  # torch refuses this write where there is a gradient
    y.chunk(4, dim=1)[2].fill_(7.0)  # three chunks of two
    return y * y


def through_unbind(y: Tensor) -> Tensor:
    y = y.detach().clone()  # torch refuses this write where there is a gradient
    y.unbind(0)[1].add_(1)
    return y.sin()


def through_transpose_and_view(y: Tensor) -> Tensor:
    y = y.clone()
    y.t()[2].neg_()
    y.view(2, 2, 6).permute(2, 0, 1)[0].mul_(0.5)
    y.unsqueeze(0).flatten()[3:9:2].zero_()
    y.diagonal().mul_(5)
    return y


def old_views_see_the_write(y: Tensor) -> Tensor:
    y = y.clone()
    row, column = y[1], y[:, 2]
    row.mul_(3)
    return column * 2 + y.sum()


def through_casts_that_do_nothing(y: Tensor) -> Tensor:
    y = y.clone()
    same = y.to("cpu").to(y.dtype).contiguous()
    same += 1
    return y * 2


def by_bits(y: Tensor) -> Tensor:
    mask = y > 0
    mask[0] |= ~mask.any()
    mask &= y < 1
    return y * mask


def copies_do_not(y: Tensor) -> Tensor:
    copied = y.t().reshape(-1)
    copied.mul_(2)
    return y.reshape(-1) + copied


def relu_in_place(y: Tensor) -> Tensor:
    y += 1
    torch.relu_(y)
    return y * 2


def changes_its_shape(y: Tensor) -> Tensor:
    y = y[:, :4] + 0
    column = y[:, 1]
    y.t_()
    column.mul_(3)  # is a row of y now
    y.unsqueeze_(1)
    y[0].neg_()
    return y.squeeze_(1).transpose_(0, 1) * y.sum()


WRITES = [shift, through_split, through_chunk, through_unbind, through_transpose_and_view, old_views_see_the_write]
WRITES += [changes_its_shape, copies_do_not, relu_in_place, through_casts_that_do_nothing, by_bits]


def clamped(y: Tensor) -> Tensor:
    with torch.no_grad():
        y.clamp_(min=0.1)
    return y.sin()


def scaled_part(y: Tensor) -> Tensor:
    part = y[1:]
    with torch.no_grad():
        part.mul_(3)
    return y.sin() + part.sum()


def through_strides(y: Tensor) -> Tensor:
    y = y + 0
    y.as_strided((2, 2), (4, 2), 1).mul_(3)
    return y.sin()


@pytest.mark.parametrize("write", [clamped, scaled_part, through_strides])
def test_a_write_leaves_the_gradient_that_eager_has(write):
    agree(Writes(write), torch.randn(4, 6, dtype=torch.float64))


@pytest.mark.parametrize("write", WRITES)
def test_a_write_is_seen_by_everything_that_shares_the_memory(write):
    captured = agree(Writes(write), torch.randn(4, 6, dtype=torch.float64))
    assert not [op for op in captured.graph.ops if op.target.split(".")[1].endswith("_")]


def test_a_shift_is_a_scatter_into_a_slice():
    captured = capture(Writes(shift), (torch.randn(4, 6, dtype=torch.float64),))
    [op] = ops(captured, "slice_scatter")
    assert (op.argument("dim"), op.argument("start"), op.argument("end")) == (1, 1, 6)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(6, dtype=torch.float64), persistent=False)
        self.weight = nn.Parameter(torch.randn(4, 6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.mean.data.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return (x * self.weight - self.mean) * self.weight.data.sum()


def test_buffers_written_in_place_or_through_data_have_updates():
    captured = agree(Counter(), torch.randn(4, 6, dtype=torch.float64))
    buffers = {buffer.key: buffer for buffer in captured.graph.buffers}
    assert set(buffers) == {"steps", "mean"}
    assert buffers["steps"].update is not None
    assert buffers["mean"].update is not None
    assert (buffers["steps"].persistent, buffers["mean"].persistent) == (True, False)


def test_a_write_to_an_input_is_told_and_the_result_is_right():
    class Masks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x[:, 0] = 0
            return x * 2

    x = torch.ones(2, 3)
    with pytest.warns(UserWarning, match=r"argument x in place.*caller's tensor stays as it was.*x\.clone\(\)"):
        captured = capture(Masks(), (x,))
    assert torch.equal(x, torch.ones(2, 3))
    assert captured.graph.notes == ("the model changes its argument x in place; the graph leaves it alone",)


def test_a_write_to_a_parameter_without_gradients_is_an_update_of_it():
    class Clamps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            self.weight.data.clamp_(0, 1)
            return x * self.weight

    (parameter,) = capture(Clamps(), (torch.ones(3),)).graph.parameters
    assert parameter.update is not None


def under_no_grad(y: Tensor) -> Tensor:
    with torch.no_grad():
        y.clamp_(-0.5, 0.5)
        y[:, 0] = 3.0
    return y.sin()


def through_detach(y: Tensor) -> Tensor:
    detached = y.detach()
    detached.add_(1)
    y[:, 2:].detach().mul_(3)
    return y.sin() * detached


def into_out(y: Tensor) -> Tensor:
    values, places = torch.zeros(4, 6).to(y), torch.zeros(4, 6, dtype=torch.long)
    total = torch.zeros(6, dtype=torch.float64)
    with torch.no_grad():
        torch.sort(y, out=(values, places))
        torch.sum(y.float(), 0, out=total)
    return y * values + places + total


@pytest.mark.parametrize("write", [under_no_grad, through_detach, into_out])
def test_a_write_that_autograd_does_not_see_leaves_the_gradient_as_it_was(write):
    agree(Writes(write), torch.randn(4, 6, dtype=torch.float64), tolerance=1e-7 if write is into_out else 1e-12)


def data_of_an_activation(y: Tensor) -> Tensor:
    y.data[:, 1:].clamp_(-1, 1)
    return y


def assigned_data_of_an_activation(y: Tensor) -> Tensor:
    y.data = y.data * 2
    return y


def assigned_data_of_another_shape(y: Tensor) -> Tensor:
    y = y.detach()
    y.data = y.data[:2]
    return y


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (data_of_an_activation, "writes through .data to a tensor"),
        (assigned_data_of_an_activation, "writes through .data to a tensor"),
        (assigned_data_of_another_shape, "values of a graph never change shape"),
    ],
)
def test_a_write_to_data_that_backward_would_read_is_refused(write, reason):
    with pytest.raises(CaptureError, match=reason) as caught:
        capture(Writes(write), (torch.randn(4, 6, dtype=torch.float64),))
    assert f"{__file__}:" in str(caught.value)

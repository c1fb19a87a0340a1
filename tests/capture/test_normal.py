"""One spelling for each thing."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.capture import capture
from shardwright.errors import CaptureError
from shardwright.ir import Slot

from .agreement import agree, ops


class Does(nn.Module):
    def __init__(self, function: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 6, dtype=torch.float64))
        self.function = function

    def forward(self, x: Tensor) -> object:
        return self.function(x * self.weight)


def x() -> Tensor:
    return torch.randn(4, 6, dtype=torch.float64)


IDENTITIES = [
    lambda y: y.double(),
    lambda y: y.clone().contiguous(),
    lambda y: F.dropout(y, 0.0),
    lambda y: F.dropout(y, 0.5, training=False),
    lambda y: y[:, 0:],
    lambda y: y.view(4, -1).expand(4, 6),
    lambda y: torch.cat([torch.zeros(0, dtype=torch.float64), y], 1),
    lambda y: y * 1.0,
    lambda y: y.transpose(0, -2),
]


@pytest.mark.parametrize("identity", IDENTITIES)
def test_what_does_nothing_is_not_there(identity):
    captured = agree(Does(identity), x())
    assert [op.target for op in captured.graph.ops] == ["aten.mul.Tensor"]


SPELLINGS = [
    (lambda y: y.flatten(), "reshape"),
    (lambda y: y.unflatten(1, (2, 3)), "reshape"),
    (lambda y: y.t().contiguous().view(-1), "reshape"),
    (lambda y: (y.t().contiguous() + 1).view(-1), "reshape"),
    (lambda y: y.view(-1), "view"),
    (lambda y: y.chunk(2, -1), "split"),
    (lambda y: y.split([1, 5], -1), "split_with_sizes"),
    (lambda y: y.mT, "transpose"),
    (lambda y: y.unsqueeze(0).movedim(0, 2), "permute"),
    (lambda y: y.narrow(1, 2, 3), "slice"),
    (lambda y: y.type_as(torch.ones(1)), "_to_copy"),
    (lambda y: torch.broadcast_tensors(y, y[0])[1], "expand"),
    (lambda y: y.new_full((2,), 3.0) * y.sum(), "full"),
    (lambda y: torch.stack(torch.meshgrid(y[0], y[:, 0], indexing="xy")), "expand"),
]


@pytest.mark.parametrize(("function", "kind"), SPELLINGS)
def test_the_normal_spelling(function, kind):
    assert ops(agree(Does(function), x()), kind)


def test_a_bias_is_its_own_op():
    captured = agree(nn.Linear(6, 3, dtype=torch.float64), x())
    assert [(op.name, op.target, op.inputs) for op in captured.graph.ops] == [
        ("/ linear", "aten.linear.default", ("input", "weight")),
        ("/ bias", "aten.add.Tensor", ("linear", "bias")),
    ]


def test_addmm_is_a_product_and_a_sum():
    captured = agree(Does(lambda y: torch.addmm(y[0], y, y.t()[:, :4].repeat(1, 2)[:, :6])), x())
    assert ops(captured, "mm")
    assert [op.name for op in captured.graph.ops if op.name.endswith("bias")] == ["/ bias"]


def test_the_bias_of_a_convolution_is_viewed():
    captured = agree(nn.Conv2d(2, 3, 3, dtype=torch.float64), torch.randn(1, 2, 5, 5, dtype=torch.float64))
    [view] = ops(captured, "view")
    assert view.argument("size") == (3, 1, 1)
    assert captured.graph.by_name["/ bias"].inputs[1] == view.outputs[0]


def test_dropout_keeps_its_probability():
    [op] = ops(agree(Does(lambda y: F.dropout(y, 0.25)), x()), "dropout")
    assert (op.argument("p"), op.argument("train")) == (0.25, True)


def test_a_tensor_given_twice_has_two_slots():
    captured = agree(Does(lambda y: y * y), x())
    op = captured.graph.by_name["/ mul.1"]
    assert (op.inputs, op.arguments) == (("mul", "mul"), (("self", Slot(0)), ("other", Slot(1))))


def test_several_outputs_are_one_op_and_unused_ones_still_have_values():
    captured = agree(Does(lambda y: y.topk(2, dim=1).values), x())
    [op] = ops(captured, "topk")
    assert [captured.graph.values[name].dtype for name in op.outputs] == ["float64", "int64"]


def test_batch_norm_in_training_is_one_op_whose_statistics_are_updates():
    captured = agree(nn.BatchNorm1d(6, dtype=torch.float64), x())
    [op] = ops(captured, "_native_batch_norm_legit_functional")
    updates = {buffer.key: buffer.update for buffer in captured.graph.buffers}
    assert (updates["running_mean"], updates["running_var"]) == op.outputs[3:]
    assert updates["num_batches_tracked"] is not None


def test_batch_norm_without_statistics():
    agree(nn.BatchNorm1d(6, track_running_stats=False, dtype=torch.float64), x())


class Windows(nn.Module):
    """Overlapping windows by the strides of a copy that is in order."""

    def __init__(self, ordered: bool) -> None:
        super().__init__()
        self.ordered = ordered
        self.weight = nn.Parameter(torch.randn(8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = (x * self.weight).t()
        y = y.contiguous() if self.ordered else y
        return y.as_strided((3, 4, x.shape[0]), (x.shape[0], x.shape[0], 1)).mean(0)


def test_what_goes_by_strides_is_given_memory_in_order():
    agree(Windows(ordered=True), torch.randn(4, 8, dtype=torch.float64))


def test_strides_of_memory_that_is_not_in_order_are_refused():
    with pytest.raises(CaptureError, match="memory that is not in order"):
        capture(Windows(ordered=False), (torch.randn(4, 8, dtype=torch.float64),))

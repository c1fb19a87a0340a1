"""What a boolean mask selects, as long as it ends in a sum, a mean or a loss."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.capture import capture, run
from shardwright.errors import CaptureError
from tests.capture.agreement import tensors_of
from tests.parity.threaded import compare

Run = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, finish: Run) -> None:
        super().__init__()
        self.linear, self.head, self.finish = nn.Linear(8, 11), nn.Linear(11, 11), finish

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.finish(self.head, self.linear(x), labels)


def example() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 5, 8), torch.randint(0, 11, (4, 5))


def mean_of_rows(head: nn.Module, y: Tensor, labels: Tensor) -> Tensor:
    return y[labels > 5].mean() + (labels[labels > 5] * 0.5).mean() * y.mean()


def mean_by_hand(head: nn.Module, y: Tensor, labels: Tensor) -> Tensor:
    mask = labels > 5
    return y[mask].sum() / mask.sum() + torch.masked_select(y, mask[..., None]).square().mean()


def columns(head: nn.Module, y: Tensor, labels: Tensor) -> Tensor:
    return y[labels > 5].square().mean(0).sum() + y[labels > 3].sum(-1).tanh().mean()


def masked_language_model(head: nn.Module, y: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(head(y[labels != 3]), labels[labels != 3], ignore_index=4, label_smoothing=0.1)


def likelihood(head: nn.Module, y: Tensor, labels: Tensor) -> Tensor:
    mask = labels != 3
    return F.nll_loss(F.log_softmax(y[mask], -1), labels[mask])


def regression(head: nn.Module, y: Tensor, labels: Tensor) -> Tensor:
    mask = labels != 3
    target = y.detach() * 2
    loss = F.mse_loss(y[mask], target[mask]) + F.smooth_l1_loss(y[mask], target[mask], reduction="sum")
    binary = F.binary_cross_entropy_with_logits(y[..., 0][mask], (labels > 5)[mask].to(y))
    return loss + binary + (y[mask] - target[mask]).abs().mean()


def logarithms(head: nn.Module, y: Tensor, labels: Tensor) -> Tensor:
    y = y[y > 0.1]
    return y.log().mean() + y.sqrt().sum() + (y**-1.5).mean() + (y / (y.exp() - 1)).mean()


def shifted(head: nn.Module, y: Tensor, labels: Tensor) -> Tensor:
    bias = head.weight.sum() - 800  # where nothing is selected, the exponential would be infinite
    return (y.sub(800)[y > 0.1] - bias).exp().mean()


def norms(head: nn.Module, y: Tensor, labels: Tensor) -> Tensor:
    rows = y[labels > 5]
    return F.normalize(rows, dim=-1).sum() + rows.norm() + rows.norm(dim=1).mean() + rows.max() - rows.min()


def counted(head: nn.Module, y: Tensor, labels: Tensor) -> Tensor:
    rows = y[labels > 5]
    return rows.sum() / len(rows) + rows.square().sum() / rows.shape[1] + y[y > 0].sum() / y[y > 0].numel()


def written(head: nn.Module, y: Tensor, labels: Tensor) -> Tensor:
    y, mask = y + 0, labels > 5
    y[mask] *= 2
    y[mask] = y[mask].tanh() + 1
    rows = y[~mask]
    rows.mul_(3)
    return y.square().mean() + rows.mean()


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero3=2"])
@pytest.mark.parametrize("finish", [logarithms, shifted, norms, counted, written])
def test_ops_whose_gradient_could_be_infinite_where_nothing_is_selected(finish, plan):
    torch.manual_seed(0)
    compare(Net(finish), example(), plan)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero3=2", "pp=2"])
@pytest.mark.parametrize("finish", [mean_of_rows, mean_by_hand, columns, masked_language_model, likelihood, regression])
def test_a_reduced_selection_is_exact(finish, plan):
    torch.manual_seed(0)
    compare(Net(finish), example(), plan)


def test_elements_by_their_own_values():
    torch.manual_seed(0)
    for plan in ("dp=2", "tp=2"):
        compare(Net(lambda head, y, labels: y[y > 0].mean()), example(), plan)


def test_nothing_selected_gives_what_torch_gives():
    net = Net(lambda head, y, labels: (y[labels > 99].mean(), y[labels > 99].sum()))
    captured = capture(net, example())
    (mean, total), _, _ = run(captured, captured.flatten(example(), {}), *tensors_of(net))
    assert mean.isnan()
    assert total == 0
    gradient = torch.autograd.grad(mean + total, net.linear.weight)[0]
    assert not gradient.any()


def test_garbage_beside_the_selection_stays_out_of_the_gradient():
    x, labels = example()
    labels[0, 0], x[0, 0] = 0, float("inf")
    net = Net(lambda head, y, labels: y[labels > 0].square().mean())
    captured = capture(net, (x, labels))
    (loss,), _, _ = run(captured, captured.flatten((x, labels), {}), *tensors_of(net))
    expected = net(x, labels)
    torch.testing.assert_close(loss, expected)
    (bias,) = torch.autograd.grad(loss, net.linear.bias)
    torch.testing.assert_close(bias, torch.autograd.grad(expected, net.linear.bias)[0])


REFUSED: dict[str, Run] = {
    "aten.cumsum.default on what a boolean mask selects": lambda head, y, labels: y[y > 0].cumsum(0).mean(),
    "a tensor of other rows": lambda head, y, labels: (y[labels > 5] + torch.ones(1, 11)).sum(),
    "it returns what a boolean mask selects": lambda head, y, labels: y[labels > 5],
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_needs_the_selection_itself_is_refused(reason):
    with pytest.raises(CaptureError, match=reason) as caught:
        capture(Net(REFUSED[reason]), example())
    assert f"{__file__}:" in str(caught.value)
    assert "torch.where" in str(caught.value)

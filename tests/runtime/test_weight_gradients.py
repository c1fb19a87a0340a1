"""Gradients of weights that are put off are those of the plain ops, and come when they are asked for."""

import pytest
import torch
import torch.nn.functional as F

from shardwright.runtime.algorithms.weight_gradients import WeightGradientQueue


def leaf(*shape):
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))
    ).requires_grad_()


PRODUCTS = {
    "linear": (lambda q, x, w, b: q.linear(x, w, b), lambda x, w, b: F.linear(x, w, b), (2, 3, 5), (4, 5), (4,)),
    "linear, no bias": (lambda q, x, w, b: q.linear(x, w), lambda x, w, b: F.linear(x, w), (3, 5), (4, 5), (4,)),
    "mm": (lambda q, x, w, b: q.mm(x, w), lambda x, w, b: x @ w, (3, 5), (5, 4), (4,)),
    "mm of many": (lambda q, x, w, b: q.mm(x, w), lambda x, w, b: x @ w, (2, 3, 5), (5, 4), (4,)),
    "addmm": (lambda q, x, w, b: q.addmm(b, x, w), lambda x, w, b: torch.addmm(b, x, w), (3, 5), (5, 4), (4,)),
    "conv2d": (
        lambda q, x, w, b: q.convolution(x, w, b, (2, 1), (1, 0), (1, 1), False, (0, 0), 2),
        lambda x, w, b: F.conv2d(x, w, b, (2, 1), (1, 0), 1, 2),
        (2, 4, 7, 6),
        (6, 2, 3, 2),
        (6,),
    ),
    "conv1d by its name": (
        lambda q, x, w, b: q.conv1d(x, w, b, stride=2, padding=1),
        lambda x, w, b: F.conv1d(x, w, b, 2, 1),
        (2, 4, 9),
        (3, 4, 3),
        (3,),
    ),
    "conv3d by its name": (
        lambda q, x, w, b: q.conv3d(x, w, b, dilation=(1, 2, 1), groups=2),
        lambda x, w, b: F.conv3d(x, w, b, 1, 0, (1, 2, 1), 2),
        (2, 4, 3, 5, 3),
        (6, 2, 2, 2, 2),
        (6,),
    ),
    "conv1d": (
        lambda q, x, w, b: q.convolution(x, w, None, (1,), (1,), (2,), False, (0,), 1),
        lambda x, w, b: F.conv1d(x, w, None, 1, 1, 2),
        (2, 4, 9),
        (3, 4, 3),
        (3,),
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("input_grad", [True, False])
def test_put_off_and_paid(name, input_grad):
    queued, plain, *shapes = PRODUCTS[name]
    mine, other = [leaf(*shape) for shape in shapes], [leaf(*shape) for shape in shapes]
    mine[0].requires_grad_(input_grad)
    other[0].requires_grad_(input_grad)
    queue = WeightGradientQueue()
    queue.collects = True
    for microbatch in range(2):
        queue.microbatch = microbatch
        y, z = queued(queue, *mine), plain(*other)
        assert torch.equal(y, z)
        (y.square().sum()).backward()
        (z.square().sum()).backward()
    assert mine[1].grad is None and mine[2].grad is None
    if input_grad:
        torch.testing.assert_close(mine[0].grad, other[0].grad)
    queue.run(1)
    queue.run(0)
    for got, wanted in zip(mine[1:], other[1:], strict=True):
        torch.testing.assert_close(got.grad, wanted.grad)
    before = mine[1].grad.clone()
    queue.run(0)
    assert torch.equal(mine[1].grad, before)


@pytest.mark.parametrize("name", PRODUCTS)
def test_nothing_is_put_off_while_nothing_is_collected(name):
    queued, plain, *shapes = PRODUCTS[name]
    mine, other = [leaf(*shape) for shape in shapes], [leaf(*shape) for shape in shapes]
    y, z = queued(WeightGradientQueue(), *mine), plain(*other)
    y.square().sum().backward()
    z.square().sum().backward()
    assert torch.equal(y, z) and torch.equal(mine[1].grad, other[1].grad)


def test_a_bias_of_several_rows_is_not_put_off():
    queue = WeightGradientQueue()
    queue.collects = True
    x, w = leaf(3, 5), leaf(5, 4)
    for bias in (leaf(3, 4), leaf(1), leaf(1, 4)):
        w.grad = None
        built = queue.addmm(bias, x, w)
        built.sum().backward()
        assert torch.equal(built, torch.addmm(bias, x, w)) and w.grad is not None and bias.grad is not None


def test_what_is_no_leaf_is_not_put_off():
    queue = WeightGradientQueue()
    queue.collects = True
    x, w = leaf(3, 5), leaf(4, 5)
    queue.linear(x, w * 2).sum().backward()
    assert w.grad is not None


def test_frozen_and_without_gradient_and_not_collecting():
    queue = WeightGradientQueue()
    x, w, b = leaf(3, 5), leaf(4, 5), leaf(4)
    assert queue.linear(x, w, b).grad_fn.name() == "AddmmBackward0"
    queue.collects = True
    with torch.no_grad():
        assert not queue.linear(x, w, b).requires_grad
    queue.linear(x, w.detach(), b).sum().backward()
    assert b.grad is not None
    w.requires_grad_()
    frozen = b.detach()
    queue.linear(x, w, frozen).sum().backward()
    assert w.grad is None and frozen.grad is None
    queue.run(0)
    assert w.grad is not None and frozen.grad is None

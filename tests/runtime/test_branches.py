"""Branches and loops at run time: only what is taken runs, and everything has a gradient."""

import pytest
import torch
from torch import Tensor

from shardwright.runtime import cond, scan, while_loop


def fails(*operands: Tensor) -> Tensor:
    raise AssertionError("the branch that is not taken was run")


@pytest.mark.parametrize("first_branch", [True, False])
def test_only_the_branch_that_is_taken_runs(first_branch):
    x = torch.tensor([2.0])
    first, other = (torch.sin, fails) if first_branch else (fails, torch.sin)
    assert torch.equal(cond(torch.tensor(first_branch), first, (x,), other, (x,)), x.sin())


def test_what_the_other_branch_reads_has_zeros_for_its_gradient():
    x, w, bad = (torch.full((2,), value, requires_grad=True) for value in (2.0, 3.0, float("nan")))
    built = cond(torch.tensor(True), lambda x, w: (x * w, x.detach()), (x, w), fails, (x, bad))
    assert all(value.requires_grad for value in built)
    (built[0].sum() + built[1].sum()).backward()
    assert torch.equal(w.grad, x.detach())
    assert torch.equal(x.grad, w.detach())
    assert torch.equal(bad.grad, torch.zeros(2))


def test_integers_need_no_gradient_and_no_gradient_is_made_up():
    x = torch.tensor([2.0], requires_grad=True)
    first, number = cond(torch.tensor(True), lambda x: (x * 2, (x > 1).long()), (x,), fails, (x,))
    assert first.requires_grad and not number.requires_grad
    with torch.no_grad():
        assert not cond(torch.tensor(True), torch.sin, (x,), fails, (x,)).requires_grad


def test_a_scan_carries_on_and_stacks():
    xs, start, w = torch.arange(6.0).view(3, 2), torch.zeros(2), torch.tensor(2.0, requires_grad=True)
    last, every = scan(lambda carry, x, w: (carry + x * w, carry), (start,), (xs,), (w,))
    assert last.tolist() == [12.0, 18.0]
    assert every.tolist() == [[0.0, 0.0], [0.0, 2.0], [4.0, 8.0]]
    last.sum().backward()
    assert w.grad.item() == 15.0


def test_a_while_loop_goes_on_until_its_test_says_no():
    w = torch.tensor(2.0, requires_grad=True)
    start = (torch.tensor(0), torch.ones(1))
    turns, built = while_loop(lambda n, x, w: n < 3, lambda n, x, w: (n + 1, x * w), start, (w,))
    built.sum().backward()
    assert (turns.item(), built.item(), w.grad.item()) == (3, 8.0, 12.0)

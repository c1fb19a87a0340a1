"""What ranks pass to a call is compared, and what differs is named on all of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shardwright.errors import InputError
from shardwright.runtime.faults.input_comparison import CallSignature, InputComparison
from tests.runtime.ranks import run_ranks

X, MASK = torch.arange(12.0).view(4, 3), torch.ones(3, 3)


def signature(mode="global", program="train", **arguments: str) -> CallSignature:
    known = {"x": "[4, 3]", "mask": "[3, 3]", **arguments}
    return CallSignature(program=program, arguments=known, tensors=("x", "mask"), batched=(True, False), mode=mode)


Passed = tuple[CallSignature, Tensor, Tensor]


def message(size: int, passed: Callable[[int], Passed], replicas: int = 1, calls: int = 1) -> set[str]:
    """What ranks raise in the last of some calls; before it all pass the same."""

    def body(rank: int) -> str:
        comparison, replica = InputComparison(), (rank * replicas // size, replicas)
        known, _, _ = passed(0)
        for _ in range(calls - 1):
            comparison.begin(known, [X + replica[0], MASK], replica, at_once=False)
        own, *tensors = passed(rank)
        try:
            comparison.begin(own, tensors, replica, at_once=True)
        except InputError as error:
            return str(error)
        return ""

    return set(run_ranks(size, body))


def test_ranks_that_pass_the_same_are_let_through():
    assert message(2, lambda rank: (signature(), X.clone(), MASK.clone()), calls=3) == {""}


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize(
    ("passed", "words"),
    [
        (lambda rank: (signature(program="train" if rank < 1 else "eval"), X, MASK), "rank 1 runs eval (its call"),
        (lambda rank: (signature(n=str(rank)), X, MASK), "rank 1 passes 1 as n, but rank 0 0; pass the same"),
        (lambda rank: (signature(), X + rank, MASK), "rank 1 passes another batch than rank 0: x differs; inputs="),
        (lambda rank: (signature(), X, MASK - rank), "rank 1 passes another mask than rank 0; an input without"),
        (lambda rank: (signature("per_rank"), X, MASK - rank), "rank 1 passes another mask than rank 0"),
    ],
)
def test_what_differs_is_named_on_all_ranks(passed, words, calls):
    (error,) = message(2, passed, calls=calls)
    assert error.startswith(f"in call {calls} of the model {words}")


def test_samples_that_are_gathered_may_differ():
    assert message(2, lambda rank: (signature("per_rank"), X + rank, MASK)) == {""}


def test_ranks_of_a_replica_pass_the_same_samples_and_others_their_own():
    assert message(4, lambda rank: (signature("per_replica"), X + rank // 2, MASK), replicas=2) == {""}
    (error,) = message(4, lambda rank: (signature("per_replica"), X + rank // 2 + (rank == 3), MASK), replicas=2)
    assert "rank 3 passes another x than rank 2; " in error


def test_replicas_that_all_pass_the_same_at_first_are_asked_what_they_mean():
    (error,) = message(2, lambda rank: (signature("per_replica"), X, MASK), replicas=2)
    assert "but all pass the same; use model.data_rank" in error
    assert message(2, lambda rank: (signature("per_replica"), X, MASK), replicas=2, calls=2) == {""}, "by chance, later"


def test_what_was_posted_is_read_when_backward_comes_to_an_output():
    def body(rank: int) -> str:
        comparison = InputComparison()
        weight = torch.ones(3, requires_grad=True)
        for wrong in (0, rank):
            comparison.begin(signature(), [X + wrong, MASK], (0, 1), at_once=False)
        out = X @ weight
        comparison.until_backward([out, X])
        with pytest.raises(InputError, match="in call 2 of the model rank 1 passes another batch"):
            out.sum().backward()
        assert weight.grad is None
        comparison.settle()
        return "read once"

    assert run_ranks(2, body) == ["read once"] * 2


def test_activations_are_compared_in_the_first_call_only():
    """What other modules computed may differ in its last bits."""

    def computed(rank: int) -> Tensor:
        return (X + rank).requires_grad_().clone()

    assert "rank 1 passes another batch" in message(2, lambda rank: (signature(), computed(rank), MASK)).pop()
    assert message(2, lambda rank: (signature(), computed(rank), MASK), calls=2) == {""}

"""Arguments of calls: which have the batch, what ranks must agree on, how samples of all ranks become one batch."""

from __future__ import annotations

import pytest
import torch

from shardwright.errors import InputError
from shardwright.runtime.model.inputs import CallInputs, check_dtypes, digest
from tests.runtime.ranks import run_ranks


def inputs(*names: str, **options) -> CallInputs:
    return CallInputs(lambda args, kwargs: [*names, *kwargs], **options)


X, MASK = torch.arange(12.0).view(4, 3), torch.ones(3, 3)


def test_what_sizes_do_not_tell_is_refused_where_it_is_needed():
    odd = (torch.ones(4, 3), torch.ones(6, 2))
    assert inputs("x", "y").batch_dim(odd, {}, "global", needed=False).size is None
    with pytest.raises(InputError, match=r'inputs="per_replica": .*name the inputs that have no batch dim'):
        inputs("x", "y").batch_dim(odd, {}, "per_replica", needed=True)
    assert inputs("x", "y", unbatched=["y"]).batch_dim(odd, {}, "per_replica", needed=True).batched == (True, False)
    assert inputs("n").batch_dim((torch.tensor(1.0),), {}, "per_replica", needed=True).size is None, (
        "nothing could have one"
    )
    assert inputs("x", "mask").samples((X, MASK), {}) == 4


def test_unbatched_is_a_list():
    with pytest.raises(InputError, match=r"unbatched=\['mask'\]"):
        inputs("x", unbatched="mask")


def test_what_sizes_told_once_holds_for_a_last_batch_of_the_size_of_a_mask():
    stored, short = inputs("x", "mask"), (X[:3], MASK)
    stored.batch_dim((X, MASK), {}, "per_replica", needed=True)
    assert stored.batch_dim(short, {}, "per_replica", needed=True).batched == (True, False)
    plain = inputs("x", "mask")
    plain.batch_dim((X, MASK), {}, "global", needed=True)
    assert plain.batch_dim(short, {}, "global", needed=True).batched == (True, True), "a global batch may say anything"


def test_samples_of_all_ranks_are_one_batch_in_their_order_and_masks_stay():
    def body(rank):
        truths = torch.tensor([[rank == 1], [True]])
        (x, mask), kwargs = inputs("x", "mask").gather((X[2 * rank : 2 * rank + 2], MASK), {"truths": truths})
        return x, mask, kwargs["truths"]

    for x, mask, truths in run_ranks(2, body):
        assert torch.equal(x, X) and torch.equal(mask, MASK)
        assert truths.flatten().tolist() == [False, True, True, True]


@pytest.mark.parametrize(
    ("own", "fault"),
    [
        (lambda rank: (X[: 2 + rank], 1), r"rank \d passes .*, rank \d passes .*drop it"),
        (lambda rank: (X, rank), "n is 0 on rank 0 and 1 on rank 1|n is 1 on rank 1 and 0 on rank 0"),
    ],
)
def test_ranks_that_pass_something_else_are_refused_with_what_it_is(own, fault):
    def body(rank):
        with pytest.raises(InputError, match=fault):
            inputs("x", "n").check(own(rank), {})
        inputs("x", "n").check((X, 1), {})
        return True

    assert run_ranks(2, body) == [True, True]


def test_a_digest_knows_values_shapes_and_dtypes():
    tensors = [X, X.view(3, 4), X.double(), X.view(torch.int32), X + 1, X.t().contiguous(), torch.ones(0), X[:0]]
    assert len({digest([tensor]) for tensor in tensors}) == len(tensors)
    assert digest([X, MASK]) == digest([X.clone(), MASK.clone()]) != digest([MASK, X])
    assert digest([X.t()]) == digest([X.t().contiguous()])


def test_another_dtype_is_named_with_a_remedy():
    check_dtypes(["x"], [torch.float32], [torch.float32])
    with pytest.raises(InputError, match=r"x is float64, .* compiled for float32; pass x\.to\(torch\.float32\)"):
        check_dtypes(["x", "y"], [torch.float32, torch.int64], [torch.float64, torch.int64])

"""Outputs of microbatches become one, and gradients go the way back."""

import pytest
import torch

from shardwright.errors import LayoutError
from shardwright.layout import Block, Shard
from shardwright.runtime.pipeline import PipelineOutput
from shardwright.runtime.pipeline.outputs import combine, microbatch_gradient

INTERLEAVED = Shard(axis="mb", blocks=(Block(2, 3, 2),))  # twelve rows: two runs of three microbatches of two rows


def out(how, shape, **rest):
    return PipelineOutput(value="y", stage=0, how=how, shape=shape, dtype=torch.float64, gradient=True, **rest)


@pytest.mark.parametrize(
    "leaving",
    [
        out("sum", (2,)),
        out("mean", (2,)),
        out("cat", (12, 2)),
        out("cat", (2, 12), dim=1),
        out("cat", (12, 2), sharding=INTERLEAVED),
        out("cat", (2, 11), dim=-1),  # 4, 4 and 3
    ],
)
def test_a_gradient_goes_the_way_that_the_value_came(leaving):
    whole = torch.randn(leaving.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    shards = [microbatch_gradient(leaving, whole, 3, at) if leaving.how == "cat" else whole + at for at in range(3)]
    leaves = [shard.clone().requires_grad_() for shard in shards]
    joined = combine(leaving, leaves)
    assert joined.shape == leaving.shape
    if leaving.how == "cat":
        assert torch.equal(joined, whole)
    gradient = torch.randn(leaving.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    joined.backward(gradient)
    for at, leaf in enumerate(leaves):
        torch.testing.assert_close(microbatch_gradient(leaving, gradient, 3, at), leaf.grad)


def test_what_is_the_same_in_all_counts_once():
    leaving, gradient = out("same", (2,)), torch.ones(2)
    assert torch.equal(combine(leaving, [gradient * 3] * 4), gradient * 3)
    assert torch.equal(sum(microbatch_gradient(leaving, gradient, 4, at) for at in range(4)), gradient)


def test_an_output_is_joined_along_a_dim_that_it_has():
    with pytest.raises(LayoutError, match=r"output y of shape \(\) has no dim 0 to join"):
        out("cat", ())
